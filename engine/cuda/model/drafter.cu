#include <algorithm>

#include "common/behind.h"
#include "kernels/rms_norm.h"
#include "kernels/rope.h"
#include "model/drafter.h"
#include "model/products.h"
#include "model/weights.h"

namespace kdtree {
namespace {

template <typename T>
struct DraftLayer {
  const T *input_norm, *post_attention_norm;
  const T *qkv, *o;  // qkv: q_proj, k_proj and v_proj rows
  const T* q_norm;
  SwigluWeights<T> mlp;
};

// Accepted rows of the features, gathered so that request r's m-th new position is row r * width + m; their absolute
// positions; and how many there are. Rows past them are zeros at position 0.
template <typename T>
__global__ void gather_kernel(const T* features, int width, int columns, const int32_t* path, int path_stride,
                              const int32_t* accepted, const int32_t* lengths, T* gathered, int new_rows,
                              int32_t* positions, int32_t* counts) {
  start_behind();
  const int request = static_cast<int>(blockIdx.y), m = static_cast<int>(blockIdx.x);
  const int last = min(accepted[request], new_rows - 1);
  const int64_t row = static_cast<int64_t>(request) * new_rows + m;
  const int source = m > last ? -1 : path != nullptr ? path[static_cast<int64_t>(request) * path_stride + m] : m;
  for (int i = threadIdx.x; i < columns; i += blockDim.x)
    gathered[row * columns + i] =
        source < 0 ? T{0} : features[(static_cast<int64_t>(request) * width + source) * columns + i];
  if (threadIdx.x == 0) {
    positions[row] = source < 0 ? 0 : lengths[request] + m;
    if (m == 0) counts[request] = last;
  }
}

// One head [dim], in place, by a block: normed as by rms_norm, then turned by its angles.
template <typename T>
__device__ void norm_and_turn(T* head, int dim, const T* weight, float eps, const float* cos, const float* sin,
                              bool vector) {
  __shared__ float sums[kNormThreads / kWarp];
  const int first = 4 * static_cast<int>(threadIdx.x), stride = 4 * static_cast<int>(blockDim.x);
  float squares = 0;
  for (int c = first; c < dim; c += stride) squares = add_squares(load4(head + c, dim - c, vector), squares);
  const float size = size_of_row(squares, dim, eps, sums);
  for (int c = first; c < dim; c += stride)
    store4(head + c, normed<T>(load4(head + c, dim - c, vector), size, load4(weight + c, dim - c, vector)), dim - c,
           vector);
  __syncthreads();  // the head is whole
  for (int i = static_cast<int>(threadIdx.x); i < dim / 2; i += static_cast<int>(blockDim.x))
    turn_pair(head, dim, i, cos, sin, RopeLayout::kHalf);
}

// The heads of queries and keys that lie side by side in rows of `x`. Grid: rows, heads.
template <typename T>
struct BlockHeads {
  T* x;
  int64_t stride;  // of the rows
  const T *q_norm, *k_norm;
  const float *cos, *sin;
  const int32_t* positions;
  int heads, dim;  // heads: of queries
  float eps;
};
template <typename T>
__global__ void __launch_bounds__(kNormThreads, 1) block_heads_kernel(BlockHeads<T> a, bool vector) {
  start_behind();
  const int row = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y);
  const int64_t turn = static_cast<int64_t>(a.positions[row]) * (a.dim / 2);
  norm_and_turn(a.x + row * a.stride + head * a.dim, a.dim, head < a.heads ? a.q_norm : a.k_norm, a.eps, a.cos + turn,
                a.sin + turn, vector);
}

// New keys and values of all layers, `pairs` [R, new_rows, layers, 2, kv_heads, dim]: keys are normed and turned in
// place, and both go to their context positions. Grid: new rows, requests, layers * kv_heads.
template <typename T>
struct ContextHeads {
  T* pairs;
  T* context;            // [layers, R, capacity, 2, kv_heads, dim]
  int64_t layer_stride;  // of the context
  const T* k_norms;      // [layers, dim]
  const float *cos, *sin;
  const int32_t *positions, *counts;
  int layers, kv_heads, dim, new_rows, capacity;
  float eps;
};
template <typename T>
__global__ void __launch_bounds__(kNormThreads, 1) context_heads_kernel(ContextHeads<T> a, bool vector) {
  start_behind();
  const int m = static_cast<int>(blockIdx.x), request = static_cast<int>(blockIdx.y);
  const int layer = static_cast<int>(blockIdx.z) / a.kv_heads, head = static_cast<int>(blockIdx.z) % a.kv_heads;
  if (m > a.counts[request]) return;
  const int64_t row = static_cast<int64_t>(request) * a.new_rows + m,
                pair = 2 * static_cast<int64_t>(a.kv_heads) * a.dim;
  const int64_t position = a.positions[row];
  T* const key = a.pairs + (row * a.layers + layer) * pair + head * a.dim;
  norm_and_turn(key, a.dim, a.k_norms + layer * a.dim, a.eps, a.cos + position * (a.dim / 2),
                a.sin + position * (a.dim / 2), vector);
  __syncthreads();  // the key is whole
  T* const kept = a.context + layer * a.layer_stride + (static_cast<int64_t>(request) * a.capacity + position) * pair +
                  head * a.dim;
  const int64_t value = static_cast<int64_t>(a.kv_heads) * a.dim;
  for (int i = static_cast<int>(threadIdx.x); i < a.dim; i += static_cast<int>(blockDim.x)) {
    kept[i] = key[i];
    kept[value + i] = key[value + i];
  }
}

// Tokens [root, mask, mask, ...] and positions of each block; node_count -1 for a request without work.
__global__ void block_kernel(const int32_t* roots, const int32_t* lengths, int mask, int block, int32_t* tokens,
                             int32_t* positions, int32_t* node_count) {
  start_behind();
  const int request = static_cast<int>(blockIdx.x), length = lengths[request];
  for (int i = threadIdx.x; i < block; i += blockDim.x) {
    tokens[request * block + i] = i == 0 ? roots[request] : mask;
    positions[request * block + i] = length < 0 ? 0 : length + i;
  }
  if (threadIdx.x == 0) node_count[request] = length < 0 ? -1 : block - 1;
}

// Rows 1.. of each block, for the head: y [R, block - 1, hidden].
template <typename T>
__global__ void drop_first_kernel(const T* x, T* y, int block, int hidden) {
  start_behind();
  const int request = static_cast<int>(blockIdx.y), row = static_cast<int>(blockIdx.x);
  for (int i = threadIdx.x; i < hidden; i += blockDim.x)
    y[(static_cast<int64_t>(request) * (block - 1) + row) * hidden + i] =
        x[(static_cast<int64_t>(request) * block + row + 1) * hidden + i];
}

constexpr int kThreads = 128;

template <typename T>
struct DraftWeights {
  WeightStore store;
  const T *embedding, *head;  // the target's
  const T *fc, *hidden_norm, *norm;
  const T* qkv;      // [layers, query + pair, hidden]: those of the layers
  const T* k_norms;  // [layers, dim]
  const float *cos, *sin;
  std::vector<DraftLayer<T>> layers;

  DraftWeights(const TensorMap& tensors, const DrafterConfig& c, const Target& target, int positions)
      : store(tensors),
        embedding(static_cast<const T*>(target.embedding())),
        head(static_cast<const T*>(target.head())),
        layers(static_cast<size_t>(c.num_hidden_layers)) {
    check_weights(tensors, c.weight_shapes(), {});
    store.take(&fc, "fc.weight");
    store.take(&hidden_norm, "hidden_norm.weight");
    store.take(&norm, "norm.weight");
    std::vector<std::string> projections, keys;
    for (int i = 0; i < c.num_hidden_layers; ++i) {
      DraftLayer<T>& layer = layers[static_cast<size_t>(i)];
      const std::string at = "layers." + std::to_string(i) + ".", attention = at + "self_attn.";
      store.take(&layer.input_norm, at + "input_layernorm.weight");
      store.take(&layer.post_attention_norm, at + "post_attention_layernorm.weight");
      for (const char* projection : {"q_proj.weight", "k_proj.weight", "v_proj.weight"})
        projections.push_back(attention + projection);
      keys.push_back(attention + "k_norm.weight");
      store.take(&layer.o, attention + "o_proj.weight");
      store.take(&layer.q_norm, attention + "q_norm.weight");
      store.take(&layer.mlp, at + "mlp.");
    }
    store.take(&qkv, std::move(projections));
    store.take(&k_norms, std::move(keys));
    std::vector<float> turns[2];
    for (std::vector<float>& table : turns) table.resize(static_cast<size_t>(positions) * c.head_dim / 2);
    rope_tables(c.rope, c.head_dim, positions, turns[0].data(), turns[1].data());
    store.add(&cos, std::move(turns[0]));
    store.add(&sin, std::move(turns[1]));
    store.upload();
    const int64_t rows = (c.num_attention_heads + 2 * c.num_key_value_heads) * static_cast<int64_t>(c.head_dim);
    for (size_t i = 0; i < layers.size(); ++i) layers[i].qkv = qkv + static_cast<int64_t>(i) * rows * c.hidden_size;
  }
};

template <typename T>
struct DraftScratch {
  int capacity, new_rows;
  Arena arena;
  T* context;            // [layers, R, capacity, 2, kv_heads, dim]
  int64_t layer_stride;  // of the context
  // Of new positions.
  T *gathered, *projected, *pairs;
  int32_t *new_positions, *new_counts;
  // Of a block.
  T *x, *normed, *qkv, *heads, *out, *both, *act, *last;
  int32_t *tokens, *positions, *node_count;

  DraftScratch(const DrafterConfig& c, int requests, int capacity_, int new_rows_, int block)
      : capacity(capacity_), new_rows(new_rows_) {
    const size_t hidden = static_cast<size_t>(c.hidden_size), width = static_cast<size_t>(c.intermediate_size);
    const size_t query = static_cast<size_t>(c.num_attention_heads) * static_cast<size_t>(c.head_dim);
    const size_t pair = 2 * static_cast<size_t>(c.num_key_value_heads) * static_cast<size_t>(c.head_dim);
    const size_t taps = c.target_layer_ids.size(), all = static_cast<size_t>(requests);
    const size_t fresh = all * static_cast<size_t>(new_rows), rows = all * static_cast<size_t>(block);
    const size_t layers = static_cast<size_t>(c.num_hidden_layers),
                 positions_of_all = all * static_cast<size_t>(capacity);
    layer_stride = static_cast<int64_t>(positions_of_all * pair);
    arena.plan(&context, layers * positions_of_all * pair);
    arena.plan(&gathered, fresh * taps * hidden);
    arena.plan(&projected, fresh * hidden);
    arena.plan(&pairs, fresh * layers * pair);
    arena.plan(&new_positions, fresh);
    arena.plan(&new_counts, all);
    for (T** array : {&x, &normed, &out, &last}) arena.plan(array, rows * hidden);
    arena.plan(&qkv, rows * (query + pair));
    arena.plan(&heads, rows * query);
    arena.plan(&both, rows * 2 * width);
    arena.plan(&act, rows * width);
    arena.plan(&tokens, rows);
    arena.plan(&positions, rows);
    arena.plan(&node_count, all);
    arena.allocate();
  }
};

template <typename T>
bool products_fit(const DrafterConfig& c) {
  return fit_tensor_cores<T>(
      {c.hidden_size, c.intermediate_size, static_cast<int64_t>(c.num_attention_heads) * c.head_dim});
}

}  // namespace

struct Drafter::Body {
  virtual ~Body() = default;
  virtual void observe(const void* features, int width, const int32_t* path, int path_stride, const int32_t* accepted,
                       const int32_t* lengths, int requests, cudaStream_t stream, Trace* trace) const = 0;
  virtual void propose(const int32_t* roots, const int32_t* lengths, float* logits, int requests, cudaStream_t stream,
                       Trace* trace) const = 0;

  int block;
  size_t weight_bytes, scratch_bytes;
  bool products_fit;
};

template <typename T>
class Drafter::BodyOf final : public Drafter::Body {
 public:
  BodyOf(const TensorMap& tensors, const DrafterConfig& c, const Target& target, int requests, int capacity,
         int most_new_rows, int block_size)
      : c_(c),
        products_{target.arithmetic().gemm, kdtree::products_fit<T>(c)},
        w_(tensors, c, target, capacity + block_size),
        s_(c, requests, capacity, most_new_rows, block_size) {
    block = block_size;
    weight_bytes = w_.store.bytes();
    scratch_bytes = s_.arena.bytes();
    products_fit = products_.tensor_cores;
  }

  void observe(const void* features, int width, const int32_t* path, int path_stride, const int32_t* accepted,
               const int32_t* lengths, int requests, cudaStream_t stream, Trace* trace) const override;
  void propose(const int32_t* roots, const int32_t* lengths, float* logits, int requests, cudaStream_t stream,
               Trace* trace) const override;

 private:
  const DrafterConfig& c_;
  Products products_;
  DraftWeights<T> w_;
  DraftScratch<T> s_;
};

template <typename T>
void Drafter::BodyOf<T>::observe(const void* features, int width, const int32_t* path, int path_stride,
                                 const int32_t* accepted, const int32_t* lengths, int requests, cudaStream_t stream,
                                 Trace* trace) const {
  const DrafterConfig& c = c_;
  const DraftWeights<T>& w = w_;
  const DraftScratch<T>& s = s_;
  const int hidden = c.hidden_size, dim = c.head_dim, kv_heads = c.num_key_value_heads, pair = 2 * kv_heads * dim;
  const int columns = static_cast<int>(c.target_layer_ids.size()) * hidden;
  // Without a path as many rows may be new as the pass has; with one, as many as a path is long.
  const int fresh = path != nullptr ? path_stride : width;
  if (fresh > s.new_rows)
    throw EngineFailure(KDTREE_SIZE,
                        std::to_string(fresh) + " new positions, planned for " + std::to_string(s.new_rows));
  const int rows = requests * fresh;
  const dim3 grid(static_cast<unsigned>(fresh), static_cast<unsigned>(requests));
  require(launch_behind("gather_kernel", gather_kernel<T>, grid, dim3(kThreads), 0, stream,
                        static_cast<const T*>(features), width, columns, path, path_stride, accepted, lengths,
                        s.gathered, fresh, s.new_positions, s.new_counts));
  multiply(products_, s.gathered, w.fc, s.projected, rows, hidden, columns, stream);
  require(rms_norm(RmsNormArgs<T>{s.projected, hidden, w.hidden_norm, s.projected, hidden, rows, hidden,
                                  static_cast<float>(c.rms_norm_eps)},
                   stream));
  if (trace != nullptr) trace->add("context_in", s.projected, rows, hidden, hidden, {rows, hidden}, stream);
  const int layers = c.num_hidden_layers, query = c.num_attention_heads * dim;
  const int64_t weights = static_cast<int64_t>(query + pair) * hidden;  // of a layer, the queries' first
  multiply(products_,
           Product<T, T>{s.projected, hidden, 0, w.qkv + static_cast<int64_t>(query) * hidden, weights, s.pairs,
                         static_cast<int64_t>(layers) * pair, pair, rows, pair, hidden, layers},
           stream);
  const ContextHeads<T> heads{
      s.pairs,      s.context, s.layer_stride, w.k_norms, w.cos, w.sin,      s.new_positions,
      s.new_counts, layers,    kv_heads,       dim,       fresh, s.capacity, static_cast<float>(c.rms_norm_eps)};
  require(launch_behind("context_heads_kernel", context_heads_kernel<T>,
                        dim3(grid.x, grid.y, static_cast<unsigned>(layers * kv_heads)), norm_threads(dim), 0, stream,
                        heads, fours<T>({s.pairs, w.k_norms}, {dim})));
  for (int index = 0; trace != nullptr && index < layers; ++index) {
    const std::string at = "layers." + std::to_string(index) + "/";
    const T* const of_layer = s.pairs + static_cast<int64_t>(index) * pair;
    const int64_t stride = static_cast<int64_t>(layers) * pair;
    trace->add(at + "context_key", of_layer, rows, pair / 2, stride, {rows, kv_heads, dim}, stream);
    trace->add(at + "context_value", of_layer + pair / 2, rows, pair / 2, stride, {rows, kv_heads, dim}, stream);
  }
}

template <typename T>
void Drafter::BodyOf<T>::propose(const int32_t* roots, const int32_t* lengths, float* logits, int requests,
                                 cudaStream_t stream, Trace* trace) const {
  const DrafterConfig& c = c_;
  const DraftWeights<T>& w = w_;
  const DraftScratch<T>& s = s_;
  const int hidden = c.hidden_size, dim = c.head_dim, heads = c.num_attention_heads, kv_heads = c.num_key_value_heads;
  const int pair = 2 * kv_heads * dim, query = heads * dim, rows = requests * block;
  const float eps = static_cast<float>(c.rms_norm_eps);
  const auto project = [&](const T* x, const T* weight, auto* y, int out, int in, int count) {
    multiply(products_, x, weight, y, count, out, in, stream);
  };
  const auto note = [&](const std::string& name, const auto* array, int64_t width, int64_t stride,
                        std::vector<int64_t> shape) {
    const int64_t count = shape[0];  // `shape` is gone when the call begins
    if (trace != nullptr) trace->add(name, array, count, width, stride, std::move(shape), stream);
  };

  require(launch_behind("block_kernel", block_kernel, dim3(static_cast<unsigned>(requests)), dim3(kWarp), 0, stream,
                        roots, lengths, c.mask_token_id, block, s.tokens, s.positions, s.node_count));
  Rows of_block{};
  of_block.requests = requests;
  of_block.width = block;
  of_block.node_count = s.node_count;
  of_block.prefix_lengths = lengths;
  of_block.tokens = s.tokens;
  of_block.positions = s.positions;
  require(embed(EmbedArgs<T>{of_block, w.embedding, s.x, hidden}, stream));
  note("embedding", s.x, hidden, hidden, {rows, hidden});
  // The stream takes what the layer before gave, and its norm goes to `normed`.
  const auto norm = [&](const T* given, const T* weight) {
    require(
        rms_norm(RmsNormArgs<T>{s.x, hidden, weight, s.normed, hidden, rows, hidden, eps, nullptr, given, nullptr, s.x},
                 stream));
  };
  const int row = query + pair;  // of qkv
  const T* given = nullptr;
  for (int index = 0; index < c.num_hidden_layers; ++index) {
    const DraftLayer<T>& layer = w.layers[static_cast<size_t>(index)];
    const std::string at = "layers." + std::to_string(index) + "/";
    norm(given, layer.input_norm);
    if (index > 0) note("layers." + std::to_string(index - 1) + "/hidden", s.x, hidden, hidden, {rows, hidden});
    project(s.normed, layer.qkv, s.qkv, row, hidden, rows);
    const BlockHeads<T> turned{s.qkv, row,   layer.q_norm, w.k_norms + static_cast<int64_t>(index) * dim,
                               w.cos, w.sin, s.positions,  heads,
                               dim,   eps};
    require(launch_behind("block_heads_kernel", block_heads_kernel<T>,
                          dim3(static_cast<unsigned>(rows), static_cast<unsigned>(heads + kv_heads)), norm_threads(dim),
                          0, stream, turned, fours<T>({s.qkv, layer.q_norm, w.k_norms}, {dim, row})));
    const T* const keys = s.qkv + query;
    require(gqa_attention(GqaAttentionArgs<T>{s.qkv, s.context + index * s.layer_stride, keys, lengths, s.heads,
                                              requests, block, heads, kv_heads, dim, s.capacity, row, row},
                          stream));
    project(s.heads, layer.o, s.out, hidden, query, rows);
    note(at + "q", s.qkv, query, row, {rows, heads, dim});
    note(at + "k", keys, pair / 2, row, {rows, kv_heads, dim});
    note(at + "v", keys + pair / 2, pair / 2, row, {rows, kv_heads, dim});
    note(at + "attn_heads", s.heads, query, query, {rows, heads, dim});
    note(at + "attn_out", s.out, hidden, hidden, {rows, hidden});
    norm(s.out, layer.post_attention_norm);
    project(s.normed, layer.mlp.gate_up, s.both, 2 * c.intermediate_size, hidden, rows);
    require(swiglu(SwigluArgs<T>{s.both, s.act, rows, c.intermediate_size}, stream));
    project(s.act, layer.mlp.down, s.out, hidden, c.intermediate_size, rows);
    note(at + "ffn_out", s.out, hidden, hidden, {rows, hidden});
    given = s.out;
  }
  norm(given, w.norm);
  note("layers." + std::to_string(c.num_hidden_layers - 1) + "/hidden", s.x, hidden, hidden, {rows, hidden});
  if (block == 1) return;
  const int drafted = requests * (block - 1);
  const dim3 of_drafted(static_cast<unsigned>(block - 1), static_cast<unsigned>(requests));
  require(launch_behind("drop_first_kernel", drop_first_kernel<T>, of_drafted, dim3(kThreads), 0, stream, s.normed,
                        s.last, block, hidden));
  note("final_norm", s.last, hidden, hidden, {drafted, hidden});
  project(s.last, w.head, logits, c.vocab_size, hidden, drafted);
  note("logits", logits, c.vocab_size, c.vocab_size, {drafted, c.vocab_size});
}

Drafter::Drafter(const TensorMap& tensors, const Target& target, int requests, int capacity, int most_new_rows,
                 int block_size)
    : config_(DrafterConfig::read(tensors)) {
  const TargetConfig& t = target.config();
  const auto same = [](const char* name, int ours, int theirs) {
    if (ours != theirs)
      throw ModelError(std::string("the drafter says ") + name + " " + std::to_string(ours) + ", the target has " +
                       std::to_string(theirs));
  };
  same("num_target_layers", config_.num_target_layers, t.num_hidden_layers);
  same("hidden_size", config_.hidden_size, t.hidden_size);
  same("vocab_size", config_.vocab_size, t.vocab_size);
  const int block = block_size == 0 ? config_.block_size : block_size;
  if (block < 1 || block > config_.block_size)
    throw ModelError("block_size " + std::to_string(block) + " is outside 1.." + std::to_string(config_.block_size) +
                     ", the trained block");
  if (target.arithmetic().dtype == KDTREE_BF16)
    body_ = std::make_unique<BodyOf<uint16_t>>(tensors, config_, target, requests, capacity, most_new_rows, block);
  else
    body_ = std::make_unique<BodyOf<float>>(tensors, config_, target, requests, capacity, most_new_rows, block);
}

Drafter::~Drafter() = default;

int Drafter::block_size() const { return body_->block; }
size_t Drafter::weight_bytes() const { return body_->weight_bytes; }
size_t Drafter::scratch_bytes() const { return body_->scratch_bytes; }
bool Drafter::products_on_tensor_cores() const { return body_->products_fit; }

void Drafter::observe(const void* features, int width, const int32_t* path, int path_stride, const int32_t* accepted,
                      const int32_t* lengths, int requests, cudaStream_t stream, Trace* trace) {
  body_->observe(features, width, path, path_stride, accepted, lengths, requests, stream, trace);
}

void Drafter::propose(const int32_t* roots, const int32_t* lengths, float* logits, int requests, cudaStream_t stream,
                      Trace* trace) {
  body_->propose(roots, lengths, logits, requests, stream, trace);
}

}  // namespace kdtree
