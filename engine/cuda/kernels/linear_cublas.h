// The cuBLAS back end of `linear`.
#pragma once

#include "kernels/layers.h"

namespace kdtree {

// For arguments that `linear` has checked. KDTREE_UNSUPPORTED where there is no cuBLAS. The first call of a thread on a
// device creates a handle, which allocates: it must not be in a captured round.
kdtree_status linear_cublas(const LinearArgs& args, cudaStream_t stream);

}  // namespace kdtree
