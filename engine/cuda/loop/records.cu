// What the host learns of a round: records, and if asked for the lists, the tree and the logits.

#include <algorithm>
#include <thread>

#include "loop/run.h"

namespace kdtree {

namespace {

constexpr int kLooks = 1 << 12;  // between two questions to the stream whether something has gone wrong

}  // namespace

// Sooner than the stream's end by what the drafter does behind the commit; the next round is launched meanwhile.
void Run::wait_until_told() {
  ++told_;
  const auto told = [&](size_t request) {
    return __atomic_load_n(&d_->records[request].told, __ATOMIC_ACQUIRE) == told_;
  };
  for (size_t r = 0; r < records_.size(); ++r)
    for (int look = 1; !told(r); ++look) {
      if (look % kLooks != 0) continue;
      const cudaError_t state = cudaStreamQuery(stream_);
      if (state == cudaErrorNotReady) {
        std::this_thread::yield();
        continue;
      }
      require_cuda(state, "cudaStreamQuery");
      // All is done: it has been told between the look and the question, or never will be.
      if (!told(r))
        throw EngineFailure(KDTREE_CUDA, "the stream came to its end without what request " + std::to_string(r) +
                                             " was told for the " + std::to_string(told_) + ". time");
    }
}

int Run::collect() {
  wait_until_told();
  // What is copied from the device beside the records is there at the stream's end.
  if (keep_traces_ || keep_logits_) require_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  std::copy(d_->records, d_->records + records_.size(), records_.begin());
  for (int r = 0; r < requests_; ++r) keep(r, records_[static_cast<size_t>(r)]);
  if (policy_ != nullptr) choose_budget();
  return active();
}

// The next round's.
void Run::choose_budget() {
  for (size_t r = 0; r < records_.size(); ++r)
    if (records_[r].ran) policy_->see(d_->host_scores + r * rows_of_block(), records_[r].nodes);
  const BudgetPolicy::Choice choice = policy_->choose();
  predictions_.push_back({choice.budget, 0, choice.tokens, choice.seconds});
  budget_ = replays_ ? budget_step(choice.budget, shape().budget) : choice.budget;
  width_ = std::min(budget_, vocab_);
}

void Run::keep(int request, const Record& record) {
  Progress& p = progress_[static_cast<size_t>(request)];
  if (p.finish != KDTREE_RUNNING) return;
  p.tokens.insert(p.tokens.end(), record.output, record.output + record.output_count);
  p.finish = record.finish;
  p.cache_length = record.cache_length;
  if (record.finish == KDTREE_FINISH_ERROR) std::copy(record.status, record.status + 3, p.status);
  if (!record.ran) return;
  kdtree_round round{};
  round.prefix_length = record.prefix_length;
  round.nodes = record.nodes;
  round.depth_limit = record.depth_limit;
  round.accepted = record.kept;
  std::copy(record.path, record.path + record.kept + 1, round.path);
  std::copy(record.ranks, record.ranks + record.kept, round.ranks);
  std::copy(seconds_, seconds_ + kStageCount, round.seconds);
  round.wall_seconds = std::chrono::duration<double>(Clock::now() - started_).count();
  p.rounds.push_back(round);
  if (keep_traces_) p.traces.push_back(trace_of(request, record));
  if (keep_logits_)
    for (int i = 0; i <= record.kept; ++i) {
      const size_t row =
          static_cast<size_t>(request) * (static_cast<size_t>(budget_) + 1) + static_cast<size_t>(record.path[i]);
      const std::vector<float> logits =
          download(d_->logits + row * static_cast<size_t>(vocab_), static_cast<size_t>(vocab_));
      p.logits.insert(p.logits.end(), logits.begin(), logits.end());
    }
}

TraceRound Run::trace_of(int request, const Record& record) const {
  const Buffers& d = *d_;
  const size_t r = static_cast<size_t>(request), n = static_cast<size_t>(budget_) + 1,
               used = static_cast<size_t>(record.nodes) + 1;
  TraceRound t{};
  t.nodes = record.nodes;
  t.bonus = record.bonus;
  t.depths = record.list_depths;
  // A request's own lists are as wide as its nodes in this round, or the vocabulary, or 1 for a chain.
  const int nodes = std::min(budgets_[r], capacities_[r] - record.prefix_length - 1);
  t.width = method_ == KDTREE_DDTREE ? std::min({width_, nodes, vocab_}) : width_;
  if (t.depths > 0)
    for (int depth = 0; depth < t.depths; ++depth) {
      const size_t row = (r * static_cast<size_t>(shape().depth) + static_cast<size_t>(depth));
      const std::vector<int32_t> ids =
          download(d.ids + row * static_cast<size_t>(width_), static_cast<size_t>(t.width));
      const std::vector<float> lp = download(d.lp + row * static_cast<size_t>(width_), static_cast<size_t>(t.width));
      t.ids.insert(t.ids.end(), ids.begin(), ids.end());
      t.lp.insert(t.lp.end(), lp.begin(), lp.end());
      t.logz.push_back(download(d.logz + row, 1)[0]);
    }
  t.tokens = download(d.tokens + r * n, used);
  t.parents = download(d.parents + r * n, used);
  t.node_depths = download(d.depths + r * n, used);
  t.ranks = download(d.ranks + r * n, used);
  t.scores = download(d.scores + r * n, used);
  t.choices = download(d.choices + r * n, used);
  return t;
}

}  // namespace kdtree
