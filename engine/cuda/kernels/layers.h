// The layers of a transformer pass: what each launcher reads and writes. Kernels by the same base name in *.cu.
//
// T is float, or uint16_t: bf16 by its bits. Whatever T is, one element is computed in float32 and rounded to T once,
// unless a comment says more.
//
// A row's result never depends on the other rows of the pass, on how many there are, or on its own place among them:
// every sum runs in an order that the weight's shape alone decides. So plain decoding, a chain and a tree agree bit for
// bit (public issue ggml-org/llama.cpp#27407: engines whose kernels change with the width do not).
#pragma once

#include "common/error.h"

namespace kdtree {

// The rows of one pass: R blocks of N rows, row m = r * N + i. A block uses its first 1 + node_count[r] rows; rows past
// them hold nothing: launchers neither need them defined nor care, except that `embed` gives them zeros.
struct Rows {
  int requests;                   // R
  int width;                      // N
  const int32_t* node_count;      // [R] used rows - 1; -1: a block without rows
  const int32_t* prefix_lengths;  // [R] committed cache rows
  const int32_t* tokens;          // [R, N]
  const int32_t* positions;       // [R, N] absolute: prefix + depth
  const int32_t* paths;        // [R, N, path_stride] rows of the block from the root to the row itself; NULL: a chain,
  int path_stride;             //   row i sees rows 0..i of its block
  const uint32_t* visibility;  // [R, N, ceil(N/32)] bit j of row i: sees row j; only for the mask variant of attention

  __host__ __device__ int count() const { return requests * width; }
  __device__ bool used(int row) const { return row % width <= node_count[row / width]; }
};

// How a cache keeps its rows: rank + rope values of T, or the 656 bytes of fp8_row.h, which are made and read by what
// computes in bf16.
enum class CacheRows : int { kPlain = 0, kFp8 = 1 };

// y[m, :] = table[token of row m, :]; zeros for rows past the used ones. table [V, hidden].
template <typename T>
struct EmbedArgs {
  Rows rows;
  const T* table;
  T* y;  // [M, hidden]
  int hidden;
};
kdtree_status embed(const EmbedArgs<float>& args, cudaStream_t stream);
kdtree_status embed(const EmbedArgs<uint16_t>& args, cudaStream_t stream);

// y = weight * (x / sqrt(mean(x^2) + eps)), per row, or head of a row, of `width` values. x and y may be the same
// array. The quotient is rounded to T before the weight is multiplied, as in the published models. With `added`, what
// is normed is x + (also + added), both sums rounded to T; it is kept in `sum`.
template <typename T>
struct RmsNormArgs {
  const T* x;
  int64_t x_stride;
  const T* weight;  // [width]
  T* y;
  int64_t y_stride;
  int rows;
  int width;
  float eps;
  float* wide = nullptr;     // [rows, width] the values of y for what computes in float32; may be NULL
  const T* added = nullptr;  // this and the next two have rows as x; NULL: x alone
  const T* also = nullptr;   // may be NULL
  T* sum = nullptr;          // may be x
};
kdtree_status rms_norm(const RmsNormArgs<float>& args, cudaStream_t stream);
kdtree_status rms_norm(const RmsNormArgs<uint16_t>& args, cudaStream_t stream);

// y = x w^T (+ add), for each of `batch` problems: x [rows, in], w [out, in], y [rows, out]. Strides in elements. Of
// bf16: linear_bf16.h.
struct LinearArgs {
  const float* x;
  int64_t x_stride, x_batch;
  const float* w;  // rows of `in` values, contiguous
  int64_t w_batch;
  float* y;
  int64_t y_stride, y_batch;
  const float* add;  // may be NULL, may be y; strides of y
  int rows, out, in, batch;
};
enum class Gemm : int {
  kRowInvariant = 0,
  kCublas = 1
};  // cuBLAS: peer and cross-check; its bits change with the rows
kdtree_status linear(const LinearArgs& args, Gemm gemm, cudaStream_t stream);

// Which values of a head turn together: neighbours, or those that lie half a head apart.
enum class RopeLayout : int { kInterleaved = 0, kHalf = 1 };

// Rows m of a pass become their cache rows: of kv [M, rank + rope], in place, the latent is normed as by rms_norm and
// the rope key turns by the angle of the row's position; then row m goes to cache row prefix + i of its request, if
// there is one. Queries [M, heads, rope], where given, turn by the same angles.
template <typename T>
struct LatentArgs {
  Rows rows;
  T* kv;
  int64_t kv_stride;  // elements
  const T* weight;    // [rank]
  const float* cos;   // [positions, rope / 2] tables, see rope_tables
  const float* sin;
  kdtree_cache_view cache;  // row_bytes = sizeof(T) * (rank + rope), or of fp8_row.h
  int layer;
  int rank, rope;
  float eps;
  RopeLayout layout;
  CacheRows cache_rows = CacheRows::kPlain;
  T* queries = nullptr;
  int64_t query_stride = 0, head_stride = 0;  // elements
  int heads = 0;
};
kdtree_status latents(const LatentArgs<float>& args, cudaStream_t stream);
kdtree_status latents(const LatentArgs<uint16_t>& args, cudaStream_t stream);

// y[m, i] = silu(both[m, i]) * both[m, width + i].
template <typename T>
struct SwigluArgs {
  const T* both;  // [rows, 2 * width] gate, then up
  T* y;           // [rows, width]
  int rows, width;
};
kdtree_status swiglu(const SwigluArgs<float>& args, cudaStream_t stream);
kdtree_status swiglu(const SwigluArgs<uint16_t>& args, cudaStream_t stream);

// The experts of each row (DeepSeek-V3: sigmoid, groups, a bias that only chooses). reference/moe.py `route`.
struct RouterArgs {
  const float* logits;  // [rows, experts], float32
  const float* bias;    // [experts]
  float* scores;        // [rows, experts] sigmoid; may be NULL
  int32_t* ids;         // [rows, chosen] best biased score first, ties to the lowest id
  float* weights;       // [rows, chosen]
  int rows, experts, chosen, groups, kept_groups;
  bool normalise;  // norm_topk_prob
  float scale;     // routed_scaling_factor
};
kdtree_status router(const RouterArgs& args, cudaStream_t stream);

// y[m, :] = sum over the row's choices, in their order, of weight * down_e(silu(gate_e x) * up_e x). Each chosen
// expert's weights are read once a pass and tile of rows, not once a row. Rounded to T are the gated values and y. For
// any sizes; experts_bf16.h has bf16 on tensor cores.
template <typename T>
struct ExpertsArgs {
  const T* x;               // [rows, hidden]
  const T* const* gate_up;  // device array [experts]: [2 * width, hidden] gate rows, then up rows
  const T* const* down;     // device array [experts]: [hidden, width]
  const int32_t* ids;       // [rows, chosen]
  const float* weights;     // [rows, chosen]
  const Rows* rows_used;    // NULL: all rows; else rows past the used ones are skipped (and left undefined in y)
  T* y;                     // [rows, hidden]
  int rows, hidden, width, experts, chosen;
  void* workspace;
  size_t workspace_size;
};
size_t experts_workspace(int rows, int hidden, int width, int experts, int chosen);  // enough for either T
kdtree_status experts(const ExpertsArgs<float>& args, cudaStream_t stream);
kdtree_status experts(const ExpertsArgs<uint16_t>& args, cudaStream_t stream);

// y = x + z, element by element.
kdtree_status add(const float* x, const float* z, float* y, int64_t count, cudaStream_t stream);
kdtree_status add(const uint16_t* x, const uint16_t* z, uint16_t* y, int64_t count, cudaStream_t stream);

// dst[m, :width] = src[m, :width] for rows of any stride (elements).
template <typename T>
struct CopyRowsArgs {
  const T* src;
  int64_t src_stride;
  T* dst;
  int64_t dst_stride;
  int rows, width;
};
kdtree_status copy_rows(const CopyRowsArgs<float>& args, cudaStream_t stream);
kdtree_status copy_rows(const CopyRowsArgs<uint16_t>& args, cudaStream_t stream);

// Tables [positions, width / 2] on the host: frequencies and angles as reference/rope.py, cos and sin taken in double
// and rounded once, times the amplitude.
struct RopeParameters {
  double theta;
  bool yarn;
  double factor, original_length, beta_fast, beta_slow, amplitude;
  bool truncate;
};
void rope_tables(const RopeParameters& parameters, int width, int positions, float* cos, float* sin);

}  // namespace kdtree
