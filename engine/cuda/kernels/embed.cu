// Rows of the embedding table. A block copies one row.

#include "common/behind.h"
#include "kernels/layers.h"
#include "kernels/vector4.h"

namespace kdtree {
namespace {

constexpr int kThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kThreads) embed_kernel(EmbedArgs<T> a, bool vector) {
  start_behind();
  const int row = static_cast<int>(blockIdx.x);
  const bool used = a.rows.used(row);
  const T* const from = used ? a.table + static_cast<int64_t>(a.rows.tokens[row]) * a.hidden : nullptr;
  T* const to = a.y + static_cast<int64_t>(row) * a.hidden;
  for (int c = 4 * static_cast<int>(threadIdx.x); c < a.hidden; c += 4 * static_cast<int>(blockDim.x)) {
    const int count = a.hidden - c;
    if (used)
      copy4(from + c, to + c, count, vector);
    else
      store4(to + c, make_float4(0, 0, 0, 0), count, vector);
  }
}

template <typename T>
kdtree_status embed_rows(const EmbedArgs<T>& a, cudaStream_t stream) {
  Arguments arguments("embed");
  arguments.range("requests", a.rows.requests, 1, KDTREE_MAX_REQUESTS)
      .range("rows", static_cast<int64_t>(a.rows.requests) * a.rows.width, 1, 0x7fffffff)
      .range("hidden", a.hidden, 1, 1 << 30)
      .array("node_count", a.rows.node_count, sizeof(int32_t))
      .array("tokens", a.rows.tokens, sizeof(int32_t))
      .array("table", a.table, sizeof(T))
      .array("y", a.y, sizeof(T));
  KDTREE_RETURN_IF_FAILED(arguments.status());
  return launch_behind("embed_kernel", embed_kernel<T>, dim3(static_cast<unsigned>(a.rows.count())), dim3(kThreads), 0,
                       stream, a, fours<T>({a.table, a.y}, {a.hidden}));
}

}  // namespace

kdtree_status embed(const EmbedArgs<float>& args, cudaStream_t stream) { return embed_rows(args, stream); }
kdtree_status embed(const EmbedArgs<uint16_t>& args, cudaStream_t stream) { return embed_rows(args, stream); }

}  // namespace kdtree
