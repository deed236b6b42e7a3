// Tree and choices -> accepted path: the longest path that follows the target's own choices. One block a request.
//
// Every node asks at once whether its token is the choice at its parent; if so it is the parent's one successor, and
// the walk is a chain of look-ups in shared memory, one for each accepted node, however many siblings there are.
// Structural faults come first, in node order, then what the walk meets, as in reference/accept.py. A walk that goes
// deeper than L is refused as OWN_SIZE (place: its depth, detail: L), after all that the reference would refuse.

#include "common/block.h"
#include "common/error.h"
#include "kernels/request.h"

namespace kdtree {
namespace {

constexpr int kMostThreads = 512;
constexpr int kEmpty = -1;
constexpr int kNoNode = 0x7fffffff;

// A tree in shared memory, and a set of its nodes keyed by (parent, token).
struct Tree {
  int* tokens;
  int* parents;
  int* choices;
  int* successors;  // the child that the choice leads to, or kEmpty
  int* set;
  unsigned slots;  // a power of two, at least twice the nodes

  static size_t bytes(int rows) { return (4 * static_cast<size_t>(rows) + slots_of(rows)) * sizeof(int); }

  __host__ __device__ static unsigned slots_of(int rows) {
    unsigned slots = kWarp;
    while (slots < 2 * static_cast<unsigned>(rows)) slots *= 2;
    return slots;
  }

  __device__ Tree(unsigned char* memory, int rows)
      : tokens(reinterpret_cast<int*>(memory)),
        parents(tokens + rows),
        choices(parents + rows),
        successors(choices + rows),
        set(successors + rows),
        slots(slots_of(rows)) {}

  __device__ bool precedes(int node) const { return parents[node] >= 0 && parents[node] < node; }

  __device__ bool siblings_alike(int a, int b) const { return parents[a] == parents[b] && tokens[a] == tokens[b]; }

  // Adds `node`; returns the later one of it and an equal sibling found there, or kNoNode. The set keeps the earlier
  // one, so among three the second is always named by somebody.
  __device__ int add(int node) {
    unsigned slot =
        static_cast<unsigned>(parents[node]) * 0x9e3779b1u + static_cast<unsigned>(tokens[node]) * 0x85ebca77u;
    for (slot = (slot ^ slot >> 15) & (slots - 1);; slot = (slot + 1) & (slots - 1)) {
      const int found = atomicCAS(&set[slot], kEmpty, node);
      if (found == kEmpty) return kNoNode;
      if (siblings_alike(found, node)) return max(atomicMin(&set[slot], node), node);
    }
  }
};

__device__ void write_result(const kdtree_tree_accept_args& a, int request, const Outcome& outcome, int accepted,
                             int node_here, int bonus) {
  const int lane = lane_id();
  const bool failed = outcome.failed();
  if (lane <= a.depth_limit)
    a.path[static_cast<size_t>(request) * (a.depth_limit + 1) + lane] = failed ? -1 : node_here;
  if (lane > 0) return;
  a.accepted[request] = failed ? -1 : accepted;
  a.bonus[request] = failed ? -1 : bonus;
  write_status(a.status, request, outcome);
}

// By one warp: lane d holds the node at depth d.
__device__ void walk(const kdtree_tree_accept_args& a, int request, const Tree& tree) {
  int node = 0, depth = 0;
  int node_here = lane_id() == 0 ? 0 : -1;
  while (tree.choices[node] >= 0 && tree.successors[node] != kEmpty) {
    node = tree.successors[node];
    if (lane_id() == ++depth) node_here = node;
  }
  const int bonus = tree.choices[node];
  Outcome outcome;
  if (bonus < 0)
    outcome = {KDTREE_REQUEST_NO_CHOICE, node, 0};
  else if (depth > a.depth_limit)
    outcome = {KDTREE_REQUEST_OWN_SIZE, depth, a.depth_limit};
  write_result(a, request, outcome, depth, node_here, bonus);
}

__global__ void __launch_bounds__(kMostThreads) tree_accept_kernel(kdtree_tree_accept_args a) {
  KDTREE_DYNAMIC_SHARED(memory);
  __shared__ int first_fault;
  const int request = static_cast<int>(blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int rows = a.budget + 1;
  const int count = a.node_count[request];
  Outcome refused = outcome_before(a.before, request);
  __syncthreads();
  if (!refused.failed() && (count < 0 || count > a.budget)) refused = {KDTREE_REQUEST_OWN_SIZE, count, a.budget};
  if (refused.failed()) {
    if (thread < kWarp) write_result(a, request, refused, 0, -1, 0);
    return;
  }

  Tree tree(memory, rows);
  const size_t block = static_cast<size_t>(request) * rows;
  for (int node = thread; node <= count; node += threads) {
    tree.tokens[node] = a.tokens[block + node];
    tree.parents[node] = a.parents[block + node];
    tree.choices[node] = a.choices[block + node];
    tree.successors[node] = kEmpty;
  }
  for (unsigned slot = thread; slot < tree.slots; slot += threads) tree.set[slot] = kEmpty;
  if (thread == 0) first_fault = kNoNode;
  __syncthreads();

  for (int node = thread + 1; node <= count; node += threads) {
    int fault = node;
    if (tree.precedes(node)) {
      fault = tree.add(node);
      const int parent = tree.parents[node];
      // Exchanged, for equal siblings write here together before they are refused.
      if (tree.tokens[node] == tree.choices[parent]) atomicExch(&tree.successors[parent], node);
    }
    if (fault != kNoNode) atomicMin(&first_fault, fault);
  }
  __syncthreads();

  if (thread >= kWarp) return;
  const int faulty = first_fault;
  if (faulty == kNoNode) {
    walk(a, request, tree);
    return;
  }
  Outcome outcome{KDTREE_REQUEST_PARENT, faulty, tree.parents[faulty]};
  if (tree.precedes(faulty)) {
    int sibling = 1;
    while (!tree.siblings_alike(sibling, faulty)) ++sibling;
    outcome = {KDTREE_REQUEST_TWIN, faulty, sibling};
  }
  write_result(a, request, outcome, 0, -1, 0);
}

}  // namespace
}  // namespace kdtree

using namespace kdtree;

extern "C" kdtree_status kdtree_tree_accept(const kdtree_tree_accept_args* args) {
  if (args == nullptr) return fail(KDTREE_POINTER, "kdtree_tree_accept: args is NULL");
  const kdtree_tree_accept_args& a = *args;
  Arguments arguments("kdtree_tree_accept");
  arguments.version(a.struct_size, sizeof(a))
      .range("requests", a.requests, 1, KDTREE_MAX_REQUESTS)
      .range("budget", a.budget, 0, KDTREE_MAX_BUDGET)
      .range("depth_limit", a.depth_limit, 0, KDTREE_MAX_DEPTH)
      .array("node_count", a.node_count, sizeof(int32_t))
      .array("tokens", a.tokens, sizeof(int32_t))
      .array("parents", a.parents, sizeof(int32_t))
      .array("choices", a.choices, sizeof(int32_t))
      .array("before", a.before, sizeof(int32_t), false)
      .array("accepted", a.accepted, sizeof(int32_t))
      .array("path", a.path, sizeof(int32_t))
      .array("bonus", a.bonus, sizeof(int32_t))
      .array("status", a.status, sizeof(int32_t));
  if (arguments.failed()) return arguments.status();
  const int rows = a.budget + 1;
  const size_t threads = round_up(static_cast<size_t>(rows < kMostThreads ? rows : kMostThreads), kWarp);
  KDTREE_LAUNCH(tree_accept_kernel, dim3(static_cast<unsigned>(a.requests)), dim3(static_cast<unsigned>(threads)),
                Tree::bytes(rows), static_cast<cudaStream_t>(a.stream), a);
  return check_launch("tree_accept_kernel");
}
