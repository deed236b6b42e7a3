// Rotary embedding: pair i of a head turns by the angle of its row's position. A thread for a pair.

#include <cmath>
#include <vector>

#include "common/behind.h"
#include "kernels/rope.h"

namespace kdtree {
namespace {

constexpr int kThreads = 128;

template <typename T>
__global__ void __launch_bounds__(kThreads) rope_kernel(RopeArgs<T> a) {
  start_behind();
  const int row = static_cast<int>(blockIdx.x);
  if (a.node_count != nullptr && row % a.block > a.node_count[row / a.block]) return;
  const int half = a.width / 2;
  const int64_t pair = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
  if (pair >= static_cast<int64_t>(a.heads) * half) return;
  const int64_t entry = static_cast<int64_t>(a.positions[row]) * half;
  turn_pair(a.x + row * a.x_stride + pair / half * a.head_stride, a.width, static_cast<int>(pair % half), a.cos + entry,
            a.sin + entry, a.layout);
}

// Which (fractional) pair makes `rotations` full turns over the original context.
double turning_pair(const RopeParameters& p, double rotations, int width) {
  constexpr double kPi = 3.14159265358979323846;
  return width * std::log(p.original_length / (rotations * 2 * kPi)) / (2 * std::log(p.theta));
}

// Radians per position of each of the width / 2 pairs.
std::vector<float> frequencies(const RopeParameters& p, int width) {
  double low = 0, high = 0;
  if (p.yarn) {
    low = turning_pair(p, p.beta_fast, width);
    high = turning_pair(p, p.beta_slow, width);
    if (p.truncate) {
      low = std::floor(low);
      high = std::ceil(high);
    }
    low = std::fmax(low, 0.0);
    high = std::fmin(high, width - 1.0);
    if (low == high) high += 0.001;
  }
  std::vector<float> result;
  for (int i = 0; i < width / 2; ++i) {
    const double plain = std::pow(p.theta, -(2.0 * i) / width);
    // 0: a fast pair keeps its frequency; 1: a slow pair is stretched by the factor.
    const double ramp = p.yarn ? std::fmin(std::fmax((i - low) / (high - low), 0.0), 1.0) : 0.0;
    result.push_back(static_cast<float>(p.yarn ? plain / p.factor * ramp + plain * (1.0 - ramp) : plain));
  }
  return result;
}

template <typename T>
kdtree_status rope_rows(const RopeArgs<T>& a, cudaStream_t stream) {
  Arguments arguments("rope");
  arguments.range("rows", a.rows, 1, 0x7fffffff)
      .range("heads", a.heads, 1, 1 << 20)
      .range("width", a.width, 2, 1 << 20)
      .range("width % 2", a.width % 2, 0, 0)
      .range("heads * width / 2", static_cast<int64_t>(a.heads) * (a.width / 2), 1, 65535 * kThreads)
      .range("layout", static_cast<int>(a.layout), 0, 1)
      .array("x", a.x, sizeof(T))
      .array("cos", a.cos, sizeof(float))
      .array("sin", a.sin, sizeof(float))
      .array("positions", a.positions, sizeof(int32_t))
      .array("node_count", a.node_count, sizeof(int32_t), false);
  if (a.heads > 1) arguments.range("head_stride", a.head_stride, a.width, INT64_MAX);
  if (a.node_count != nullptr) arguments.range("block", a.block, 1, a.rows);
  KDTREE_RETURN_IF_FAILED(arguments.status());
  const int64_t pairs = static_cast<int64_t>(a.heads) * (a.width / 2);
  const dim3 grid(static_cast<unsigned>(a.rows), static_cast<unsigned>(ceil_div(pairs, kThreads)));
  return launch_behind("rope_kernel", rope_kernel<T>, grid, dim3(kThreads), 0, stream, a);
}

}  // namespace

kdtree_status rope(const RopeArgs<float>& args, cudaStream_t stream) { return rope_rows(args, stream); }
kdtree_status rope(const RopeArgs<uint16_t>& args, cudaStream_t stream) { return rope_rows(args, stream); }

void rope_tables(const RopeParameters& parameters, int width, int positions, float* cos, float* sin) {
  const std::vector<float> frequency = frequencies(parameters, width);
  for (int position = 0; position < positions; ++position) {
    for (const float turn : frequency) {
      const float angle = static_cast<float>(position) * turn;
      *cos++ = static_cast<float>(std::cos(static_cast<double>(angle)) * parameters.amplitude);
      *sin++ = static_cast<float>(std::sin(static_cast<double>(angle)) * parameters.amplitude);
    }
  }
}

}  // namespace kdtree
