// Numbers of about 106 bits as the sum of two doubles, for the log-sum-exp of rows that are almost normalised: there
// peak and log-sum cancel, and a double has not the bits left that a float32 needs.
// Source: T. J. Dekker, "A floating-point technique for extending the available precision", 1971.
#pragma once

#include <cmath>

#include "common/port.h"

namespace kdtree {

// high + low, |low| at most half a unit in the last place of high.
struct Wide {
  double high;
  double low;
};

__device__ inline Wide exact_sum(double a, double b) {
  const double sum = a + b, b_part = sum - a;
  return {sum, (a - (sum - b_part)) + (b - b_part)};
}

__device__ inline Wide wide_add(Wide a, Wide b) {
  const Wide sum = exact_sum(a.high, b.high);
  return exact_sum(sum.high, sum.low + (a.low + b.low));
}

__device__ inline Wide wide_multiply(Wide a, Wide b) {
  const double product = a.high * b.high;
  return exact_sum(product, fma(a.high, b.high, -product) + (a.high * b.low + a.low * b.high));
}

// e^x for x <= 1; 0 where it is below e^-700.
__device__ inline Wide wide_exp(Wide x) {
  if (!(x.high > -700)) return {0, 0};
  const double n = rint(x.high * 0x1.71547652b82fep+0);
  // ln 2 in three parts; n times the first is exact.
  const double reduced = fma(-n, 0x1.62e42fefa3800p-1, x.high);
  Wide r = exact_sum(reduced, -n * 0x1.ef35793c76730p-45);
  r = exact_sum(r.high, r.low + (x.low - n * 0x1.f97b57a079a19p-103));
  // e^(r / 256) - 1 by its series, then squared eight times.
  const Wide s = {r.high / 256, r.low / 256};
  const Wide square = wide_multiply(s, s);
  const double h = s.high;
  const double rest = h * h * h * (1.0 / 6 + h * (1.0 / 24 + h * (1.0 / 120 + h * (1.0 / 720))));
  Wide e = wide_add(s, wide_add({square.high / 2, square.low / 2}, {rest, 0}));
  KDTREE_UNROLL_BY(1)
  for (int i = 0; i < 8; ++i) e = wide_add({2 * e.high, 2 * e.low}, wide_multiply(e, e));
  e = wide_add({1, 0}, e);
  const double scale = power_of_two(static_cast<int>(n));
  return {e.high * scale, e.low * scale};
}

// peak + log(1 + others), others >= 0.
__device__ inline double log_of_sum(double peak, Wide others) {
  Wide log = {log1p(others.high), 0};
  const Wide all = wide_add({1, 0}, others);  // one step of Newton's method
  log = wide_add(log, wide_add(wide_multiply(all, wide_exp({-log.high, 0})), {-1, 0}));
  return wide_add({peak, 0}, log).high;
}

}  // namespace kdtree
