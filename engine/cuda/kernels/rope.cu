// Tables of rotary embedding: cosines and sines of the angles by which the pairs of a head turn at each position.

#include <cmath>
#include <vector>

#include "kernels/rope.h"

namespace kdtree {
namespace {

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

}  // namespace

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
