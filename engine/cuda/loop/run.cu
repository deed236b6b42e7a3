#include <algorithm>
#include <numeric>

#include "loop/buffers.h"
#include "loop/request_checks.h"

namespace kdtree {

Run::Run(Decoder* decoder, const kdtree_run_args& args)
    : decoder_(decoder),
      stream_(static_cast<cudaStream_t>(args.stream)),
      method_(args.method),
      requests_(args.requests),
      vocab_(decoder->vocab_size()),
      keep_traces_(args.keep_traces != 0),
      keep_logits_(args.keep_logits != 0) {
  Arguments arguments("kdtree_run_create");
  require(arguments.version(args.struct_size, sizeof(args))
              .range("method", args.method, KDTREE_AR, KDTREE_DDTREE)
              .range("requests", args.requests, 1, decoder->args().max_requests)
              .array("request", args.request, alignof(kdtree_request))
              .status());
  if (decoder->busy) throw EngineFailure(KDTREE_SIZE, "kdtree_run_create: the engine has a run already");
  for (int r = 0; r < requests_; ++r) check_request(r, args.request[r], method_, decoder);
  if (args.full_cost != 0 && method_ != KDTREE_AR && decoder->drafter() == nullptr)
    throw EngineFailure(KDTREE_SIZE, "kdtree_run_create: full_cost is that of a drafter, the engine has none");
  const OnDevice here(decoder->args().device);
  progress_.resize(static_cast<size_t>(requests_));
  make_buffers(args);
  decoder->busy = true;
}

Run::~Run() {
  try {
    const OnDevice here(decoder_->args().device);
    (void)cudaStreamSynchronize(stream_);  // nothing may still use the buffers
  } catch (const EngineFailure&) {         // nothing runs on a broken device
  }
  decoder_->busy = false;
}

void Run::make_buffers(const kdtree_run_args& args) {
  d_ = std::make_unique<Buffers>();
  Buffers& d = *d_;
  const size_t requests = static_cast<size_t>(requests_);
  std::vector<int32_t> budgets, capacities, blocks, stop_counts, full_finish, dflash, lengths, wanted, top_k;
  std::vector<float> temperatures, top_p;
  std::vector<uint64_t> seeds;
  for (int r = 0; r < requests_; ++r) {
    const kdtree_request& q = args.request[r];
    const bool drafts = method_ != KDTREE_AR, stands_in = drafts && q.drafter != KDTREE_DRAFT_DFLASH;
    const bool uses_dflash = drafts && (!stands_in || args.full_cost != 0);
    const int own_budget = method_ == KDTREE_DDTREE ? q.budget : 0;
    int64_t capacity = q.capacity;
    if (capacity == 0)
      capacity = std::min<int64_t>(decoder_->args().capacity,
                                   static_cast<int64_t>(q.prompt_length) + q.max_new_tokens + own_budget);
    const int limit = std::min(q.max_new_tokens, static_cast<int>(capacity) - q.prompt_length);
    any_dflash_ |= uses_dflash;
    any_stand_in_ |= stands_in;
    blocks.push_back(!drafts ? 1 : stands_in ? q.block_size : decoder_->args().block_size);
    budgets.push_back(own_budget);
    capacities.push_back(static_cast<int32_t>(capacity));
    stop_counts.push_back(q.stop_count);
    full_finish.push_back(q.max_new_tokens <= limit ? KDTREE_FINISH_LENGTH : KDTREE_FINISH_CAPACITY);
    dflash.push_back(uses_dflash);
    lengths.push_back(q.prompt_length);
    wanted.push_back(limit);
    temperatures.push_back(q.temperature);
    top_k.push_back(q.top_k);
    top_p.push_back(q.top_p);
    seeds.push_back(q.seed);
    d.sampled |= q.temperature > 0;
    d.prompt_stride = std::max(d.prompt_stride, q.prompt_length);
    d.stop_stride = std::max(d.stop_stride, q.stop_count);
  }
  depth_ = *std::max_element(blocks.begin(), blocks.end()) - 1;
  if (any_dflash_) depth_ = std::max(depth_, decoder_->most_depth());
  if (any_dflash_ && depth_ != decoder_->most_depth())
    refuse(0, "stand-ins beside the drafter must have blocks of at most " + std::to_string(decoder_->most_depth() + 1));
  budget_ = method_ == KDTREE_DDTREE ? *std::max_element(budgets.begin(), budgets.end()) : depth_;
  if (depth_ == 0) budget_ = 0;
  width_ = method_ == KDTREE_CHAIN ? std::min(budget_, 1) : std::min(budget_, vocab_);
  budgets_.assign(budgets.begin(), budgets.end());
  capacities_.assign(capacities.begin(), capacities.end());
  longest_ = *std::max_element(capacities_.begin(), capacities_.end());

  const size_t n = static_cast<size_t>(budget_) + 1, l = static_cast<size_t>(depth_), k = static_cast<size_t>(width_);
  const size_t v = static_cast<size_t>(vocab_), features = decoder_->feature_bytes();
  const size_t chunk = static_cast<size_t>(decoder_->prompt_width());
  for (int32_t** array : {&d.budgets,     &d.capacities,     &d.blocks,         &d.stop_counts,    &d.full_finish,
                          &d.uses_dflash, &d.prompt_lengths, &d.top_k,          &d.prefix,         &d.root,
                          &d.wanted,      &d.finish,         &d.depth_limits,   &d.list_depths,    &d.tree_budgets,
                          &d.context,     &d.rows_used,      &d.kept,           &d.observed,       &d.node_count,
                          &d.accepted,    &d.bonus,          &d.last_positions, &d.prompt_choices, &d.first_roots})
    d.arena.plan(array, requests);
  d.arena.plan(&d.stop_tokens, requests * static_cast<size_t>(d.stop_stride));
  d.arena.plan(&d.prompts, requests * static_cast<size_t>(d.prompt_stride));
  d.arena.plan(&d.temperatures, requests);
  d.arena.plan(&d.top_p, requests);
  d.arena.plan(&d.seeds, requests);
  d.arena.plan(&d.stand_ins, requests);
  d.arena.plan(&d.status, 3 * requests);
  d.arena.plan(&d.ends, 3 * requests);
  d.arena.plan(&d.draft_logits, requests * l * v);
  d.arena.plan(&d.lp, requests * l * k);
  d.arena.plan(&d.ids, requests * l * k);
  d.arena.plan(&d.logz, requests * l);
  for (int32_t** array : {&d.tokens, &d.parents, &d.depths, &d.ranks, &d.positions, &d.choices})
    d.arena.plan(array, requests * n);
  d.arena.plan(&d.paths, requests * n * (l + 1));
  d.arena.plan(&d.path, requests * (l + 1));
  d.arena.plan(&d.visibility, requests * n * ((n + 31) / 32));
  d.arena.plan(&d.scores, requests * n);
  d.arena.plan(&d.logits, requests * n * v);
  d.arena.plan(&d.features, requests * n * features);
  d.arena.plan(&d.prompt_tokens, requests * chunk);
  d.arena.plan(&d.prompt_positions, requests * chunk);
  d.arena.plan(&d.prompt_logits, requests * v);
  d.arena.plan(&d.prompt_features, requests * chunk * features);
  d.topk_bytes = k > 0 ? kdtree_topk_logprob_workspace(requests_, depth_, vocab_, width_) : 0;
  d.tree_bytes = kdtree_tree_build_workspace(requests_, depth_, width_, budget_);
  d.choice_bytes = kdtree_target_choice_workspace(requests_, budget_ + 1, vocab_);
  d.prompt_choice_bytes = kdtree_target_choice_workspace(requests_, 1, vocab_);
  d.arena.plan(&d.topk_workspace, d.topk_bytes);
  d.arena.plan(&d.tree_workspace, d.tree_bytes);
  d.arena.plan(&d.choice_workspace, d.choice_bytes);
  d.arena.plan(&d.prompt_choice_workspace, d.prompt_choice_bytes);
  d.arena.plan(&d.records, requests);
  d.arena.allocate();
  require_cuda(cudaMallocHost(reinterpret_cast<void**>(&d.host_records), requests * sizeof(Record)), "cudaMallocHost");
  records_.resize(requests);

  std::vector<int32_t> prompts(requests * static_cast<size_t>(d.prompt_stride)),
      stops(requests * static_cast<size_t>(d.stop_stride));
  std::vector<StandIn> stand_ins(requests);
  d.stand_in_arenas.resize(requests);
  for (size_t r = 0; r < requests; ++r) {
    const kdtree_request& q = args.request[r];
    std::copy(q.prompt, q.prompt + q.prompt_length, prompts.begin() + static_cast<ptrdiff_t>(r) * d.prompt_stride);
    std::copy(q.stop_tokens, q.stop_tokens + q.stop_count, stops.begin() + static_cast<ptrdiff_t>(r) * d.stop_stride);
    if (method_ == KDTREE_AR || q.drafter == KDTREE_DRAFT_DFLASH) continue;
    StandIn& s = stand_ins[r];
    s.kind = static_cast<StandInKind>(q.drafter);
    s.block_size = q.block_size;
    s.prompt_length = q.prompt_length;
    Arena& arena = d.stand_in_arenas[r];
    if (s.kind == StandInKind::kReplay) {
      s.list_count = q.list_count;
      s.list_depths = q.list_depths;
      s.list_width = q.list_width;
      const size_t lists = static_cast<size_t>(q.list_count), rows = lists * static_cast<size_t>(q.list_depths);
      const size_t row = static_cast<size_t>(q.list_width), list = static_cast<size_t>(q.list_depths) * row;
      std::vector<size_t> order(lists);  // by position, for the search
      std::iota(order.begin(), order.end(), size_t{0});
      std::sort(order.begin(), order.end(),
                [&](size_t a, size_t b) { return q.list_positions[a] < q.list_positions[b]; });
      std::vector<int32_t> positions, ids;
      std::vector<float> lp, rest;
      for (const size_t from : order) {
        positions.push_back(q.list_positions[from]);
        ids.insert(ids.end(), q.list_ids + from * list, q.list_ids + (from + 1) * list);
        lp.insert(lp.end(), q.list_lp + from * list, q.list_lp + (from + 1) * list);
      }
      for (size_t i = 0; i < rows; ++i)
        rest.push_back(replay_rest(ids.data() + i * row, lp.data() + i * row, q.list_width, vocab_));
      arena.plan(&s.positions, positions.size());
      arena.plan(&s.ids, ids.size());
      arena.plan(&s.lp, lp.size());
      arena.plan(&s.rest, rest.size());
      arena.allocate();
      upload(s.positions, positions);
      upload(s.ids, ids);
      upload(s.lp, lp);
      upload(s.rest, rest);
    } else {
      s.golden_count = q.golden_count;
      s.right = s.kind == StandInKind::kOracle ? q.right : q.golden_count;
      s.max_rank = q.max_rank;
      s.miss = q.miss;
      s.seed = q.noise_seed;
      arena.plan(&s.golden, static_cast<size_t>(q.golden_count));
      arena.allocate();
      upload(s.golden, std::vector<int32_t>(q.golden, q.golden + q.golden_count));
    }
  }
  upload(d.prompts, prompts);
  upload(d.stop_tokens, stops);
  upload(d.stand_ins, stand_ins);
  upload(d.budgets, budgets);
  upload(d.capacities, capacities);
  upload(d.blocks, blocks);
  upload(d.stop_counts, stop_counts);
  upload(d.full_finish, full_finish);
  upload(d.uses_dflash, dflash);
  upload(d.prompt_lengths, lengths);
  upload(d.wanted, wanted);
  upload(d.temperatures, temperatures);
  upload(d.top_k, top_k);
  upload(d.top_p, top_p);
  upload(d.seeds, seeds);

  control_ =
      Control{requests_,   method_,       budget_ + 1,   depth_ + 1,     d.stop_stride, d.budgets,      d.capacities,
              d.blocks,    d.stop_counts, d.stop_tokens, d.full_finish,  d.uses_dflash, d.prefix,       d.root,
              d.wanted,    d.finish,      d.status,      d.depth_limits, d.list_depths, d.tree_budgets, d.context,
              d.rows_used, d.kept,        d.observed,    d.node_count,   d.tokens,      d.ranks,        d.accepted,
              d.path,      d.bonus,       d.records};
}

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
  choice.temperatures = d.sampled ? d.temperatures : nullptr;
  choice.top_k = d.sampled ? d.top_k : nullptr;
  choice.top_p = d.sampled ? d.top_p : nullptr;
  choice.seeds = d.sampled ? d.seeds : nullptr;
  choice.before = before;
  choice.choices = choices;
  choice.workspace = workspace_size > 0 ? workspace : nullptr;
  choice.workspace_size = workspace_size;
  choice.stream = stream_;
  require(kdtree_target_choice(&choice));
}

void Run::prefill() {
  if (prefilled_) throw EngineFailure(KDTREE_SIZE, "kdtree_run_prefill: the prompts were read already");
  const OnDevice here(decoder_->args().device);
  Buffers& d = *d_;
  const int chunk = decoder_->prompt_width();
  const size_t requests = static_cast<size_t>(requests_);
  if (keep_logits_)
    for (Progress& progress : progress_) progress.logits.clear();
  for (int begin = 0; begin < d.prompt_stride; begin += chunk) {
    const int width = std::min(chunk, d.prompt_stride - begin);  // of the longest prompt's rest
    require(plan_prompt(control_,
                        {d.prompts, d.prompt_lengths, d.prompt_stride, begin, width, d.prompt_tokens,
                         d.prompt_positions, d.last_positions, d.ends},
                        stream_));
    TargetPass pass{};
    pass.rows = Rows{requests_, width, d.rows_used, d.prefix, d.prompt_tokens, d.prompt_positions, nullptr, 0, nullptr};
    pass.cache = decoder_->cache();
    pass.longest = longest_;
    pass.last_rows_only = true;
    pass.logits = d.prompt_logits;
    pass.features = any_dflash_ ? d.prompt_features : nullptr;
    decoder_->target().forward(pass, stream_);
    choose(d.prompt_logits, 1, nullptr, d.last_positions, d.ends, d.prompt_choices, d.prompt_choice_workspace,
           d.prompt_choice_bytes);
    require(keep_choices(control_, d.ends, d.prompt_choices, d.first_roots, stream_));
    if (any_dflash_)
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
  require(end_prompt(control_, d.first_roots, d.prompt_lengths, stream_));
  prefilled_ = true;
  collect();
}

Rows Run::rows() const {
  const Buffers& d = *d_;
  const bool tree = method_ == KDTREE_DDTREE;  // a chain needs no paths
  return Rows{requests_,  budget_ + 1, d.rows_used, d.prefix, d.tokens, d.positions, tree ? d.paths : nullptr,
              depth_ + 1, d.visibility};
}

void Run::draft(Trace* trace) {
  const Buffers& d = *d_;
  require(plan_round(control_, stream_));
  if (width_ == 0) return;
  if (any_dflash_) decoder_->drafter()->propose(d.root, d.context, d.draft_logits, requests_, stream_, trace);
  if (any_stand_in_)
    require(stand_in({d.stand_ins, d.prefix, d.list_depths, d.draft_logits, requests_, depth_, vocab_}, stream_));
}

void Run::build(Trace* trace) {
  const Buffers& d = *d_;
  if (width_ > 0) {
    kdtree_topk_logprob_args topk{};
    topk.struct_size = sizeof(topk);
    topk.requests = requests_;
    topk.depth_limit = depth_;
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
  kdtree_tree_build_args tree{};
  tree.struct_size = sizeof(tree);
  tree.requests = requests_;
  tree.depth_limit = depth_;
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
  if (trace == nullptr) return;
  const int64_t lists = static_cast<int64_t>(requests_) * depth_,
                nodes = static_cast<int64_t>(requests_) * (budget_ + 1);
  trace->add("lists/ids", d.ids, lists, width_, width_, {requests_, depth_, width_}, stream_);
  trace->add("lists/lp", d.lp, lists, width_, width_, {requests_, depth_, width_}, stream_);
  trace->add("lists/logz", d.logz, lists, 1, 1, {requests_, depth_}, stream_);
  trace->add("tree/node_count", d.node_count, requests_, 1, 1, {requests_}, stream_);
  trace->add("tree/scores", d.scores, nodes, 1, 1, {requests_, budget_ + 1}, stream_);
  for (const auto& [name, array] : {std::pair<const char*, const int32_t*>{"tree/tokens", d.tokens},
                                    {"tree/parents", d.parents},
                                    {"tree/depths", d.depths},
                                    {"tree/ranks", d.ranks},
                                    {"tree/positions", d.positions}})
    trace->add(name, array, nodes, 1, 1, {requests_, budget_ + 1}, stream_);
}

void Run::verify(Trace* trace) {
  const Buffers& d = *d_;
  require(plan_verify(control_, stream_));
  TargetPass pass{};
  pass.rows = rows();
  pass.cache = decoder_->cache();
  pass.longest = longest_;
  pass.logits = d.logits;
  pass.features = any_dflash_ ? d.features : nullptr;
  decoder_->target().forward(pass, stream_, trace);
  choose(d.logits, budget_ + 1, d.node_count, d.positions, d.status, d.choices, d.choice_workspace, d.choice_bytes);
}

void Run::commit() {
  const Buffers& d = *d_;
  kdtree_tree_accept_args accept{};
  accept.struct_size = sizeof(accept);
  accept.requests = requests_;
  accept.budget = budget_;
  accept.depth_limit = depth_;
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
  require(cut_path(control_, stream_));
  kdtree_kv_compact_args compact{};
  compact.struct_size = sizeof(compact);
  compact.requests = requests_;
  compact.depth_limit = depth_;
  compact.cache = decoder_->cache();
  compact.prefix_lengths = d.prefix;
  compact.accepted = d.kept;
  compact.path = d.path;
  compact.before = compact.status = d.status;
  compact.stream = stream_;
  require(kdtree_kv_compact(&compact));
  if (any_dflash_)
    decoder_->drafter()->observe(d.features, budget_ + 1, d.path, depth_ + 1, d.observed, d.prefix, requests_, stream_);
  require(end_round(control_, stream_));
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
  const OnDevice here(decoder_->args().device);
  std::fill(seconds_, seconds_ + 4, 0.0);
  started_ = Clock::now();
  draft(nullptr);
  build(nullptr);
  verify(nullptr);
  commit();
  return collect();
}

int Run::stage(int stage, Trace* trace) {
  if (!prefilled_) throw EngineFailure(KDTREE_SIZE, "kdtree_run_stage: the prompts were not read yet");
  if (stage != next_stage_)
    throw EngineFailure(KDTREE_SIZE, "kdtree_run_stage: stage " + std::to_string(stage) + " asked for, " +
                                         std::to_string(next_stage_) + " is next");
  if (active() == 0) return 0;
  const OnDevice here(decoder_->args().device);
  const Clock::time_point begin = Clock::now();
  if (stage == KDTREE_STAGE_DRAFT) {
    std::fill(seconds_, seconds_ + 4, 0.0);
    started_ = begin;
    draft(trace);
  } else if (stage == KDTREE_STAGE_TREE_BUILD) {
    build(trace);
  } else if (stage == KDTREE_STAGE_VERIFY) {
    verify(trace);
  } else {
    commit();
  }
  require_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  seconds_[stage] = std::chrono::duration<double>(Clock::now() - begin).count();
  next_stage_ = stage == KDTREE_STAGE_COMMIT ? static_cast<int>(KDTREE_STAGE_DRAFT) : stage + 1;
  return stage == KDTREE_STAGE_COMMIT ? collect() : active();
}

}  // namespace kdtree
