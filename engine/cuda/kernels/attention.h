// Attention over the cache.
#pragma once

#include "kernels/layers.h"

namespace kdtree {

// MLA in the absorbed form (reference/mla.py `latent_attention`): every head looks at the same cache rows, the
// normalised latent [rank] and behind it the rotated rope key [rope].
//   exact  a row's keys are those that plain decoding would have found, in the order of their absolute positions: cache
//          rows 0..prefix-1, then the rows of its own path. Chunks of keys begin at fixed absolute positions and merge
//          in order, so the bits depend on nothing else.
//   mask   the rows of the block in the order of their slots, those without a visibility bit left out. For masks that
//          are no trees. Equal to `exact` up to rounding.
// T as in layers.h; scores, weights and sums are float32 either way.
enum class AttentionForm : int { kExact = 0, kMask = 1 };

template <typename T>
struct MlaAttentionArgs {
  Rows rows;
  AttentionForm form;
  const T* q_latent;                       // [M, heads, rank]
  const T* q_rope;                         // [M, heads, rope] rotated
  int64_t q_latent_stride, q_rope_stride;  // elements from row to row; heads lie q_latent_head, q_rope_head apart
  int64_t q_latent_head, q_rope_head;
  kdtree_cache_view cache;  // row_bytes = sizeof(T) * (rank + rope), or of fp8_row.h; the rows of the pass are written
  CacheRows cache_rows;
  int layer;
  T* out;      // [M, heads, rank]
  float* lse;  // [M, heads] natural logarithm; may be NULL
  int heads, rank, rope;
  float scale;
  int longest;  // the most keys any row may have (host bound for the grid)
  void* workspace;
  size_t workspace_size;
};
// At most 256 MiB. A pass whose chunks do not fit the workspace gets the same bits from fewer blocks.
size_t mla_attention_workspace(int rows, int heads, int rank, int longest);
kdtree_status mla_attention(const MlaAttentionArgs<float>& args, cudaStream_t stream);
kdtree_status mla_attention(const MlaAttentionArgs<uint16_t>& args, cudaStream_t stream);

// The same on tensor cores, for 512 latents and 64 rope channels: products of bf16 values summed in float32, weights
// rounded to bf16. The exact form: a row's bits depend on its own keys alone, by their absolute positions.
struct MlaAttentionBf16Args {
  Rows rows;
  const uint16_t* q_latent;                // [M, heads, 512] bf16
  const uint16_t* q_rope;                  // [M, heads, 64] bf16, rotated
  int64_t q_latent_stride, q_rope_stride;  // elements from row to row; heads lie q_latent_head, q_rope_head apart; even
  int64_t q_latent_head, q_rope_head;
  kdtree_cache_view
      cache;             // row_bytes = 1152 or 656; base and strides multiples of 16; the rows of the pass are written
  CacheRows cache_rows;  // fp8: the bits of the bf16 rows that it stands for, on the portable path
  int layer;
  uint16_t* out;  // [M, heads, 512] bf16
  float* lse;     // [M, heads] natural logarithm; may be NULL
  int heads;      // 16, 32, 64 or 128
  float scale;
  int longest;        // the most keys any row may have; the closer, the better the pass is cut
  int shared_memory;  // bytes that a block may take; 0: what the device allows. Changes no bit, as the next
  int blocks;         // that run at a time; 0: as many as the device has multiprocessors
  bool portable;      // the portable path, whatever the device
  void* workspace;
  size_t workspace_size;
};
// Two kernels, each exact for itself; their bits differ. Which one serves depends on the device and on what a model
// does not change.
enum class AttentionPath : int {
  kPortable = 0,  // mma.sync
  kWgmma = 1      // compute capability 9.0 with 227 KB of shared memory, a scale above 0, bf16 rows
};
AttentionPath mla_attention_bf16_path(const MlaAttentionBf16Args& args);
// At most 384 MiB, unless 64 head rows need more; 0 and a message on an error. A pass takes less too, down to 64 head
// rows' worth: the same bits from more launches.
size_t mla_attention_bf16_workspace(int requests, int width, int heads, int longest, int blocks = 0);
kdtree_status mla_attention_bf16(const MlaAttentionBf16Args& args, cudaStream_t stream);

// Grouped-query attention of a drafter's block over its context and itself, unmasked (reference/dflash.py
// `grouped_attention`). Context keys and values: cache [R, capacity, 2, kv_heads, dim]; the block's own: [R, b, 2,
// ...].
template <typename T>
struct GqaAttentionArgs {
  const T* q;                      // [R, b, heads, dim]
  const T* context;                // [R, capacity, 2, kv_heads, dim] keys, then values, of each position
  const T* block;                  // [R, b, 2, kv_heads, dim]
  const int32_t* context_lengths;  // [R]; -1: nothing to do for this request
  T* out;                          // [R, b, heads, dim]
  int requests, block_size, heads, kv_heads, dim, capacity;
  int64_t q_stride = 0, block_stride = 0;  // elements from row to row; 0: rows lie side by side
};
kdtree_status gqa_attention(const GqaAttentionArgs<float>& args, cudaStream_t stream);
kdtree_status gqa_attention(const GqaAttentionArgs<uint16_t>& args, cudaStream_t stream);

}  // namespace kdtree
