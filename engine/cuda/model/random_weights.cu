// Random weights: element i is word i % 4 of Philox at (i / 4, number of the tensor), uniform around a centre.
#include <algorithm>
#include <cmath>

#include "common/error.h"
#include "common/philox.h"
#include "kernels/bf16.h"
#include "model/config.h"
#include "model/memory.h"
#include "model/random_weights.h"

namespace kdtree {
namespace {

constexpr int kThreads = 256, kWords = 4;
constexpr int64_t kMaxBlocks = 4096;

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// Elements 4 * index .. 4 * index + 3. A word's upper 24 bits are exact in float32, so two roundings give the value.
__host__ __device__ inline void four_values(const RandomValues& random, uint64_t index, float values[kWords]) {
  const PhiloxWords words =
      philox(random.seed, static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), random.number);
  for (int i = 0; i < kWords; ++i) {
    const float unit = static_cast<float>(static_cast<int32_t>(words.x[i]) >> 8) * 0x1p-23f;  // [-1, 1)
    values[i] = random.centre + random.spread * unit;
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) fill_random_kernel(T* to, RandomValues random, uint64_t elements) {
  const uint64_t step = static_cast<uint64_t>(gridDim.x) * kThreads;
  for (uint64_t index = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x; index * kWords < elements;
       index += step) {
    float values[kWords];
    four_values(random, index, values);
    for (int i = 0; i < kWords; ++i)
      if (index * kWords + i < elements) to[index * kWords + i] = stored<T>(values[i]);
  }
}

// Uniform numbers of this variance reach so far.
float reach(double variance) { return static_cast<float>(std::sqrt(3.0 * variance)); }

}  // namespace

TensorMap random_weights(TensorMap tensors, const std::string& kind, uint64_t seed) {
  const auto shapes =
      kind == "model" ? TargetConfig::read(tensors).weight_shapes() : DrafterConfig::read(tensors).weight_shapes();
  check_weights(tensors, {}, {});
  uint32_t number = 0;
  for (const auto& [name, shape] : shapes) {
    RandomValues random{seed, number++, 0.0f, reach(2.25 / static_cast<double>(shape.back()))};
    if (ends_with(name, "norm.weight"))
      random.centre = 1.0f, random.spread = reach(0.04);
    else if (ends_with(name, "e_score_correction_bias"))
      random.spread = reach(0.0004);  // experts are chosen by scores, the bias decides between near ones
    else if (ends_with(name, "embed_tokens.weight"))
      random.spread = reach(1.0);
    HostTensor& made = tensors[name];
    made.shape = shape;
    made.random = random;
  }
  return tensors;
}

template <typename T>
std::vector<T> random_values(const RandomValues& random, size_t elements) {
  std::vector<T> made(elements);
  for (size_t index = 0; index * kWords < elements; ++index) {
    float values[kWords];
    four_values(random, index, values);
    const size_t left = std::min<size_t>(kWords, elements - index * kWords);
    for (size_t i = 0; i < left; ++i) keep(values[i], &made[index * kWords + i]);
  }
  return made;
}

template <typename T>
void fill_random(T* to, const RandomValues& random, size_t elements) {
  if (elements == 0) return;
  const int64_t blocks = std::min<int64_t>(ceil_div(static_cast<int64_t>(elements), kThreads * kWords), kMaxBlocks);
  KDTREE_LAUNCH((fill_random_kernel<T>), dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, nullptr, to, random,
                static_cast<uint64_t>(elements));
  require(check_launch("fill_random_kernel"));
  require_cuda(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
}

template std::vector<float> random_values(const RandomValues&, size_t);
template std::vector<uint16_t> random_values(const RandomValues&, size_t);
template void fill_random(float*, const RandomValues&, size_t);
template void fill_random(uint16_t*, const RandomValues&, size_t);

}  // namespace kdtree
