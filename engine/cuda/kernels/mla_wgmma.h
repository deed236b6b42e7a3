// The attention of mla_attention_bf16.cu on wgmma and the copy engine: devices of compute capability 9.0.
#pragma once

#include "kernels/attention.h"

namespace kdtree::mla_wgmma {

// Whether the current device has what the kernel needs, and this library code for it.
bool available();

// Bytes of workspace for a pass; 0 and a message on an error.
size_t workspace(int requests, int width, int heads, int longest, int blocks, size_t most);

// For arguments that mla_attention_bf16 has checked.
kdtree_status attention(const MlaAttentionBf16Args& args, cudaStream_t stream);

}  // namespace kdtree::mla_wgmma
