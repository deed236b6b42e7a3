// Where a row lies in a latent KV cache.
#pragma once

#include "common/port.h"
#include "kdtree_engine.h"

namespace kdtree {

// Bytes from the first row of the layer to a row of a request; -1 if the block table names no block for it.
__device__ inline int64_t cache_row(const kdtree_cache_view& cache, int request, int64_t row) {
  if (cache.block_size == 0) return request * cache.request_stride + row * cache.row_stride;
  const int64_t entry = static_cast<int64_t>(request) * cache.table_stride + row / cache.block_size;
  const int64_t block = cache.block_table[entry];
  return block < 0 ? -1 : (block * cache.block_size + row % cache.block_size) * cache.row_stride;
}

}  // namespace kdtree
