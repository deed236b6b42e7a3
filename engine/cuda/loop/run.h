// One run: a batch of requests decoded by one method, round by round. reference/loop.py
//
// A round is four stages on one stream - draft, tree_build, verify, commit - with grids that do not depend on what is
// in it, so that a graph of it can be replayed; the host waits once, for the records of the commit.
#pragma once

#include <chrono>

#include "kernels/stand_in.h"
#include "loop/buffers.h"
#include "loop/decoder.h"

namespace kdtree {

// What a round saw, on the host.
struct TraceRound {
  int depths, width, nodes, bonus;
  std::vector<int32_t> ids, tokens, parents, node_depths, ranks, choices;
  std::vector<float> lp, logz;
  std::vector<double> scores;
};

// What a request has done so far, on the host.
struct Progress {
  std::vector<int32_t> tokens;
  std::vector<kdtree_round> rounds;
  std::vector<TraceRound> traces;
  std::vector<float> logits;  // of committed rows, from the prompt's last one on
  int finish = KDTREE_RUNNING;
  int cache_length = 0;
  int32_t status[3] = {0, 0, 0};
};

class Run {
 public:
  Run(Decoder* decoder, const kdtree_run_args& args);
  ~Run();
  Run(const Run&) = delete;

  void prefill();
  int round();  // returns how many requests are not finished
  int stage(int stage, Trace* trace);
  const Progress& progress(int request) const { return progress_.at(static_cast<size_t>(request)); }
  int requests() const { return requests_; }
  int vocab_size() const { return vocab_; }
  int replayed() const { return replayed_; }  // rounds
  // What was expected of each round, and of the one to come; empty without a policy.
  const std::vector<kdtree_prediction>& predictions() const { return predictions_; }

 private:
  using Clock = std::chrono::steady_clock;

  void take_up(const kdtree_run_args& args);
  void choose(const float* logits, int rows, const int32_t* node_count, const int32_t* positions, const int32_t* before,
              int32_t* choices, unsigned char* workspace, size_t workspace_size);
  void draft(Trace* trace);
  void build(Trace* trace);
  void build_here();  // the trees, on the device
  void verify(Trace* trace);
  void commit();
  void observe();
  void launch_stage(int stage, Trace* trace, StageClock* clock);
  StageClock& clock();
  void read_clock(int stage);
  const RoundGraph* graph_of(int stage, const std::function<void()>& launches);
  int collect();  // waits for the records of a round
  void wait_until_told();
  void keep(int request, const Record& record);
  TraceRound trace_of(int request, const Record& record) const;
  int active() const;
  Rows rows() const;
  const Shape& shape() const { return d_->shape; }
  Control control() const;
  size_t rows_of_block() const { return static_cast<size_t>(budget_) + 1; }
  void choose_budget();

  Decoder* decoder_;
  cudaStream_t stream_;
  int method_, requests_, vocab_;
  bool keep_traces_, keep_logits_, timed_, replays_;
  bool prefilled_ = false;
  bool broken_ = false;  // by what failed on the way
  int replayed_ = 0;
  int budget_ = 0, width_ = 0;  // B and K of the round
  std::unique_ptr<BudgetPolicy> policy_;
  std::vector<kdtree_prediction> predictions_;
  int next_stage_ = KDTREE_STAGE_DRAFT;
  std::unique_ptr<Buffers> d_;
  Arena prompt_arena_;
  int32_t* prompts_ = nullptr;  // [R, prompt_stride]
  int prompt_stride_ = 1;
  std::vector<Arena> stand_in_arenas_;
  std::vector<Record> records_;
  int told_ = 0;  // how often the device has been asked for records
  std::vector<int> budgets_, capacities_;
  std::vector<Progress> progress_;
  double seconds_[kStageCount] = {};
  Clock::time_point started_;
};

}  // namespace kdtree
