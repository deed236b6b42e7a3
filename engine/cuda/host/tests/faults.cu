// Kernels with one planted fault each, named by the argument: `faults missing_barrier`. Exit status 0 says that the
// results are right, 1 that they are wrong; a fault that ends the program does so with a status of its own.
#include <cstdio>
#include <cstring>
#include <vector>

#include "common/ptx.h"

namespace {

using namespace kdtree;

__device__ float* dynamic_floats() {
  KDTREE_DYNAMIC_SHARED(raw);
  return reinterpret_cast<float*>(raw);
}

// --- faults of ordering; TSan names the lines that are marked

__global__ void missing_barrier(float* x) {
  float* shared = dynamic_floats();
  const int i = threadIdx.x;
  shared[i] = x[i];  // races in missing_barrier
  // missing: __syncthreads();
  x[i] = shared[i < 32 ? i : i - 32];  // races in missing_barrier
}

__global__ void missing_warp_barrier(float* x) {
  float* shared = dynamic_floats();
  const int i = threadIdx.x;
  shared[i] = x[i];  // races in missing_warp_barrier
  // missing: __syncwarp();
  x[i] = shared[i % 32 == 0 ? i : i - 1];  // races in missing_warp_barrier
}

__global__ void shuffle_for_a_barrier(float* x) {
  float* shared = dynamic_floats();
  const int i = threadIdx.x;
  shared[i] = x[i];                                         // races in shuffle_for_a_barrier
  const float same = __shfl_sync(kAllLanes, x[i], i % 32);  // all lanes meet, but their memory is not ordered
  x[i] = shared[i ^ 1] + same - same;                       // races in shuffle_for_a_barrier
}

__global__ void next_block(float* x) {
  if (threadIdx.x == 0) x[blockIdx.x + 1] = x[blockIdx.x] + 10.0f;
}

// The copy is the only group: it has landed for certain only where none may be pending.
template <int kPending>
__global__ void copy_and_wait(float* x) {
  float* shared = dynamic_floats();
  const int i = threadIdx.x;
  copy_async_16(shared + 4 * i, x + 4 * i);
  commit_copies();
  wait_copies<kPending>();
  __syncthreads();
  x[i] = shared[i];
}

// --- faults of memory

__global__ void unwritten_dynamic(float* x) { x[threadIdx.x] += 0.0f * dynamic_floats()[threadIdx.x]; }

__global__ void unwritten_static(float* x) {
  __shared__ float shared[64];
  if (threadIdx.x > 0) shared[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = shared[threadIdx.x];
}

__global__ void overrun_dynamic(float* x) { dynamic_floats()[threadIdx.x + 1] = x[threadIdx.x]; }

__global__ void overrun_static(float* x) {
  __shared__ float shared[64];
  float* own = shared + threadIdx.x;
  own[1] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = shared[threadIdx.x];
}

__global__ void overrun_global(float* x) { x[64 + threadIdx.x] = 1.0f; }

__global__ void misaligned_copy(float* x) {
  copy_async_16(dynamic_floats(), x + 1);
  commit_copies();
  wait_copies<0>();
}

__global__ void misaligned_rows(float* x) {
  uint32_t fragments[4];
  load_matrix(fragments, reinterpret_cast<uint16_t*>(dynamic_floats()) + threadIdx.x % 32);
  x[threadIdx.x] = static_cast<float>(fragments[0]);
}

// --- faults of control

__global__ void barrier_in_a_branch(float* x) {
  if (threadIdx.x < 40)
    __syncthreads();
  else
    x[threadIdx.x] = __shfl_xor_sync(kAllLanes, x[threadIdx.x], 1);
}

__global__ void two_barriers(float* x) {
  if (threadIdx.x < 32)
    __syncthreads();
  else
    __syncthreads();
  x[threadIdx.x] += 0.0f;
}

__global__ void returned_lane(float* x) {
  if (threadIdx.x == 5) return;
  x[threadIdx.x] = __shfl_xor_sync(kAllLanes, x[threadIdx.x], 16);
}

__global__ void absent_lane(float* x) {
  if (threadIdx.x != 5) x[threadIdx.x] = __shfl_xor_sync(kAllLanes, x[threadIdx.x], 16);
  __syncthreads();
}

__global__ void foreign_mask(float* x) { x[threadIdx.x] = __shfl_sync(0xffffu, x[threadIdx.x], 0); }

__global__ void two_operations(float* x) {
  if (threadIdx.x % 32 < 16)
    x[threadIdx.x] = __shfl_sync(kAllLanes, x[threadIdx.x], 0);
  else
    x[threadIdx.x] = __ballot_sync(kAllLanes, 1);
}

__global__ void lane_out_of_mask(float* x) {
  if (threadIdx.x < 8) x[threadIdx.x] = __shfl_sync(0xffu, x[threadIdx.x], 9);
}

struct Fault {
  const char* name;
  void (*kernel)(float*);
  unsigned blocks, threads;
  float (*expected)(int i);
};

float itself(int i) { return static_cast<float>(i); }

const Fault kFaults[] = {
    {"missing_barrier", missing_barrier, 1, 64, [](int i) { return itself(i < 32 ? i : i - 32); }},
    {"missing_warp_barrier", missing_warp_barrier, 1, 64, [](int i) { return itself(i % 32 == 0 ? i : i - 1); }},
    {"shuffle_for_a_barrier", shuffle_for_a_barrier, 1, 64, [](int i) { return itself(i ^ 1); }},
    {"next_block", next_block, 8, 32, [](int i) { return itself(i <= 8 ? 10 * i : i); }},
    {"weak_wait", copy_and_wait<1>, 1, 16, itself},
    {"right_wait", copy_and_wait<0>, 1, 16, itself},
    {"unwritten_dynamic", unwritten_dynamic, 1, 64, itself},
    {"unwritten_static", unwritten_static, 2, 64, itself},
    {"overrun_dynamic", overrun_dynamic, 1, 64, itself},
    {"overrun_static", overrun_static, 1, 64, itself},
    {"overrun_global", overrun_global, 1, 64, itself},
    {"misaligned_copy", misaligned_copy, 1, 32, itself},
    {"misaligned_rows", misaligned_rows, 1, 32, itself},
    {"barrier_in_a_branch", barrier_in_a_branch, 1, 64, itself},
    {"two_barriers", two_barriers, 1, 64, itself},
    {"returned_lane", returned_lane, 1, 64, itself},
    {"absent_lane", absent_lane, 1, 64, itself},
    {"foreign_mask", foreign_mask, 1, 64, itself},
    {"two_operations", two_operations, 1, 64, itself},
    {"lane_out_of_mask", lane_out_of_mask, 1, 64, itself},
};

}  // namespace

int main(int argc, char** argv) {
  constexpr int kSize = 64;
  for (const Fault& fault : kFaults) {
    if (argc != 2 || std::strcmp(fault.name, argv[1]) != 0) continue;
    float* x = nullptr;
    if (cudaMalloc(&x, kSize * sizeof(float)) != cudaSuccess) return 2;
    for (int i = 0; i < kSize; ++i) x[i] = itself(i);
    KDTREE_LAUNCH(fault.kernel, fault.blocks, fault.threads, kSize * sizeof(float), nullptr, x);
    if (cudaGetLastError() != cudaSuccess) return 2;
    int wrong = 0;
    for (int i = 0; i < kSize; ++i) wrong += !(x[i] == fault.expected(i));
    std::printf("%d of %d are wrong\n", wrong, kSize);
    cudaFree(x);
    return wrong > 0 ? 1 : 0;
  }
  return 2;
}
