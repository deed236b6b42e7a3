#include <algorithm>
#include <tuple>

#include "loop/buffers.h"
#include "loop/decoder.h"

namespace kdtree {
namespace {

constexpr int kRows = 256;  // steps in which cache rows are counted for graphs

}  // namespace

bool Shape::operator==(const Shape& other) const {
  const auto all = [](const Shape& s) {
    return std::tie(s.method, s.requests, s.depth, s.budget, s.width, s.stop_stride, s.longest, s.dflash, s.stand_ins,
                    s.sampled, s.policy, s.heap);
  };
  return all(*this) == all(other);
}

Shape Shape::bucket(int most_budget, int capacity, int vocab) const {
  Shape made = *this;
  if (method == KDTREE_DDTREE) {
    // Not a row more than the chain's, which a tree may be held against.
    if (budget != depth) made.budget = budget_step(budget, most_budget);
    made.width = std::min(made.budget, vocab);
  }
  while (made.stop_stride & (made.stop_stride - 1)) ++made.stop_stride;
  made.longest = static_cast<int>(std::min<int64_t>(ceil_div(longest, kRows) * kRows, capacity));
  return made;
}

Buffers::Buffers(const Shape& shape_, Decoder* decoder) : shape(shape_), vocab(decoder->vocab_size()) {
  const size_t requests = static_cast<size_t>(shape.requests);
  const size_t n = static_cast<size_t>(shape.budget) + 1, l = static_cast<size_t>(shape.depth),
               k = static_cast<size_t>(shape.width);
  const size_t v = static_cast<size_t>(vocab), taps = decoder->feature_bytes();
  const size_t chunk = static_cast<size_t>(decoder->prompt_width());
  for (int32_t** array :
       {&budgets,       &capacities, &blocks,   &stop_counts,  &full_finish,    &uses_dflash,    &prompt_lengths,
        &top_k,         &wanted,     &finish,   &depth_limits, &context,        &rows_used,      &observed,
        &observed_from, &told,       &accepted, &bonus,        &last_positions, &prompt_choices, &first_roots})
    arena.plan(array, requests);
  // What trees are made from, root..status, and the trees, status..paths, each in one piece for the host's heap. Where
  // they end comes logz.
  for (int32_t** array : {&root, &prefix, &list_depths, &tree_budgets}) arena.plan(array, requests);
  arena.plan(&lp, requests * l * k);
  arena.plan(&ids, requests * l * k);
  arena.plan(&status, 3 * requests);
  arena.plan(&node_count, requests);
  for (int32_t** array : {&tokens, &parents, &depths, &ranks, &positions}) arena.plan(array, requests * n);
  arena.plan(&scores, requests * n);
  arena.plan(&visibility, requests * n * ((n + 31) / 32));
  arena.plan(&paths, requests * n * (l + 1));
  arena.plan(&logz, requests * l);
  arena.plan(&stop_tokens, requests * static_cast<size_t>(shape.stop_stride));
  arena.plan(&temperatures, requests);
  arena.plan(&top_p, requests);
  arena.plan(&seeds, requests);
  arena.plan(&stand_ins, requests);
  arena.plan(&ends, 3 * requests);
  arena.plan(&draft_logits, requests * l * v);
  arena.plan(&choices, requests * n);
  arena.plan(&path, requests * (l + 1));
  arena.plan(&logits, requests * n * v);
  arena.plan(&features, requests * n * taps);
  arena.plan(&prompt_tokens, requests * chunk);
  arena.plan(&prompt_positions, requests * chunk);
  arena.plan(&prompt_logits, requests * v);
  arena.plan(&prompt_features, requests * chunk * taps);
  // Of trees of all sizes that a policy may choose.
  for (int budget = shape.policy ? std::min(1, shape.budget) : shape.budget;;
       budget = budget_step(budget + 1, shape.budget)) {
    const int width = shape.method == KDTREE_DDTREE ? std::min(budget, vocab) : shape.width;
    if (width > 0)
      topk_bytes = std::max(topk_bytes, kdtree_topk_logprob_workspace(shape.requests, shape.depth, vocab, width));
    tree_bytes = std::max(tree_bytes, kdtree_tree_build_workspace(shape.requests, shape.depth, width, budget));
    choice_bytes = std::max(choice_bytes, kdtree_target_choice_workspace(shape.requests, budget + 1, vocab));
    if (budget == shape.budget) break;
  }
  prompt_choice_bytes = kdtree_target_choice_workspace(shape.requests, 1, vocab);
  arena.plan(&topk_workspace, topk_bytes);
  arena.plan(&tree_workspace, tree_bytes);
  arena.plan(&choice_workspace, choice_bytes);
  arena.plan(&prompt_choice_workspace, prompt_choice_bytes);
}

void Buffers::allocate() {
  const size_t requests = static_cast<size_t>(shape.requests), n = static_cast<size_t>(shape.budget) + 1;
  arena.allocate();
  require_cuda(cudaMallocHost(reinterpret_cast<void**>(&records), requests * sizeof(Record)), "cudaMallocHost");
  if (shape.heap) heap = std::make_unique<HostHeap>(*this, vocab);
  if (shape.policy)
    require_cuda(cudaMallocHost(reinterpret_cast<void**>(&host_scores), requests * n * sizeof(double)),
                 "cudaMallocHost");

  control = Control{shape.requests,
                    shape.method,
                    shape.budget + 1,
                    shape.depth + 1,
                    !shape.policy,  // which chooses the width first
                    shape.stop_stride,
                    budgets,
                    capacities,
                    blocks,
                    stop_counts,
                    stop_tokens,
                    full_finish,
                    uses_dflash,
                    prefix,
                    root,
                    wanted,
                    finish,
                    told,
                    status,
                    depth_limits,
                    list_depths,
                    tree_budgets,
                    context,
                    rows_used,
                    observed,
                    observed_from,
                    node_count,
                    tokens,
                    ranks,
                    accepted,
                    path,
                    bonus,
                    records};
}

Buffers::~Buffers() {
  if (records != nullptr) (void)cudaFreeHost(records);
  if (host_scores != nullptr) (void)cudaFreeHost(host_scores);
}

}  // namespace kdtree
