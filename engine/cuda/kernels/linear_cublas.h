// The cuBLAS back ends of `linear` and `linear_bf16`.
#pragma once

#include "kernels/linear_bf16.h"

namespace kdtree {

// For arguments that `linear` has checked, or that are as good; bf16 has no `add` here. KDTREE_UNSUPPORTED where there
// is no cuBLAS. The first call of a thread on a device creates a handle, which allocates: it must not be in a captured
// round.
kdtree_status linear_cublas(const LinearArgs& args, cudaStream_t stream);
kdtree_status linear_cublas(const LinearBf16Args& args, cudaStream_t stream);

}  // namespace kdtree
