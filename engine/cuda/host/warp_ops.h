// What each warp operation does with the parts of its lanes. Part of simt.cpp, so that the race detector does not see a
// lane's part in the hands of another lane.
#pragma once

#include <bit>
#include <cstring>

#include "host/ptx_models.h"
#include "host/simt.h"

namespace kdtree::host {
namespace {

template <typename F>
void for_lanes(unsigned mask, F f) {
  for (; mask != 0; mask &= mask - 1) f(static_cast<unsigned>(std::countr_zero(mask)));
}

template <typename T>
T& part(void* const* parts, unsigned lane) {
  return *static_cast<T*>(parts[lane]);
}

// What a lane outside the mask would give is undefined: all bits set, a NaN.
void shuffle_parts(unsigned mask, void* const* parts) {
  uint64_t values[32];
  std::memset(values, 0xff, sizeof(values));
  for_lanes(mask, [&](unsigned i) { values[i] = part<ShufflePart>(parts, i).value; });
  for_lanes(mask, [&](unsigned i) { part<ShufflePart>(parts, i).value = values[part<ShufflePart>(parts, i).source]; });
}

void vote(unsigned mask, void* const* parts) {
  uint64_t votes = 0;
  for_lanes(mask, [&](unsigned i) { votes |= uint64_t{part<uint64_t>(parts, i) != 0} << i; });
  for_lanes(mask, [&](unsigned i) { part<uint64_t>(parts, i) = votes; });
}

void match(unsigned mask, void* const* parts) {
  uint64_t same[32] = {};
  for_lanes(mask, [&](unsigned i) {
    for_lanes(mask,
              [&](unsigned j) { same[i] |= uint64_t{part<uint64_t>(parts, i) == part<uint64_t>(parts, j)} << j; });
  });
  for_lanes(mask, [&](unsigned i) { part<uint64_t>(parts, i) = same[i]; });
}

template <typename T, T (*f)(T, T)>
void reduce(unsigned mask, void* const* parts) {
  T result = static_cast<T>(part<uint64_t>(parts, std::countr_zero(mask)));
  for_lanes(mask & (mask - 1), [&](unsigned i) { result = f(result, static_cast<T>(part<uint64_t>(parts, i))); });
  for_lanes(mask, [&](unsigned i) { part<uint64_t>(parts, i) = static_cast<uint32_t>(result); });
}

template <typename T>
T least(T a, T b) {
  return a < b ? a : b;
}
template <typename T>
T most(T a, T b) {
  return a < b ? b : a;
}
unsigned sum(unsigned a, unsigned b) { return a + b; }
unsigned bits_and(unsigned a, unsigned b) { return a & b; }
unsigned bits_or(unsigned a, unsigned b) { return a | b; }
unsigned bits_xor(unsigned a, unsigned b) { return a ^ b; }

template <int kMatrices, bool kTransposed>
void hand_out_rows(unsigned, void* const* parts) {
  for (unsigned lane = 0; lane < 32; ++lane)
    for (unsigned m = 0; m < kMatrices; ++m)
      for (unsigned j = 0; j < 2; ++j)
        part<LoadMatrixPart>(parts, lane).needed[m][j] =
            part<LoadMatrixPart>(parts, m * 8 + (kTransposed ? lane % 4 * 2 + j : lane / 4)).row;
}

float element(uint32_t pair, unsigned which) {
  return std::bit_cast<float>((which == 0 ? pair << 16 : pair & 0xffff0000u));
}

// Products of bf16 are exact in float; they are added one after the other. A device may round its sums otherwise.
void multiply_tiles(unsigned, void* const* parts) {
  float a[16][16], b[8][16];
  for (unsigned lane = 0; lane < 32; ++lane) {
    const MmaPart& own = part<MmaPart>(parts, lane);
    const unsigned row = lane / 4, k = lane % 4 * 2;
    for (unsigned j = 0; j < 2; ++j) {
      for (unsigned r = 0; r < 4; ++r) a[row + r % 2 * 8][k + r / 2 * 8 + j] = element(own.a[r], j);
      for (unsigned r = 0; r < 2; ++r) b[row][k + r * 8 + j] = element(own.b[r], j);
    }
  }
  for (unsigned lane = 0; lane < 32; ++lane)
    for (unsigned i = 0; i < 4; ++i) {
      float& sum = part<MmaPart>(parts, lane).d[i];
      for (unsigned k = 0; k < 16; ++k) sum += a[lane / 4 + i / 2 * 8][k] * b[lane % 4 * 2 + i % 2][k];
    }
}

}  // namespace

const WarpOp kSyncWarp{"__syncwarp", nullptr};
const WarpOp kShuffle{"__shfl_sync", shuffle_parts};
const WarpOp kShuffleUp{"__shfl_up_sync", shuffle_parts};
const WarpOp kShuffleDown{"__shfl_down_sync", shuffle_parts};
const WarpOp kShuffleXor{"__shfl_xor_sync", shuffle_parts};
const WarpOp kBallot{"__ballot_sync", vote};
const WarpOp kAny{"__any_sync", vote};
const WarpOp kAll{"__all_sync", vote};
const WarpOp kMatchAny{"__match_any_sync", match};
const WarpOp kReduceAdd{"__reduce_add_sync", reduce<unsigned, sum>};
const WarpOp kReduceMin{"__reduce_min_sync", reduce<unsigned, least>};
const WarpOp kReduceMax{"__reduce_max_sync", reduce<unsigned, most>};
const WarpOp kReduceMinSigned{"__reduce_min_sync", reduce<int, least>};
const WarpOp kReduceMaxSigned{"__reduce_max_sync", reduce<int, most>};
const WarpOp kReduceAnd{"__reduce_and_sync", reduce<unsigned, bits_and>};
const WarpOp kReduceOr{"__reduce_or_sync", reduce<unsigned, bits_or>};
const WarpOp kReduceXor{"__reduce_xor_sync", reduce<unsigned, bits_xor>};
const WarpOp kLoadMatrix2{"ldmatrix.x2", hand_out_rows<2, false>};
const WarpOp kLoadMatrix4{"ldmatrix.x4", hand_out_rows<4, false>};
const WarpOp kLoadMatrix2Transposed{"ldmatrix.x2.trans", hand_out_rows<2, true>};
const WarpOp kLoadMatrix4Transposed{"ldmatrix.x4.trans", hand_out_rows<4, true>};
const WarpOp kMmaBf16{"mma.m16n8k16.bf16", multiply_tiles};

}  // namespace kdtree::host
