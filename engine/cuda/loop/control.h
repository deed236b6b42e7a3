// What a run keeps of its requests on the device, and the kernels that decide: what a round may do, how much of the
// accepted path is kept, and what is output. reference/loop.py
#pragma once

#include "common/error.h"
#include "kdtree_decode.h"

namespace kdtree {

constexpr int kMostPath = KDTREE_MAX_DEPTH + 1;
// Status of a request that has nothing to do in a round: no stage sets it, all carry it on.
constexpr int kDone = 100;

// What the host learns of a request when a round is committed: pinned memory, which the device writes and the host
// looks at until `told` says that it is there.
struct Record {
  int32_t told;    // how often, the prompt's end included; written last
  int32_t finish;  // kdtree_finish
  int32_t status[3];
  int32_t ran;  // whether the round was this request's; the following are only then set
  int32_t prefix_length, nodes, depth_limit, list_depths;
  int32_t kept;  // committed nodes, the root not counted
  int32_t bonus;
  int32_t output_count;
  int32_t path[kMostPath], ranks[kMostPath];
  int32_t output[kMostPath + 1];
  int32_t cache_length;
};

// All arrays on the device, one entry a request unless a shape is given.
struct Control {
  int requests;
  int method;       // kdtree_method
  int width;        // N: rows of a block
  int path_stride;  // L + 1
  bool plans_next;  // what ends a round, or the prompt, plans the next one; else plan_round does
  int stop_stride;

  // Of a request, constant.
  const int32_t *budgets, *capacities, *blocks, *stop_counts;
  const int32_t* stop_tokens;  // [R, stop_stride]
  const int32_t* full_finish;  // what running out of `wanted` means: length or capacity
  const int32_t* uses_dflash;

  // Of a request, from round to round.
  int32_t *prefix, *root, *wanted, *finish, *told;

  // Of the round.
  int32_t* status;        // [R, 3]
  int32_t* depth_limits;  // deepest depth that may be drafted
  int32_t* list_depths;   // depths proposed for
  int32_t* tree_budgets;
  int32_t* context;        // of DFlash: the context's length; -1: it has nothing to propose
  int32_t* rows_used;      // of the verify pass: nodes, -1: none
  int32_t* observed;       // committed nodes whose features DFlash takes, the root not counted; -1: none
  int32_t* observed_from;  // the first of their positions

  // Outputs of the stages.
  const int32_t *node_count, *tokens, *ranks;  // [R], [R, N], [R, N]
  const int32_t *accepted, *path, *bonus;      // [R], [R, L+1], [R]

  Record* records;  // on the host
};

// Before a round, unless the end of the one before plans it: limits, and the status kDone for requests that have
// finished.
kdtree_status plan_round(const Control& control, cudaStream_t stream);
// After tree_build: rows_used.
kdtree_status plan_verify(const Control& control, cudaStream_t stream);
// After all: how much of the accepted path is kept, what is output and finished, the next root, what the drafter
// observes, the records, and the next round's plan.
kdtree_status end_round(const Control& control, cudaStream_t stream);

// One pass over prompts: rows begin..begin+width-1 of each. prompts [R, stride]. Fills tokens, positions [R, width],
// rows_used, prefix (committed so far), and `ends`: 0 where the prompt's last row is in this pass, otherwise kDone, as
// status [R, 3]; observed.
struct PromptChunk {
  const int32_t* prompts;
  const int32_t* lengths;
  int stride, begin, width;
  int32_t *tokens, *positions, *last_positions;  // last_positions [R]: of the prompt's last row
  int32_t* ends;                                 // [R, 3]
};
kdtree_status plan_prompt(const Control& control, const PromptChunk& chunk, cudaStream_t stream);
// After the last pass: each request's first root from choices [R]; outputs it if it stops.
kdtree_status end_prompt(const Control& control, const int32_t* choices, const int32_t* lengths, cudaStream_t stream);
// Where the prompt ended in this pass, its choice is kept: into[r] = choices[r].
kdtree_status keep_choices(const Control& control, const int32_t* ends, const int32_t* choices, int32_t* into,
                           cudaStream_t stream);

}  // namespace kdtree
