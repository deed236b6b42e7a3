// MLA attention in the absorbed form over the latent cache, computed in float32, of float32, bf16, or bf16 with an fp8
// cache. attention.h says what, attention_tile.h how.
//
// A block takes 16 heads of one row. Keys lie in chunks that begin at multiples of 128 positions; a chunk is summed
// tile by tile and the chunks are joined in order, by one formula: inside a block that walks through all of them, or by
// a second kernel when every chunk has a block of its own. Both give the same bits.

#include "kernels/attention.h"
#include "kernels/attention_tile.h"
#include "kernels/bf16.h"
#include "kernels/cache_row.h"
#include "kernels/fp8_row.h"

namespace kdtree {
namespace {

// Measured on one H200, 64 heads, us for chunks of 64 | 128 | 256 | 512 keys: 1 row over 256 keys 47 | 75 | 133 | 137,
// over 8192 keys 246 | 177 | 148 | 255; 33 rows over 1024 keys 831 | 710 | 586 | 533, over 8192 keys 3890 | 3730 | 4818
// | 4569. A power of two times the keys of a tile.
constexpr int kChunk = 128;
constexpr size_t kMostPartials = size_t{256} << 20;  // bytes; a pass that needs more walks

struct Partials {
  float* values;  // [M, chunks, heads, rank]
  float* peaks;   // [M, chunks, heads]
  float* totals;  // [M, chunks, heads]

  __host__ __device__ Partials(void* workspace, int64_t rows, int chunks, int heads, int rank)
      : values(static_cast<float*>(workspace)),
        peaks(values + rows * chunks * heads * rank),
        totals(peaks + rows * chunks * heads) {}
};

size_t partial_bytes(int64_t rows, int chunks, int heads, int rank) {
  return static_cast<size_t>(rows) * chunks * heads * (rank + 2) * sizeof(float);
}

// The keys of one row: how many, and where the one of position p lies in the cache, or NULL if the row does not see it.
template <typename T>
struct Keys {
  const MlaAttentionArgs<T>& a;
  int row, request, prefix, count;

  __device__ Keys(const MlaAttentionArgs<T>& args, int row_)
      : a(args), row(row_), request(row / a.rows.width), prefix(a.rows.prefix_lengths[request]) {
    count = a.form == AttentionForm::kMask ? prefix + a.rows.node_count[request] + 1 : a.rows.positions[row] + 1;
    count = min(count, a.longest);
  }

  __device__ const unsigned char* at(int position) const {
    int place = position;
    if (position >= prefix) {
      const int offset = position - prefix;
      if (a.form == AttentionForm::kMask) {
        const int words = (a.rows.width + 31) / 32;
        if ((a.rows.visibility[static_cast<int64_t>(row) * words + offset / 32] >> offset % 32 & 1) == 0)
          return nullptr;
      } else if (a.rows.paths != nullptr) {
        place = prefix + a.rows.paths[static_cast<int64_t>(row) * a.rows.path_stride + offset];
      }
    }
    return static_cast<const unsigned char*>(a.cache.base) + a.layer * a.cache.layer_stride +
           cache_row(a.cache, request, place);
  }
};

template <typename T>
__device__ void load_query(const MlaAttentionArgs<T>& a, int row, int first_head, const Tile& tile) {
  const int stride = tile_stride(tile.width);
  for (int i = threadIdx.x; i < kTileHeads * tile.width; i += blockDim.x) {
    const int head = first_head + i / tile.width, column = i % tile.width;
    float value = 0;
    if (head < a.heads)
      value = widen(column < a.rank ? a.q_latent[row * a.q_latent_stride + head * a.q_latent_head + column]
                                    : a.q_rope[row * a.q_rope_stride + head * a.q_rope_head + column - a.rank]);
    tile.query[i / tile.width * stride + column] = value;
  }
}

template <CacheRows kRows, typename T>
__device__ void load_keys(const Keys<T>& keys, int first, int last, const Tile& tile) {
  const int stride = tile_stride(tile.width);
  for (int k = warp_id(); k < kTileKeys; k += warp_count()) {
    const unsigned char* const source = first + k < last ? keys.at(first + k) : nullptr;
    for (int i = lane_id(); i < tile.width; i += kWarp)
      tile.keys[k * stride + i] = source == nullptr          ? 0.0f
                                  : kRows == CacheRows::kFp8 ? fp8_row_value(source, i)
                                                             : widen(reinterpret_cast<const T*>(source)[i]);
  }
}

// One chunk of the row's keys.
template <CacheRows kRows, typename T>
__device__ void attend_chunk(const Keys<T>& keys, int chunk, float scale, const Tile& tile, Attended* sum) {
  const int end = min(keys.count, (chunk + 1) * kChunk);
  for (int first = chunk * kChunk; first < end; first += kTileKeys) {
    load_keys<kRows>(keys, first, end, tile);
    __syncthreads();
    const int key = first + static_cast<int>(threadIdx.x) % kTileKeys;
    attend(tile, key < end && keys.at(key) != nullptr, scale, sum);
  }
}

__device__ Tile carve(unsigned char* shared, int rank, int rope) {
  Tile tile;
  tile.width = rank + rope;
  tile.columns = rank;
  tile.value_stride = tile_stride(tile.width);
  tile.query = reinterpret_cast<float*>(shared);
  tile.keys = tile.query + kTileHeads * tile_stride(tile.width);
  tile.values = tile.keys;  // the latent is key and value
  tile.weights = tile.keys + kTileKeys * tile_stride(tile.width);
  tile.factors = tile.weights + kTileKeys * kTileHeads;
  return tile;
}

size_t shared_bytes(int width) {
  return sizeof(float) *
         (static_cast<size_t>(kTileHeads + kTileKeys) * tile_stride(width) + kTileKeys * kTileHeads + kTileHeads);
}

// Grid: rows, groups of 16 heads, and chunks or 1.
template <typename T, CacheRows kRows>
__global__ void __launch_bounds__(kTileThreads, 1) mla_attention_kernel(MlaAttentionArgs<T> a, int chunks, bool walk) {
  KDTREE_DYNAMIC_SHARED(shared);
  const int row = static_cast<int>(blockIdx.x), first_head = static_cast<int>(blockIdx.y) * kTileHeads;
  const int head = first_head + static_cast<int>(threadIdx.x) / kTileKeys;
  const bool one_of_head = static_cast<int>(threadIdx.x) % kTileKeys == 0 && head < a.heads;
  const bool used = a.rows.used(row);
  if (!used && !walk) return;  // the joining kernel writes the zeros
  const Tile tile = carve(shared, a.rank, a.rope);
  Attended sum;
  if (used) {
    const Keys<T> keys(a, row);
    const int first = walk ? 0 : static_cast<int>(blockIdx.z);
    if (!walk && first * kChunk >= keys.count) return;
    const int end = walk ? static_cast<int>(ceil_div(keys.count, kChunk)) : first + 1;
    load_query(a, row, first_head, tile);
    for (int chunk = first; chunk < end; ++chunk) {
      Attended next;
      attend_chunk<kRows>(keys, chunk, a.scale, tile, &next);
      const Join join(sum.peak, next.peak);
      if (threadIdx.x % kTileKeys == 0) {
        tile.factors[threadIdx.x / kTileKeys] = join.first;
        tile.weights[threadIdx.x / kTileKeys] = join.second;
      }
      sum.peak = join.peak;
      sum.total = join(sum.total, next.total);
      __syncthreads();
      for (int c = 0; c < kTileColumns; ++c)
        for (int h = 0; h < kTileHeads; ++h)
          sum.values[c][h] = fmaf(sum.values[c][h], tile.factors[h], next.values[c][h] * tile.weights[h]);
      __syncthreads();
    }
  }
  float* values = nullptr;  // of the chunk, if it is one of several
  if (!walk) {
    const Partials partials(a.workspace, a.rows.count(), chunks, a.heads, a.rank);
    const int64_t at = (static_cast<int64_t>(row) * chunks + blockIdx.z) * a.heads;
    values = partials.values + at * a.rank;
    if (one_of_head) {
      partials.peaks[at + head] = sum.peak;
      partials.totals[at + head] = sum.total;
    }
  } else if (one_of_head && a.lse != nullptr) {
    a.lse[static_cast<int64_t>(row) * a.heads + head] = sum.total == 0 ? -INFINITY : sum.peak + logf(sum.total);
  }
  if (threadIdx.x % kTileKeys == 0) tile.factors[threadIdx.x / kTileKeys] = walk && sum.total != 0 ? sum.total : 1.0f;
  __syncthreads();
  for (int c = 0; c < kTileColumns; ++c) {
    const int column = static_cast<int>(threadIdx.x) + c * kTileThreads;
    for (int h = 0; h < kTileHeads; ++h) {
      if (column >= a.rank || first_head + h >= a.heads) continue;
      const float value = sum.values[c][h] / tile.factors[h];
      const int64_t place = static_cast<int64_t>(first_head + h) * a.rank + column;
      if (walk)
        a.out[static_cast<int64_t>(row) * a.heads * a.rank + place] = stored<T>(value);
      else
        values[place] = value;
    }
  }
}

// Grid: rows, heads. Joins the chunks of one head in their order.
template <typename T>
__global__ void __launch_bounds__(kTileThreads, 1) mla_join_kernel(MlaAttentionArgs<T> a, int chunks) {
  const int row = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y);
  const Partials partials(a.workspace, a.rows.count(), chunks, a.heads, a.rank);
  float peak = -INFINITY, total = 0, values[kTileColumns] = {};
  if (a.rows.used(row)) {
    const Keys<T> keys(a, row);
    for (int chunk = 0; chunk * kChunk < keys.count; ++chunk) {
      const int64_t at = (static_cast<int64_t>(row) * chunks + chunk) * a.heads + head;
      const Join join(peak, partials.peaks[at]);
      peak = join.peak;
      total = join(total, partials.totals[at]);
      for (int c = 0; c < kTileColumns; ++c) {
        const int column = static_cast<int>(threadIdx.x) + c * kTileThreads;
        if (column < a.rank) values[c] = join(values[c], partials.values[at * a.rank + column]);
      }
    }
  }
  if (threadIdx.x == 0 && a.lse != nullptr)
    a.lse[static_cast<int64_t>(row) * a.heads + head] = total == 0 ? -INFINITY : peak + logf(total);
  for (int c = 0; c < kTileColumns; ++c) {
    const int column = static_cast<int>(threadIdx.x) + c * kTileThreads;
    if (column < a.rank)
      a.out[(static_cast<int64_t>(row) * a.heads + head) * a.rank + column] =
          stored<T>(total == 0 ? 0.0f : values[c] / total);
  }
}

template <typename T, CacheRows kRows>
kdtree_status attend_rows(const MlaAttentionArgs<T>& a, cudaStream_t stream) {
  constexpr bool kFp8 = kRows == CacheRows::kFp8;
  const int64_t row_bytes = kFp8 ? Fp8Row::kBytes : static_cast<int64_t>(sizeof(T)) * (a.rank + a.rope);
  Arguments arguments("mla_attention");
  arguments.range("rows", a.rows.count(), 1, INT32_MAX)
      .range("heads", a.heads, 1, 65535)
      .range("rank", a.rank, kFp8 ? Fp8Row::kLatent : 1, kMostRank)
      .range("rope", a.rope, kFp8 ? Fp8Row::kRope : 0, kFp8 ? Fp8Row::kRope : kMostRank)
      .range("longest", a.longest, 1, INT32_MAX - kChunk)
      .range("row_bytes", a.cache.row_bytes, row_bytes, row_bytes)
      .array("cache", a.cache.base, kFp8 ? sizeof(float) : sizeof(T))
      .array("visibility", a.rows.visibility, 4, a.form == AttentionForm::kMask);
  if (arguments.failed()) return arguments.status();
  const int chunks = static_cast<int>(ceil_div(a.longest, kChunk));
  const bool walk = chunks > 65535 || a.workspace == nullptr ||
                    a.workspace_size < partial_bytes(a.rows.count(), chunks, a.heads, a.rank);
  const size_t bytes = shared_bytes(a.rank + a.rope);
  KDTREE_RETURN_IF_FAILED(
      allow_shared_memory(reinterpret_cast<const void*>(mla_attention_kernel<T, kRows>), "mla_attention", bytes));
  const dim3 grid(static_cast<unsigned>(a.rows.count()), static_cast<unsigned>(ceil_div(a.heads, kTileHeads)),
                  walk ? 1u : static_cast<unsigned>(chunks));
  KDTREE_LAUNCH((mla_attention_kernel<T, kRows>), grid, dim3(kTileThreads), bytes, stream, a, chunks, walk);
  KDTREE_RETURN_IF_FAILED(check_launch("mla_attention_kernel"));
  if (walk) return KDTREE_OK;
  KDTREE_LAUNCH((mla_join_kernel<T>), dim3(static_cast<unsigned>(a.rows.count()), static_cast<unsigned>(a.heads)),
                dim3(kTileThreads), 0, stream, a, chunks);
  return check_launch("mla_join_kernel");
}

}  // namespace

size_t mla_attention_workspace(int rows, int heads, int rank, int longest) {
  const size_t bytes = partial_bytes(rows, static_cast<int>(ceil_div(longest, kChunk)), heads, rank);
  return bytes < kMostPartials ? bytes : kMostPartials;
}

kdtree_status mla_attention(const MlaAttentionArgs<float>& args, cudaStream_t stream) {
  if (args.cache_rows == CacheRows::kFp8) return fail(KDTREE_SIZE, "mla_attention: an fp8 cache holds rows of bf16");
  return attend_rows<float, CacheRows::kPlain>(args, stream);
}
kdtree_status mla_attention(const MlaAttentionArgs<uint16_t>& args, cudaStream_t stream) {
  return args.cache_rows == CacheRows::kFp8 ? attend_rows<uint16_t, CacheRows::kFp8>(args, stream)
                                            : attend_rows<uint16_t, CacheRows::kPlain>(args, stream);
}

}  // namespace kdtree
