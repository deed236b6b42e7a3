// The routed experts of all rows, bf16 on tensor cores.
#pragma once

#include "kernels/layers.h"

namespace kdtree {

// y[m, :] = sum over the row's choices, in their order, of weight * down_e(silu(gate_e x) * up_e x). Sums in float32,
// in the order of kernels/bf16_tile.h; rounded to bf16 are the gated values, once, and y where it is not `wide`. So the
// bits of a row do not depend on who shares its experts.
struct ExpertsBf16Args {
  const uint16_t* x;               // [rows, hidden] bf16 bits, as all weights
  const uint16_t* const* gate_up;  // device array [experts]: [2 * width, hidden] gate rows, then up rows
  const uint16_t* const* down;     // device array [experts]: [hidden, width]; each aligned to 16 bytes, as gate_up's
  const int32_t* ids;              // [rows, chosen]
  const float* weights;            // [rows, chosen]
  const Rows* rows_used;           // NULL: all rows; else rows past the used ones are skipped (and left undefined in y)
  void* y;                         // [rows, hidden] float32 where `wide`, else bf16; x and y are aligned to 16 bytes
  int rows, hidden, width, experts, chosen;  // hidden and width: multiples of 8
  bool wide;
  void* workspace;
  size_t workspace_size;
};
size_t experts_bf16_workspace(int rows, int hidden, int width, int experts, int chosen);
kdtree_status experts_bf16(const ExpertsBf16Args& args, cudaStream_t stream);

}  // namespace kdtree
