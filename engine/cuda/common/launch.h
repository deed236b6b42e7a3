// The size of a block.
#pragma once

#include "common/port.h"

namespace kdtree {

// Whole warps, so that each thread has up to `each` of the `items`; no more than `most`, a multiple of a warp.
inline dim3 threads_for(int64_t items, int each, int most) {
  const int64_t warps = ceil_div(items, int64_t{each} * kWarp);
  return dim3(static_cast<unsigned>(warps * kWarp < most ? warps * kWarp : most));
}

}  // namespace kdtree
