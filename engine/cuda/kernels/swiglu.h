// The gate of a feed-forward block, as every kernel computes it.
#pragma once

#include "common/port.h"

namespace kdtree {

// 1 / (1 + e^-x); 0 where e^-x overflows.
__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// silu(gate) * up
__device__ inline float gated(float gate, float up) { return gate * sigmoid(gate) * up; }

}  // namespace kdtree
