// Best-first tree with a binary heap. Candidates are ordered by (score descending, rank tuple ascending); a rank tuple
// is the parent node's path of ranks and one rank more, so it is compared only where scores tie.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kdtree_heap_tree.h"

namespace {

struct Candidate {
  double score;
  int32_t parent;
  int16_t depth;  // 1-based
  int32_t rank;
};

// The pieces of the workspace. `rank_paths` [1+B, L]: ranks from depth 1 to each node. `seen`: a hash set of ids.
struct Workspace {
  Candidate* heap;
  int32_t* rank_paths;
  int32_t* last_child;
  int32_t* seen;
  uint32_t seen_mask;
};

constexpr size_t kAlign = 8;

size_t aligned(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// Every pop pushes two candidates at most, so the heap never holds more than B + 1 of them.
size_t heap_bytes(int32_t budget) { return aligned(sizeof(Candidate) * (static_cast<size_t>(budget) + 2)); }

size_t path_bytes(int32_t depth_limit, int32_t budget) {
  return aligned(sizeof(int32_t) * (static_cast<size_t>(budget) + 1) * std::max(depth_limit, 1));
}

size_t child_bytes(int32_t budget) { return aligned(sizeof(int32_t) * (static_cast<size_t>(budget) + 1)); }

uint32_t seen_slots(int32_t width) {
  uint32_t slots = 4;
  while (slots < 2 * static_cast<uint32_t>(width)) slots *= 2;
  return slots;
}

bool in_range(int32_t depth_limit, int32_t width, int32_t budget) {
  return depth_limit >= 0 && depth_limit <= KDTREE_HEAP_TREE_MAX_DEPTH && width >= 0 &&
         width <= KDTREE_HEAP_TREE_MAX_WIDTH && budget >= 0 && budget <= KDTREE_HEAP_TREE_MAX_BUDGET;
}

Workspace carve(const kdtree_heap_tree_args& a) {
  char* at = static_cast<char*>(a.workspace);
  Workspace w{};
  w.heap = reinterpret_cast<Candidate*>(at);
  at += heap_bytes(a.budget);
  w.rank_paths = reinterpret_cast<int32_t*>(at);
  at += path_bytes(a.depth_limit, a.budget);
  w.last_child = reinterpret_cast<int32_t*>(at);
  at += child_bytes(a.budget);
  w.seen = reinterpret_cast<int32_t*>(at);
  w.seen_mask = seen_slots(a.width) - 1;
  return w;
}

// Adds id (>= 0) to the set; false if it was there.
bool add(const Workspace& w, int32_t id) {
  uint32_t slot = (static_cast<uint32_t>(id) * 2654435761u) & w.seen_mask;
  while (w.seen[slot] >= 0) {
    if (w.seen[slot] == id) return false;
    slot = (slot + 1) & w.seen_mask;
  }
  w.seen[slot] = id;
  return true;
}

// The first fault of the lists, as {status, depth, rank}.
void check(const kdtree_heap_tree_args& a, const Workspace& w, const float* lp, const int32_t* ids, int32_t depths,
           int32_t* status) {
  for (int32_t d = 0; d < depths; ++d) {
    std::memset(w.seen, 0xff, sizeof(int32_t) * (static_cast<size_t>(w.seen_mask) + 1));
    const float* row = lp + static_cast<size_t>(d) * a.width;
    const int32_t* row_ids = ids + static_cast<size_t>(d) * a.width;
    for (int32_t r = 0; r < a.width; ++r) {
      int32_t fault = KDTREE_LIST_OK;
      if (std::isnan(row[r])) {
        fault = KDTREE_LIST_NAN;
      } else if (row[r] == INFINITY) {
        fault = KDTREE_LIST_INFINITE;
      } else if (row_ids[r] < 0 || (a.vocab_size > 0 && row_ids[r] >= a.vocab_size)) {
        fault = KDTREE_LIST_VOCABULARY;
      } else if (r > 0 && row[r] > row[r - 1]) {
        fault = KDTREE_LIST_UNSORTED;
      } else if (std::isfinite(row[r]) && !add(w, row_ids[r])) {
        fault = KDTREE_LIST_REPEATED;
      }
      if (fault != KDTREE_LIST_OK) {
        status[0] = fault;
        status[1] = d + 1;
        status[2] = r;
        return;
      }
    }
  }
  status[0] = status[1] = status[2] = 0;
}

// One request's output block.
struct Block {
  int32_t *node_count, *tokens, *parents, *depths, *ranks;
  double* scores;
};

int32_t build(const kdtree_heap_tree_args& a, const Workspace& w, const float* lp, const int32_t* ids,
              int32_t depth_limit, int32_t budget, const Block& out) {
  const int32_t stride = std::max(a.depth_limit, 1);
  // "a comes out after b": the order that makes std::push_heap keep the best candidate in front.
  const auto after = [&](const Candidate& x, const Candidate& y) {
    if (x.score != y.score) return x.score < y.score;
    const int32_t* px = w.rank_paths + static_cast<size_t>(x.parent) * stride;
    const int32_t* py = w.rank_paths + static_cast<size_t>(y.parent) * stride;
    const int32_t shared = std::min<int32_t>(x.depth, y.depth);
    for (int32_t i = 0; i < shared; ++i) {
      const int32_t rx = i + 1 < x.depth ? px[i] : x.rank;
      const int32_t ry = i + 1 < y.depth ? py[i] : y.rank;
      if (rx != ry) return rx > ry;
    }
    return x.depth > y.depth;  // a prefix beats its extensions
  };
  const auto value = [&](int32_t depth, int32_t rank) {
    return static_cast<double>(lp[static_cast<size_t>(depth - 1) * a.width + rank]);
  };

  int32_t n = 0, size = 0;
  const auto push = [&](double score, int32_t parent, int32_t depth, int32_t rank) {
    w.heap[size++] = Candidate{score, parent, static_cast<int16_t>(depth), rank};
    std::push_heap(w.heap, w.heap + size, after);
  };
  if (depth_limit > 0 && a.width > 0 && std::isfinite(value(1, 0))) push(value(1, 0), 0, 1, 0);
  while (size > 0 && n < budget) {
    std::pop_heap(w.heap, w.heap + size, after);
    const Candidate best = w.heap[--size];
    ++n;
    out.tokens[n] = ids[static_cast<size_t>(best.depth - 1) * a.width + best.rank];
    out.parents[n] = best.parent;
    out.depths[n] = best.depth;
    out.ranks[n] = best.rank;
    out.scores[n] = best.score;
    int32_t* path = w.rank_paths + static_cast<size_t>(n) * stride;
    std::memcpy(path, w.rank_paths + static_cast<size_t>(best.parent) * stride, sizeof(int32_t) * (best.depth - 1));
    path[best.depth - 1] = best.rank;

    const double own = value(best.depth, best.rank);
    if (best.rank + 1 < a.width && std::isfinite(value(best.depth, best.rank + 1)))
      push((best.score - own) + value(best.depth, best.rank + 1), best.parent, best.depth, best.rank + 1);
    if (best.depth < depth_limit && std::isfinite(value(best.depth + 1, 0)))
      push(best.score + value(best.depth + 1, 0), n, best.depth + 1, 0);
  }
  return n;
}

void link(int32_t n, const int32_t* parents, int32_t* last_child, int32_t* first_child, int32_t* next_sibling) {
  std::fill(last_child, last_child + n + 1, -1);
  for (int32_t i = 1; i <= n; ++i) {
    const int32_t parent = parents[i], before = last_child[parent];
    (before < 0 ? first_child[parent] : next_sibling[before]) = i;
    last_child[parent] = i;
  }
}

void see(int32_t n, const int32_t* parents, size_t words, uint32_t* visibility) {
  for (int32_t i = 0; i <= n; ++i) {
    uint32_t* row = visibility + static_cast<size_t>(i) * words;
    // A node is younger than all that its parent sees, so only the words up to the parent's hold bits.
    if (i > 0)
      std::memcpy(row, visibility + static_cast<size_t>(parents[i]) * words, sizeof(uint32_t) * (parents[i] / 32 + 1));
    row[i / 32] |= 1u << (i % 32);
  }
}

void trace(int32_t n, const int32_t* parents, const int32_t* depths, size_t stride, int32_t* paths) {
  for (int32_t i = 0; i <= n; ++i) {
    int32_t* row = paths + static_cast<size_t>(i) * stride;
    if (i > 0) std::memcpy(row, paths + static_cast<size_t>(parents[i]) * stride, sizeof(int32_t) * depths[i]);
    row[depths[i]] = i;
  }
}

template <typename T>
T* block(T* array, size_t request, size_t size) {
  return array == nullptr ? nullptr : array + request * size;
}

kdtree_heap_tree_result refuse(const kdtree_heap_tree_args* a) {
  if (a == nullptr) return KDTREE_HEAP_TREE_NO_POINTER;
  if (a->struct_size != sizeof(kdtree_heap_tree_args)) return KDTREE_HEAP_TREE_VERSION;
  if (a->requests < 0 || a->vocab_size < 0 || a->checked < 0 || a->checked > 1 ||
      !in_range(a->depth_limit, a->width, a->budget))
    return KDTREE_HEAP_TREE_BAD_SIZE;
  const bool lists = a->depth_limit > 0 && a->width > 0 && a->requests > 0;
  if ((lists && (a->lp == nullptr || a->ids == nullptr)) || a->workspace == nullptr) return KDTREE_HEAP_TREE_NO_POINTER;
  if (a->requests > 0)
    for (const void* required :
         {static_cast<const void*>(a->node_count), static_cast<const void*>(a->tokens),
          static_cast<const void*>(a->parents), static_cast<const void*>(a->depths), static_cast<const void*>(a->ranks),
          static_cast<const void*>(a->scores), static_cast<const void*>(a->status)})
      if (required == nullptr) return KDTREE_HEAP_TREE_NO_POINTER;
  if (a->workspace_size < kdtree_heap_tree_workspace(a->depth_limit, a->width, a->budget) ||
      reinterpret_cast<uintptr_t>(a->workspace) % kAlign != 0)
    return KDTREE_HEAP_TREE_WORKSPACE;
  for (int32_t r = 0; r < a->requests; ++r) {
    if (a->depth_limits != nullptr && (a->depth_limits[r] < 0 || a->depth_limits[r] > a->depth_limit))
      return KDTREE_HEAP_TREE_BAD_SIZE;
    if (a->budgets != nullptr && (a->budgets[r] < 0 || a->budgets[r] > a->budget)) return KDTREE_HEAP_TREE_BAD_SIZE;
  }
  return KDTREE_HEAP_TREE_OK;
}

}  // namespace

extern "C" size_t kdtree_heap_tree_workspace(int32_t depth_limit, int32_t width, int32_t budget) {
  if (!in_range(depth_limit, width, budget)) return 0;
  return heap_bytes(budget) + path_bytes(depth_limit, budget) + child_bytes(budget) +
         sizeof(int32_t) * seen_slots(width);
}

extern "C" kdtree_heap_tree_result kdtree_heap_tree(const kdtree_heap_tree_args* args) {
  if (const kdtree_heap_tree_result refused = refuse(args)) return refused;
  const kdtree_heap_tree_args& a = *args;
  const Workspace w = carve(a);
  const size_t rows = static_cast<size_t>(a.budget) + 1, words = (rows + 31) / 32;
  const size_t list = static_cast<size_t>(a.depth_limit) * a.width, path = static_cast<size_t>(a.depth_limit) + 1;
  kdtree_heap_tree_result result = KDTREE_HEAP_TREE_OK;

  for (size_t r = 0; r < static_cast<size_t>(a.requests); ++r) {
    const float* lp = block(a.lp, r, list);
    const int32_t* ids = block(a.ids, r, list);
    const int32_t depth_limit = a.depth_limits != nullptr ? a.depth_limits[r] : a.depth_limit;
    const int32_t budget = a.budgets != nullptr ? a.budgets[r] : a.budget;
    const Block out{a.node_count + r,         block(a.tokens, r, rows), block(a.parents, r, rows),
                    block(a.depths, r, rows), block(a.ranks, r, rows),  block(a.scores, r, rows)};
    out.tokens[0] = a.root_tokens != nullptr ? a.root_tokens[r] : 0;
    out.parents[0] = -1;
    out.depths[0] = out.ranks[0] = 0;
    out.scores[0] = 0.0;

    int32_t* status = a.status + 3 * r;
    if (a.checked != 0)
      std::fill_n(status, 3, 0);
    else
      check(a, w, lp, ids, depth_limit, status);
    int32_t n = 0;
    if (status[0] == KDTREE_LIST_OK)
      n = build(a, w, lp, ids, depth_limit, budget, out);
    else
      result = KDTREE_HEAP_TREE_REFUSED;
    *out.node_count = n;
    std::fill(out.tokens + n + 1, out.tokens + rows, 0);
    std::fill(out.parents + n + 1, out.parents + rows, -1);
    std::fill(out.depths + n + 1, out.depths + rows, 0);
    std::fill(out.ranks + n + 1, out.ranks + rows, 0);
    std::fill(out.scores + n + 1, out.scores + rows, 0.0);

    if (int32_t* positions = block(a.positions, r, rows)) {
      const int32_t prefix = a.prefix_lengths != nullptr ? a.prefix_lengths[r] : 0;
      for (int32_t i = 0; i <= n; ++i) positions[i] = prefix + out.depths[i];
      std::fill(positions + n + 1, positions + rows, 0);
    }
    int32_t *first_child = block(a.first_child, r, rows), *next_sibling = block(a.next_sibling, r, rows);
    if (first_child != nullptr && next_sibling != nullptr) {
      std::fill(first_child, first_child + rows, -1);
      std::fill(next_sibling, next_sibling + rows, -1);
      link(n, out.parents, w.last_child, first_child, next_sibling);
    }
    if (uint32_t* visibility = block(a.visibility, r, rows * words)) {
      std::fill(visibility, visibility + rows * words, 0u);
      see(n, out.parents, words, visibility);
    }
    if (int32_t* paths = block(a.paths, r, rows * path)) {
      std::fill(paths, paths + rows * path, -1);
      trace(n, out.parents, out.depths, path, paths);
    }
  }
  return result;
}
