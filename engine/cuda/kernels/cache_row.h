// Where a row lies in a latent KV cache.
#pragma once

#include "common/port.h"
#include "kdtree_engine.h"
#include "kernels/layers.h"

namespace kdtree {

// Bytes from the first row of the layer to a row of a request; -1 if the block table names no block for it.
__device__ inline int64_t cache_row(const kdtree_cache_view& cache, int request, int64_t row) {
  if (cache.block_size == 0) return request * cache.request_stride + row * cache.row_stride;
  const int64_t entry = static_cast<int64_t>(request) * cache.table_stride + row / cache.block_size;
  const int64_t block = cache.block_table[entry];
  return block < 0 ? -1 : (block * cache.block_size + row % cache.block_size) * cache.row_stride;
}

// The row of the cache, counted from where those of the request begin, of the key at a position of a node's path behind
// `prefix` rows that all nodes share; -1 as above. For rows that are looked up often: divisions of 32 bits.
__device__ inline int path_row(const Rows& rows, const kdtree_cache_view& cache, int request, int node, int prefix,
                               int position) {
  int row = position;
  if (position >= prefix && rows.paths != nullptr) {
    const int64_t of = static_cast<int64_t>(request) * rows.width + node;
    row = prefix + rows.paths[of * rows.path_stride + position - prefix];
  }
  if (cache.block_size == 0) return row;
  const unsigned size = static_cast<unsigned>(cache.block_size), index = static_cast<unsigned>(row) / size;
  const int block = cache.block_table[static_cast<int64_t>(request) * cache.table_stride + index];
  return block < 0 ? -1 : block * cache.block_size + static_cast<int>(static_cast<unsigned>(row) - index * size);
}

}  // namespace kdtree
