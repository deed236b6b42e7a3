// Rows of the embedding table. A block copies one row.

#include "common/error.h"
#include "kernels/layers.h"
#include "kernels/vector4.h"

namespace kdtree {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) embed_kernel(EmbedArgs a, bool vector) {
  const int row = static_cast<int>(blockIdx.x);
  const bool used = a.rows.used(row);
  const float* const from = used ? a.table + static_cast<int64_t>(a.rows.tokens[row]) * a.hidden : nullptr;
  float* const to = a.y + static_cast<int64_t>(row) * a.hidden;
  for (int c = 4 * static_cast<int>(threadIdx.x); c < a.hidden; c += 4 * static_cast<int>(blockDim.x)) {
    const int count = a.hidden - c;
    store4(to + c, used ? load4(from + c, count, vector) : make_float4(0, 0, 0, 0), count, vector);
  }
}

}  // namespace

kdtree_status embed(const EmbedArgs& a, cudaStream_t stream) {
  Arguments arguments("embed");
  arguments.range("requests", a.rows.requests, 1, KDTREE_MAX_REQUESTS)
      .range("rows", static_cast<int64_t>(a.rows.requests) * a.rows.width, 1, 0x7fffffff)
      .range("hidden", a.hidden, 1, 1 << 30)
      .array("node_count", a.rows.node_count, sizeof(int32_t))
      .array("tokens", a.rows.tokens, sizeof(int32_t))
      .array("table", a.table, sizeof(float))
      .array("y", a.y, sizeof(float));
  KDTREE_RETURN_IF_FAILED(arguments.status());
  KDTREE_LAUNCH(embed_kernel, dim3(static_cast<unsigned>(a.rows.count())), dim3(kThreads), 0, stream, a,
                fours({a.table, a.y}, {a.hidden}));
  return check_launch("embed_kernel");
}

}  // namespace kdtree
