// Softmax attention of up to 16 heads of one query row over keys that come in tiles of 16, float32, by 256 threads.
//
// Thread t computes the score of head t / 16 with key t % 16 of a tile, and owns the output columns t and t + 256 of
// all heads. Every sum has an order of its own that nothing but the place of a key in its tile decides.
#pragma once

#include "common/block.h"

namespace kdtree {

constexpr int kTileKeys = 16;
constexpr int kTileHeads = 16;
constexpr int kTileThreads = kTileKeys * kTileHeads;
constexpr int kTileColumns = 2;  // output columns of a thread
constexpr int kMostRank = kTileColumns * kTileThreads;

// Floats from row to row in shared memory: 16-byte aligned, and 8 rows apart in banks for the 16-byte loads of the
// dots.
__host__ __device__ constexpr int tile_stride(int width) { return (width + 3) / 4 * 4 + 4; }

// What a chunk of keys gave: the largest score, and sums relative to it. Score and weight sum per head are the same in
// all 16 threads of the head; values[c][h]: column thread + 256 c of head h.
struct Attended {
  float peak = -INFINITY;
  float total = 0;
  float values[kTileColumns][kTileHeads] = {};
};

// exp(a - b) for the rescaling of sums: 0 where nothing was summed yet.
__device__ inline float rescale(float from, float to) { return from == -INFINITY ? 0.0f : expf(from - to); }

// Shared memory of one tile.
struct Tile {
  float* query;    // [16, tile_stride(width)]
  float* keys;     // [16, tile_stride(width)]
  float* values;   // [16, tile_stride(columns)], may be `keys`
  float* weights;  // [16 keys, 16 heads]
  float* factors;  // [16 heads]
  int width;       // of queries and keys
  int columns;     // of values
  int value_stride;
};

__device__ inline float dot(const float* a, const float* b, int width) {
  float sums[4] = {0, 0, 0, 0};
  int i = 0;
  KDTREE_UNROLL_BY(4)
  for (; i + 4 <= width; i += 4) {
    const float4 x = *reinterpret_cast<const float4*>(a + i), y = *reinterpret_cast<const float4*>(b + i);
    sums[0] = fmaf(x.x, y.x, sums[0]);
    sums[1] = fmaf(x.y, y.y, sums[1]);
    sums[2] = fmaf(x.z, y.z, sums[2]);
    sums[3] = fmaf(x.w, y.w, sums[3]);
  }
  KDTREE_UNROLL
  for (int j = 0; j < 3; ++j)
    if (i + j < width) sums[j] = fmaf(a[i + j], b[i + j], sums[j]);
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Takes the tile in shared memory into `sum`. seen: whether key threadIdx % 16 counts; the rows of keys that do not are
// zeros. A NaN among what counts makes the result NaN. All threads; the tile may be overwritten afterwards.
__device__ inline void attend(const Tile& tile, bool seen, float scale, Attended* sum) {
  const int key = static_cast<int>(threadIdx.x) % kTileKeys, head = static_cast<int>(threadIdx.x) / kTileKeys;
  const int stride = tile_stride(tile.width);
  const float score = seen ? dot(tile.query + head * stride, tile.keys + key * stride, tile.width) * scale : -INFINITY;
  float peak = fmaxf(score, sum->peak);  // leaves a NaN out, but its weight is NaN below
  for (int step = kTileKeys / 2; step > 0; step /= 2) peak = fmaxf(peak, __shfl_xor_sync(kAllLanes, peak, step));
  const float weight = score == -INFINITY ? 0.0f : expf(score - peak);
  float total = weight;
  for (int step = kTileKeys / 2; step > 0; step /= 2) total += __shfl_xor_sync(kAllLanes, total, step);
  const float factor = rescale(sum->peak, peak);
  sum->total = fmaf(sum->total, factor, total);
  sum->peak = peak;
  tile.weights[key * kTileHeads + head] = weight;
  if (key == 0) tile.factors[head] = factor;
  __syncthreads();
  for (int c = 0; c < kTileColumns; ++c) {
    const int column = static_cast<int>(threadIdx.x) + c * kTileThreads;
    if (column >= tile.columns) break;
    for (int h = 0; h < kTileHeads; ++h) sum->values[c][h] *= tile.factors[h];
    KDTREE_UNROLL_BY(2)
    for (int k = 0; k < kTileKeys; ++k) {
      const float value = tile.values[k * tile.value_stride + column];
      for (int h = 0; h < kTileHeads; ++h)
        sum->values[c][h] = fmaf(tile.weights[k * kTileHeads + h], value, sum->values[c][h]);
    }
  }
  __syncthreads();
}

// How two sums over different keys become one. The one formula by which chunks are joined, in the order of their keys.
struct Join {
  float peak, first, second;  // factors of the two

  __device__ Join(float peak_a, float peak_b)
      : peak(fmaxf(peak_a, peak_b)), first(rescale(peak_a, peak)), second(rescale(peak_b, peak)) {}
  __device__ float operator()(float a, float b) const { return fmaf(a, first, b * second); }
};

}  // namespace kdtree
