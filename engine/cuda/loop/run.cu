#include <algorithm>

#include "loop/run.h"

namespace kdtree {
namespace {

constexpr int kWholeRound = -1, kTimedRound = -2;  // graphs beside those of single stages
constexpr int kStages[] = {KDTREE_STAGE_DRAFT, KDTREE_STAGE_TREE_BUILD, KDTREE_STAGE_VERIFY, KDTREE_STAGE_COMMIT};

// A piece of a run's work, which is done or breaks the run: where a launch fails, nobody knows how far the device came.
class Whole {
 public:
  Whole(const char* call, bool* broken) : broken_(broken) {
    if (*broken)
      throw EngineFailure(KDTREE_SIZE, std::string(call) + ": the run failed before, nothing goes on from there");
    *broken = true;
  }
  void done() { *broken_ = false; }

 private:
  bool* broken_;
};

// Puts a stream back.
struct StreamOf {
  explicit StreamOf(cudaStream_t* place) : place(place), before(*place) {}
  StreamOf(const StreamOf&) = delete;
  ~StreamOf() { *place = before; }
  cudaStream_t* place;
  cudaStream_t before;
};

}  // namespace

// The target's choice after each row of a pass.
void Run::choose(const float* logits, int rows, const int32_t* node_count, const int32_t* positions,
                 const int32_t* before, int32_t* choices, unsigned char* workspace, size_t workspace_size) {
  const Buffers& d = *d_;
  kdtree_target_choice_args choice{};
  choice.struct_size = sizeof(choice);
  choice.requests = requests_;
  choice.rows = rows;
  choice.vocab_size = vocab_;
  choice.dtype = KDTREE_F32;
  choice.row_stride = vocab_;
  choice.logits = logits;
  choice.node_count = node_count;
  choice.positions = positions;
  choice.temperatures = shape().sampled ? d.temperatures : nullptr;
  choice.top_k = shape().sampled ? d.top_k : nullptr;
  choice.top_p = shape().sampled ? d.top_p : nullptr;
  choice.seeds = shape().sampled ? d.seeds : nullptr;
  choice.before = before;
  choice.choices = choices;
  choice.workspace = workspace_size > 0 ? workspace : nullptr;
  choice.workspace_size = workspace_size;
  choice.stream = stream_;
  require(kdtree_target_choice(&choice));
}

void Run::prefill() {
  if (prefilled_) throw EngineFailure(KDTREE_SIZE, "kdtree_run_prefill: the prompts were read already");
  Whole work("kdtree_run_prefill", &broken_);
  const OnDevice here(decoder_->args().device);
  Buffers& d = *d_;
  const int chunk = decoder_->prompt_width();
  const size_t requests = static_cast<size_t>(requests_);
  if (keep_logits_)
    for (Progress& progress : progress_) progress.logits.clear();
  for (int begin = 0; begin < prompt_stride_; begin += chunk) {
    const int width = std::min(chunk, prompt_stride_ - begin);  // of the longest prompt's rest
    require(plan_prompt(control(),
                        {prompts_, d.prompt_lengths, prompt_stride_, begin, width, d.prompt_tokens, d.prompt_positions,
                         d.last_positions, d.ends},
                        stream_));
    TargetPass pass{};
    pass.rows = Rows{requests_, width, d.rows_used, d.prefix, d.prompt_tokens, d.prompt_positions, nullptr, 0, nullptr};
    pass.cache = decoder_->cache();
    pass.longest = shape().longest;
    pass.last_rows_only = true;
    pass.logits = d.prompt_logits;
    pass.features = shape().dflash ? d.prompt_features : nullptr;
    decoder_->target().forward(pass, stream_);
    choose(d.prompt_logits, 1, nullptr, d.last_positions, d.ends, d.prompt_choices, d.prompt_choice_workspace,
           d.prompt_choice_bytes);
    require(keep_choices(control(), d.ends, d.prompt_choices, d.first_roots, stream_));
    if (shape().dflash)
      decoder_->drafter()->observe(d.prompt_features, width, nullptr, 0, d.observed, d.prefix, requests_, stream_);
    if (keep_logits_) {
      require_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
      const std::vector<int32_t> ends = download(d.ends, 3 * requests);
      for (size_t r = 0; r < requests; ++r)
        if (ends[3 * r] == KDTREE_REQUEST_OK)
          progress_[r].logits =
              download(d.prompt_logits + r * static_cast<size_t>(vocab_), static_cast<size_t>(vocab_));
    }
  }
  require(end_prompt(control(), d.first_roots, d.prompt_lengths, stream_));
  require_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  collect();
  prefilled_ = true;
  work.done();
}

// The arrays of a round have its size, whatever the most is that they have room for.
Control Run::control() const {
  Control control = d_->control;
  control.width = budget_ + 1;
  return control;
}

Rows Run::rows() const {
  const Buffers& d = *d_;
  const bool tree = method_ == KDTREE_DDTREE;  // a chain needs no paths
  return Rows{requests_,         budget_ + 1, d.rows_used, d.prefix, d.tokens, d.positions, tree ? d.paths : nullptr,
              shape().depth + 1, d.visibility};
}

void Run::draft(Trace* trace) {
  const Buffers& d = *d_;
  if (policy_ != nullptr) require(plan_round(control(), stream_));
  if (width_ == 0) return;
  if (shape().dflash) decoder_->drafter()->propose(d.root, d.context, d.draft_logits, requests_, stream_, trace);
  if (shape().stand_ins)
    require(
        stand_in({d.stand_ins, d.prefix, d.list_depths, d.draft_logits, requests_, shape().depth, vocab_}, stream_));
}

void Run::build(Trace* trace) {
  const Buffers& d = *d_;
  if (width_ > 0) {
    kdtree_topk_logprob_args topk{};
    topk.struct_size = sizeof(topk);
    topk.requests = requests_;
    topk.depth_limit = shape().depth;
    topk.vocab_size = vocab_;
    topk.k = width_;
    topk.dtype = KDTREE_F32;
    topk.row_stride = vocab_;
    topk.logits = d.draft_logits;
    topk.depth_limits = d.list_depths;
    topk.before = topk.status = d.status;
    topk.ids = d.ids;
    topk.lp = d.lp;
    topk.logz = d.logz;
    topk.workspace = d.topk_bytes > 0 ? d.topk_workspace : nullptr;
    topk.workspace_size = d.topk_bytes;
    topk.stream = stream_;
    require(kdtree_topk_logprob(&topk));
  }
  if (d.heap != nullptr)
    d.heap->launch(budget_, width_, stream_);
  else
    build_here();
  require(plan_verify(control(), stream_));
  if (trace == nullptr) return;
  const int64_t lists = static_cast<int64_t>(requests_) * shape().depth,
                nodes = static_cast<int64_t>(requests_) * (budget_ + 1);
  trace->add("lists/ids", d.ids, lists, width_, width_, {requests_, shape().depth, width_}, stream_);
  trace->add("lists/lp", d.lp, lists, width_, width_, {requests_, shape().depth, width_}, stream_);
  trace->add("lists/logz", d.logz, lists, 1, 1, {requests_, shape().depth}, stream_);
  trace->add("tree/node_count", d.node_count, requests_, 1, 1, {requests_}, stream_);
  trace->add("tree/scores", d.scores, nodes, 1, 1, {requests_, budget_ + 1}, stream_);
  for (const auto& [name, array] : {std::pair<const char*, const int32_t*>{"tree/tokens", d.tokens},
                                    {"tree/parents", d.parents},
                                    {"tree/depths", d.depths},
                                    {"tree/ranks", d.ranks},
                                    {"tree/positions", d.positions}})
    trace->add(name, array, nodes, 1, 1, {requests_, budget_ + 1}, stream_);
}

void Run::build_here() {
  const Buffers& d = *d_;
  kdtree_tree_build_args tree{};
  tree.struct_size = sizeof(tree);
  tree.requests = requests_;
  tree.depth_limit = shape().depth;
  tree.width = width_;
  tree.budget = budget_;
  tree.vocab_size = vocab_;
  tree.checked = 1;
  tree.lp = d.lp;
  tree.ids = d.ids;
  tree.root_tokens = d.root;
  tree.prefix_lengths = d.prefix;
  tree.depth_limits = d.list_depths;
  tree.budgets = d.tree_budgets;
  tree.before = tree.status = d.status;
  tree.node_count = d.node_count;
  tree.tokens = d.tokens;
  tree.parents = d.parents;
  tree.depths = d.depths;
  tree.ranks = d.ranks;
  tree.scores = d.scores;
  tree.positions = d.positions;
  tree.visibility = d.visibility;
  tree.paths = d.paths;
  tree.workspace = d.tree_bytes > 0 ? d.tree_workspace : nullptr;
  tree.workspace_size = d.tree_bytes;
  tree.stream = stream_;
  require(kdtree_tree_build(&tree));
}

void Run::verify(Trace* trace) {
  const Buffers& d = *d_;
  TargetPass pass{};
  pass.rows = rows();
  pass.cache = decoder_->cache();
  pass.longest = shape().longest;
  pass.logits = d.logits;
  pass.features = shape().dflash ? d.features : nullptr;
  decoder_->target().forward(pass, stream_, trace);
  choose(d.logits, budget_ + 1, d.node_count, d.positions, d.status, d.choices, d.choice_workspace, d.choice_bytes);
}

void Run::commit() {
  const Buffers& d = *d_;
  kdtree_tree_accept_args accept{};
  accept.struct_size = sizeof(accept);
  accept.requests = requests_;
  accept.budget = budget_;
  accept.depth_limit = shape().depth;
  accept.node_count = d.node_count;
  accept.tokens = d.tokens;
  accept.parents = d.parents;
  accept.choices = d.choices;
  accept.before = accept.status = d.status;
  accept.accepted = d.accepted;
  accept.path = d.path;
  accept.bonus = d.bonus;
  accept.stream = stream_;
  require(kdtree_tree_accept(&accept));
  kdtree_kv_compact_args compact{};
  compact.struct_size = sizeof(compact);
  compact.requests = requests_;
  compact.depth_limit = shape().depth;
  compact.cache = decoder_->cache();
  compact.prefix_lengths = d.prefix;
  compact.accepted = d.accepted;  // end_round may keep less
  compact.path = d.path;
  compact.before = compact.status = d.status;
  compact.stream = stream_;
  require(kdtree_kv_compact(&compact));
  if (policy_ != nullptr)
    require_cuda(
        cudaMemcpyAsync(d.host_scores, d.scores, static_cast<size_t>(requests_) * rows_of_block() * sizeof(double),
                        cudaMemcpyDeviceToHost, stream_),
        "cudaMemcpyAsync");
  require(end_round(control(), stream_));
}

// What the drafter takes of the rows that were committed. The host has the round's tokens by then.
void Run::observe() {
  const Buffers& d = *d_;
  if (shape().dflash)
    decoder_->drafter()->observe(d.features, budget_ + 1, d.path, shape().depth + 1, d.observed, d.observed_from,
                                 requests_, stream_);
}

int Run::active() const {
  return static_cast<int>(
      std::count_if(progress_.begin(), progress_.end(), [](const Progress& p) { return p.finish == KDTREE_RUNNING; }));
}

int Run::round() {
  if (!prefilled_) throw EngineFailure(KDTREE_SIZE, "kdtree_run_round: the prompts were not read yet");
  if (next_stage_ != KDTREE_STAGE_DRAFT)
    throw EngineFailure(KDTREE_SIZE, "kdtree_run_round: a round in steps is not at its end");
  if (active() == 0) return 0;
  Whole work("kdtree_run_round", &broken_);
  const OnDevice here(decoder_->args().device);
  std::fill(seconds_, seconds_ + kStageCount, 0.0);
  started_ = Clock::now();
  StageClock* const clock = timed_ ? &this->clock() : nullptr;
  const auto launches = [this, clock] {
    for (const int stage : kStages) {
      if (clock != nullptr) clock->mark(stage, stream_);
      launch_stage(stage, nullptr, clock);
    }
    if (clock != nullptr && shape().dflash) clock->mark(kObserved, stream_);
  };
  if (const RoundGraph* graph = graph_of(clock != nullptr ? kTimedRound : kWholeRound, launches)) {
    graph->launch(stream_);
    ++replayed_;
  } else {
    launches();
    d_->launched.insert(budget_);
  }
  if (clock != nullptr) {
    require_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    for (const int stage : kStages) read_clock(stage);
  }
  const int left = collect();
  work.done();
  return left;
}

StageClock& Run::clock() {
  if (d_->clock == nullptr) d_->clock = std::make_unique<StageClock>();
  return *d_->clock;
}

// The graph of some launches, captured if it is not there yet; NULL where they are to be made one by one. So are those
// of the first round of a size on some arrays: what is loaded or asked for at a first launch is then known.
const RoundGraph* Run::graph_of(int stage, const std::function<void()>& launches) {
  if (!replays_ || d_->launched.count(budget_) == 0) return nullptr;
  std::unique_ptr<RoundGraph>& kept = d_->graphs[{stage, budget_}];
  if (kept == nullptr) {
    const StreamOf own(&stream_);
    try {
      kept = std::make_unique<RoundGraph>([&](cudaStream_t stream) {
        stream_ = stream;
        launches();
      });
    } catch (const EngineFailure&) {
      // No memory for a graph, or nobody may capture: the run goes on kernel by kernel, and what is wrong with a kernel
      // is found there.
      replays_ = false;
    }
  }
  return kept.get();
}

// Seconds of a stage that has come to its end. What the drafter takes of the committed rows is part of drafting.
void Run::read_clock(int stage) {
  seconds_[stage] = clock().seconds(stage);
  if (stage == KDTREE_STAGE_COMMIT && shape().dflash) seconds_[KDTREE_STAGE_DRAFT] += clock().seconds(kCommitted);
}

// clock: gets the moment when a commit is done.
void Run::launch_stage(int stage, Trace* trace, StageClock* clock) {
  if (stage == KDTREE_STAGE_DRAFT) {
    draft(trace);
  } else if (stage == KDTREE_STAGE_TREE_BUILD) {
    build(trace);
  } else if (stage == KDTREE_STAGE_VERIFY) {
    verify(trace);
  } else {
    commit();
    if (clock != nullptr) clock->mark(kCommitted, stream_);
    observe();
  }
}

int Run::stage(int stage, Trace* trace) {
  if (!prefilled_) throw EngineFailure(KDTREE_SIZE, "kdtree_run_stage: the prompts were not read yet");
  if (stage != next_stage_)
    throw EngineFailure(KDTREE_SIZE, "kdtree_run_stage: stage " + std::to_string(stage) + " asked for, " +
                                         std::to_string(next_stage_) + " is next");
  if (active() == 0) return 0;
  Whole work("kdtree_run_stage", &broken_);
  const OnDevice here(decoder_->args().device);
  if (stage == KDTREE_STAGE_DRAFT) {
    std::fill(seconds_, seconds_ + kStageCount, 0.0);
    started_ = Clock::now();
  }
  const auto launches = [this, stage, trace] { launch_stage(stage, trace, &clock()); };
  const RoundGraph* const graph = trace == nullptr ? graph_of(stage, launches) : nullptr;
  clock().mark(stage, stream_);
  if (graph != nullptr)
    graph->launch(stream_);
  else
    launches();
  if (stage != KDTREE_STAGE_COMMIT)
    clock().mark(stage + 1, stream_);
  else if (shape().dflash)
    clock().mark(kObserved, stream_);
  require_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  read_clock(stage);
  if (stage == KDTREE_STAGE_COMMIT) d_->launched.insert(budget_);
  next_stage_ = stage == KDTREE_STAGE_COMMIT ? static_cast<int>(KDTREE_STAGE_DRAFT) : stage + 1;
  const int left = stage == KDTREE_STAGE_COMMIT ? collect() : active();
  work.done();
  return left;
}

}  // namespace kdtree
