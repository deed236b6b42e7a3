// Tiles of bf16 keys made of an fp8 cache (fp8_row.h). Each warp copies the codes of 64 channels of a tile's keys with
// their scales to a place of its own, as they are, and from there makes the bf16 columns whose values it multiplies:
// nobody else reads those after the scores, so it needs to wait for no other warp. Rope channels are bf16 already and
// go into the tile at once. mla_attention_fp8.md: what it costs, what was tried.
#pragma once

#include "kernels/fp8_row.h"
#include "kernels/mla_bf16_block.h"

namespace kdtree::mla_bf16 {

constexpr int kPieces = kColumns / 16;  // of 16 codes, that a warp has of a key
constexpr int kKeysAtOnce = kWarp / kPieces;
static_assert(kFp8StageBytes == kWarps * kKeys * (kColumns + static_cast<int>(sizeof(float))));

// The warp's share of a stage: for each lane the codes that it converts, then the keys' scales.
__device__ inline unsigned char* fp8_share(unsigned char* stage, int warp) {
  return stage + warp * (kFp8StageBytes / kWarps);
}

// Starts the warp's copies of codes and scales; zeros for rows that are none.
template <class Shape>
__device__ inline void copy_codes(const char* base, int64_t row_stride, const Shared<Shape>& shared, int turn,
                                  unsigned char* stage) {
  const auto [warp, lane] = Thread::again();
  unsigned char* const share = fp8_share(stage, warp);
  KDTREE_UNROLL_BY(1)
  for (int i = 0; i < kKeys / kKeysAtOnce; ++i) {
    const int row = shared.row(turn, i * kKeysAtOnce + lane / kPieces);
    copy_async_16(share + (i * kWarp + lane) * 16,
                  base + max(row, 0) * row_stride + warp * kColumns + lane % kPieces * 16, row >= 0);
  }
  const int row = shared.row(turn, lane);
  copy_async_4(share + kKeys * kColumns + lane * 4,
               base + max(row, 0) * row_stride + Fp8Row::kScalesAt + warp * kColumns / Fp8Row::kGroup * 4, row >= 0);
}

// Starts the thread's share of the copies of a tile's rope channels; zeros for rows that are none.
template <class Shape>
__device__ inline void copy_rope(const char* base, int64_t row_stride, const Shared<Shape>& shared, int turn,
                                 unsigned char* tile) {
  static_assert(2 * kRope == 8 * 16);
  const int key = copied_key<Shape>(), part = Thread::again().lane % 8 * 16, row = shared.row(turn, key);
  copy_async_16(tile + key * kStride + 2 * kLatent + part, base + max(row, 0) * row_stride + Fp8Row::kRopeAt + part,
                row >= 0);
}

__device__ inline uint32_t bf16_pair(uint32_t codes, float scale) {
  const float2 values = e4m3_pair(codes);
  return narrow_pair(values.x * scale, values.y * scale);
}

// The warp's columns of a tile from the codes that it copied, which have come.
__device__ inline void convert_codes(unsigned char* stage, unsigned char* tile) {
  const auto [warp, lane] = Thread::again();
  const unsigned char* const share = fp8_share(stage, warp);
  __syncwarp();  // the scales that other lanes copied are there, and the columns' values are read
  KDTREE_UNROLL_BY(2)
  for (int i = 0; i < kKeys / kKeysAtOnce; ++i) {
    const int key = i * kKeysAtOnce + lane / kPieces;
    const uint4 codes = *reinterpret_cast<const uint4*>(share + (i * kWarp + lane) * 16);
    const float scale = *reinterpret_cast<const float*>(share + kKeys * kColumns + key * 4);
    uint4* const to = reinterpret_cast<uint4*>(tile + key * kStride + (warp * kColumns + lane % kPieces * 16) * 2);
    to[0] = make_uint4(bf16_pair(codes.x, scale), bf16_pair(codes.x >> 16, scale), bf16_pair(codes.y, scale),
                       bf16_pair(codes.y >> 16, scale));
    to[1] = make_uint4(bf16_pair(codes.z, scale), bf16_pair(codes.z >> 16, scale), bf16_pair(codes.w, scale),
                       bf16_pair(codes.w >> 16, scale));
  }
  __syncwarp();  // others may copy new scales
}

}  // namespace kdtree::mla_bf16
