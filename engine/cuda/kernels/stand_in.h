// Drafters that stand in for a real one: oracle, noisy oracle, replay. reference/drafter.py
#pragma once

#include "common/error.h"

namespace kdtree {

enum class StandInKind : int { kNone = 0, kOracle = 1, kNoisy = 2, kReplay = 3 };

// One request's stand-in; the pointers are device memory.
struct StandIn {
  StandInKind kind;
  int block_size;
  int prompt_length;
  const int32_t* golden;  // [golden_count] the tokens that follow the prompt
  int golden_count, right, max_rank;
  double miss;
  uint64_t seed;
  int list_count, list_depths, list_width;
  const int32_t* positions;  // [list_count] absolute position of each list's root, increasing
  const int32_t* ids;        // [list_count, list_depths, list_width]
  const float* lp;           // [list_count, list_depths, list_width]
  const float* rest;         // [list_count, list_depths] logit of every id that a row does not name
};

// Writes the logits of the depths that a stand-in proposes for, and how many those are: the smaller of depths[r] and
// what it has. Requests of kind kNone keep their depths.
struct StandInArgs {
  const StandIn* stand_ins;  // [R]
  const int32_t* prefix;     // [R] committed rows: the root's position
  int32_t* depths;           // [R] in: depths asked for; out: depths proposed
  float* logits;             // [R, depth_limit, vocab_size]
  int requests, depth_limit, vocab_size;
};
kdtree_status stand_in(const StandInArgs& args, cudaStream_t stream);

// `rest` of one replayed row: what probability the row leaves goes in equal parts to the ids it does not name, never
// above its last entry.
float replay_rest(const int32_t* ids, const float* lp, int width, int vocab_size);

}  // namespace kdtree
