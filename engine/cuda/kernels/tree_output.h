// What the tree kernels share: which tree a request asks for, and the arrays that it is written to.
#pragma once

#include "common/error.h"
#include "kernels/tree_lists.h"
#include "kernels/tree_scratch.h"

namespace kdtree {

// The tree that a request asks for.
struct Asked {
  int depth_limit, budget;
  Outcome outcome;

  __device__ Asked(const kdtree_tree_build_args& a, int request)
      : depth_limit(a.depth_limits != nullptr ? a.depth_limits[request] : a.depth_limit),
        budget(a.budgets != nullptr ? a.budgets[request] : a.budget),
        outcome(outcome_before(a.before, request)) {
    if (outcome.failed()) return;
    if (depth_limit < 0 || depth_limit > a.depth_limit)
      outcome = {KDTREE_REQUEST_OWN_SIZE, depth_limit, a.depth_limit};
    else if (budget < 0 || budget > a.budget)
      outcome = {KDTREE_REQUEST_OWN_SIZE, budget, a.budget};
  }
};

// How the host divides the dynamic shared memory of a call, all of whose blocks have the same. Sets of ids are at its
// beginning, then what the kernel finds; the costs of list entries of tree_build_kernel are at its end.
struct Division {
  size_t bytes;
  Divider by_width, by_reach;    // of lists, and of what the budget reaches of them
  Divider by_columns, by_words;  // of paths and visibility
  int near_bits, set_bits, set_rows;
  bool early;  // visibility may be written before the lists are there: nothing older is at work any more
};

// What the caller says of node 0.
struct Root {
  int token, position;

  static __device__ Root of(const kdtree_tree_build_args& a, int request) {
    return {a.root_tokens != nullptr ? a.root_tokens[request] : 0,
            a.prefix_lengths != nullptr ? a.prefix_lengths[request] : 0};
  }
};

// A row of the arrays that have one for every node; as it is, that of a place where no node is.
struct NodeRow {
  int token = 0, parent = -1, depth = 0, rank = 0, position = 0, first_child = -1, next_sibling = -1;
  double score = 0;
};

struct Output {
  const kdtree_tree_build_args& a;
  size_t request;
  size_t rows = static_cast<size_t>(a.budget) + 1;

  template <typename T>
  __device__ T* block(T* array, size_t columns = 1) const {
    return array == nullptr ? nullptr : array + request * rows * columns;
  }

  __device__ void write(int i, const NodeRow& row) const {
    block(a.parents)[i] = row.parent;
    block(a.depths)[i] = row.depth;
    block(a.ranks)[i] = row.rank;
    block(a.scores)[i] = row.score;
    if (a.positions != nullptr) block(a.positions)[i] = row.position;
    if (a.first_child != nullptr) {
      block(a.first_child)[i] = row.first_child;
      block(a.next_sibling)[i] = row.next_sibling;
    }
    block(a.tokens)[i] = row.token;  // read from global memory: it comes last
  }
};

// Stores `count` words: 16 bytes a thread as far as they are aligned. from(i) gives what yields word i and those behind
// it, one a call. thread: this one's number among the `threads` that store.
template <typename F>
__device__ void store_all(uint32_t* to, int count, int thread, int threads, const F& from) {
  const int odd = static_cast<int>(reinterpret_cast<uintptr_t>(to) / sizeof(uint32_t) % 4);
  const int head = min(count, (4 - odd) % 4), fours = (count - head) / 4, tail = head + 4 * fours;
  Four* const wide = reinterpret_cast<Four*>(to + head);
  KDTREE_UNROLL_BY(1)
  for (int i = thread; i < fours; i += threads) {
    auto next = from(head + 4 * i);
    Four four;
    KDTREE_UNROLL
    for (int j = 0; j < 4; ++j) four.of[j] = next();
    wide[i] = four;
  }
  if (thread >= head + count - tail) return;
  const int i = thread < head ? thread : tail + thread - head;
  to[i] = from(i)();
}

__host__ __device__ constexpr int visibility_words(int budget) { return budget / 32 + 1; }

}  // namespace kdtree
