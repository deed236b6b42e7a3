#include <algorithm>
#include <numeric>

#include "loop/request_checks.h"
#include "loop/run.h"

namespace kdtree {

Run::Run(Decoder* decoder, const kdtree_run_args& args)
    : decoder_(decoder),
      stream_(static_cast<cudaStream_t>(args.stream)),
      method_(args.method),
      requests_(args.requests),
      vocab_(decoder->vocab_size()),
      keep_traces_(args.keep_traces != 0),
      keep_logits_(args.keep_logits != 0),
      timed_(args.timed != 0),
      replays_(args.eager == 0 && decoder->graphs()) {
  Arguments arguments("kdtree_run_create");
  require(arguments.range("method", args.method, KDTREE_AR, KDTREE_DDTREE)
              .range("requests", args.requests, 1, decoder->args().max_requests)
              .range("eager", args.eager, 0, 1)
              .range("timed", args.timed, 0, 1)
              .range("builder", args.builder, KDTREE_BUILDER_GPU,
                     args.method == KDTREE_DDTREE ? KDTREE_BUILDER_HEAP : KDTREE_BUILDER_GPU)
              .range("cost_count", args.cost_count, 0, args.method == KDTREE_DDTREE ? INT32_MAX : 0)
              .array("cost_rows", args.cost_rows, alignof(int32_t), args.cost_count > 0)
              .array("cost_seconds", args.cost_seconds, alignof(double), args.cost_count > 0)
              .array("request", args.request, alignof(kdtree_request))
              .status());
  if (decoder->busy) throw EngineFailure(KDTREE_SIZE, "kdtree_run_create: the engine has a run already");
  for (int r = 0; r < requests_; ++r) check_request(r, args.request[r], method_, decoder);
  if (args.full_cost != 0 && method_ != KDTREE_AR && decoder->drafter() == nullptr)
    throw EngineFailure(KDTREE_SIZE, "kdtree_run_create: full_cost is that of a drafter, the engine has none");
  for (int i = 0; i < args.cost_count; ++i)
    if (args.cost_rows[i] <= (i > 0 ? args.cost_rows[i - 1] : 0) || !(args.cost_seconds[i] > 0))
      throw EngineFailure(KDTREE_SIZE, "kdtree_run_create: costs are of ascending rows and positive, number " +
                                           std::to_string(i) + " is " + std::to_string(args.cost_seconds[i]) +
                                           " s of " + std::to_string(args.cost_rows[i]) + " rows");
  const OnDevice here(decoder->args().device);
  progress_.resize(static_cast<size_t>(requests_));
  records_.resize(progress_.size());
  try {
    take_up(args);
  } catch (const EngineFailure& failure) {
    if (failure.status != KDTREE_CUDA || !decoder->drop_spare()) throw;  // they may hold the memory that was missing
    d_.reset();
    prompt_arena_ = Arena();
    stand_in_arenas_.clear();
    take_up(args);
  }
  decoder->busy = true;
}

Run::~Run() {
  try {
    const OnDevice here(decoder_->args().device);
    // Nothing may still use what is given back; nothing runs on a broken device. Only what is counted in steps fits
    // again.
    if (cudaStreamSynchronize(stream_) != cudaSuccess)
      (void)cudaGetLastError();  // or the next launch's check would report it
    else if (replays_)
      decoder_->give_back(std::move(d_));
  } catch (const std::exception&) {
  }
  decoder_->busy = false;
}

// Arrays for these requests, filled.
void Run::take_up(const kdtree_run_args& args) {
  Shape shape{};
  shape.method = method_;
  shape.requests = requests_;
  shape.stop_stride = 1;
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
    shape.dflash |= uses_dflash;
    shape.stand_ins |= stands_in;
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
    shape.sampled |= q.temperature > 0;
    prompt_stride_ = std::max(prompt_stride_, q.prompt_length);
    shape.stop_stride = std::max(shape.stop_stride, q.stop_count);
  }
  shape.depth = *std::max_element(blocks.begin(), blocks.end()) - 1;
  if (shape.dflash) shape.depth = std::max(shape.depth, decoder_->most_depth());
  if (shape.dflash && shape.depth != decoder_->most_depth())
    refuse(0, "stand-ins beside the drafter must have blocks of at most " + std::to_string(decoder_->most_depth() + 1));
  shape.budget = method_ == KDTREE_DDTREE ? *std::max_element(budgets.begin(), budgets.end()) : shape.depth;
  if (shape.depth == 0) shape.budget = 0;
  shape.width = method_ == KDTREE_CHAIN ? std::min(shape.budget, 1) : std::min(shape.budget, vocab_);
  budgets_.assign(budgets.begin(), budgets.end());
  capacities_.assign(capacities.begin(), capacities.end());
  shape.longest = *std::max_element(capacities_.begin(), capacities_.end());

  shape.heap = args.builder == KDTREE_BUILDER_HEAP;
  shape.policy = args.cost_count > 0;
  if (shape.policy)
    policy_ = std::make_unique<BudgetPolicy>(
        std::vector<int32_t>(args.cost_rows, args.cost_rows + args.cost_count),
        std::vector<double>(args.cost_seconds, args.cost_seconds + args.cost_count), shape.budget, requests_);
  if (replays_) shape = shape.bucket(decoder_->args().max_budget, decoder_->args().capacity, vocab_);
  d_ = decoder_->take(shape);
  budget_ = shape.budget;
  width_ = shape.width;
  const Buffers& d = *d_;
  std::fill(d.records, d.records + requests, Record{});

  std::vector<int32_t> prompts(requests * static_cast<size_t>(prompt_stride_)),
      stops(requests * static_cast<size_t>(shape.stop_stride));
  std::vector<StandIn> stand_ins(requests);
  prompt_arena_.plan(&prompts_, prompts.size());
  prompt_arena_.allocate();
  stand_in_arenas_.resize(requests);
  for (size_t r = 0; r < requests; ++r) {
    const kdtree_request& q = args.request[r];
    std::copy(q.prompt, q.prompt + q.prompt_length, prompts.begin() + static_cast<ptrdiff_t>(r) * prompt_stride_);
    std::copy(q.stop_tokens, q.stop_tokens + q.stop_count,
              stops.begin() + static_cast<ptrdiff_t>(r) * shape.stop_stride);
    if (method_ == KDTREE_AR || q.drafter == KDTREE_DRAFT_DFLASH) continue;
    StandIn& s = stand_ins[r];
    s.kind = static_cast<StandInKind>(q.drafter);
    s.block_size = q.block_size;
    s.prompt_length = q.prompt_length;
    Arena& arena = stand_in_arenas_[r];
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
  upload(prompts_, prompts);
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
}

}  // namespace kdtree
