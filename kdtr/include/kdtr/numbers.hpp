// Element types as numbers: the parts of an element (two of a complex one), their values and their ULP keys.
// Section 5 of kdtr/format.py names the types, section 7 defines keys.
#pragma once

#include <cmath>
#include <limits>

#include "format.hpp"

namespace kdtr {
namespace detail {

enum class Special : u8 { ieee, fn, fnuz, finite, scale };  // what the largest codes of a float type mean
struct FloatType {
  int exponent, mantissa, bias;
  Special special;
};

// Float types of at most 16 bits, by dtype code; a mantissa of -1 marks the others.
inline FloatType float_type(u8 dtype) {
  switch (static_cast<DType>(dtype)) {
    case DType::f16:
      return {5, 10, 15, Special::ieee};
    case DType::bf16:
      return {8, 7, 127, Special::ieee};
    case DType::f8_e4m3fn:
      return {4, 3, 7, Special::fn};
    case DType::f8_e5m2:
      return {5, 2, 15, Special::ieee};
    case DType::f8_e4m3fnuz:
      return {4, 3, 8, Special::fnuz};
    case DType::f8_e5m2fnuz:
      return {5, 2, 16, Special::fnuz};
    case DType::f8_e8m0fnu:
      return {8, 0, 127, Special::scale};
    case DType::f8_e3m4:
      return {3, 4, 3, Special::ieee};
    case DType::f8_e4m3:
      return {4, 3, 7, Special::ieee};
    case DType::f8_e4m3b11fnuz:
      return {4, 3, 11, Special::fnuz};
    case DType::f4_e2m1fn:
      return {2, 1, 1, Special::finite};
    case DType::f6_e2m3fn:
      return {2, 3, 1, Special::finite};
    case DType::f6_e3m2fn:
      return {3, 2, 3, Special::finite};
    default:
      return {0, -1, 0, Special::finite};
  }
}

inline double decode_float(u64 code, const FloatType& t) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  if (t.special == Special::scale) return code == 0xFF ? nan : std::ldexp(1.0, static_cast<int>(code) - t.bias);
  const u64 magnitude_bits = static_cast<u64>(t.exponent + t.mantissa), sign = code >> magnitude_bits;
  const u64 magnitude = code & ((u64{1} << magnitude_bits) - 1), fraction = magnitude & ((u64{1} << t.mantissa) - 1);
  const u64 exponent = magnitude >> t.mantissa, top = (u64{1} << t.exponent) - 1;
  double value;
  if (t.special == Special::fnuz && sign == 1 && magnitude == 0) return nan;
  if (t.special == Special::fn && magnitude == (u64{1} << magnitude_bits) - 1) return nan;
  if (t.special == Special::ieee && exponent == top)
    value = fraction == 0 ? inf : nan;
  else if (exponent == 0)
    value = std::ldexp(static_cast<double>(fraction), 1 - t.bias - t.mantissa);
  else
    value = std::ldexp(static_cast<double>(fraction + (u64{1} << t.mantissa)),
                       static_cast<int>(exponent) - t.bias - t.mantissa);
  return sign == 1 ? -value : value;
}

// The parts of a payload's elements, by number: part 2 * i and 2 * i + 1 make complex element i.
struct Parts {
  const u8* data;
  u8 dtype;
  unsigned bits;  // of one part

  Parts(const u8* data_, DType dtype_)
      : data(data_), dtype(static_cast<u8>(dtype_)), bits(DTYPE_BITS[dtype] / per_element()) {}
  bool complex() const { return dtype == static_cast<u8>(DType::c64) || dtype == static_cast<u8>(DType::c128); }
  unsigned per_element() const { return complex() ? 2 : 1; }
  bool is_float() const { return (dtype >= 10 && dtype <= 23) || dtype >= 28; }
  bool is_signed() const { return dtype == 3 || dtype == 5 || dtype == 7 || dtype == 9 || dtype == 24 || dtype == 26; }

  u64 code(u64 i) const {
    if (bits == 64) return load<u64>(data + 8 * i);
    if (bits == 32) return load<std::uint32_t>(data + 4 * i);
    if (bits == 16) return load<std::uint16_t>(data + 2 * i);
    if (bits == 8) return data[i];
    const u64 first = i * bits, byte = first / 8, shift = first % 8;  // 6 bits can lie across two bytes
    unsigned window = data[byte];
    if (shift + bits > 8) window |= static_cast<unsigned>(data[byte + 1]) << 8;
    return (window >> shift) & ((1U << bits) - 1);
  }

  double value(u64 i) const {
    const u64 c = code(i);
    if (!is_float()) {
      if (!is_signed()) return static_cast<double>(c);
      const u64 sign = u64{1} << (bits - 1);
      return static_cast<double>(static_cast<std::int64_t>((c ^ sign) - sign));
    }
    if (bits == 64) return load<double>(&c);
    if (bits == 32) return static_cast<double>(load<float>(data + 4 * i));
    return decode_float(c, float_type(dtype));
  }

  // Distance of the ULP keys of two codes; it fits 64 bits because a key has at most 63.
  u64 distance(u64 a, u64 b) const {
    const u64 sign = dtype == static_cast<u8>(DType::f8_e8m0fnu) ? 0 : u64{1} << (bits - 1);
    const u64 size_a = a & ~sign, size_b = b & ~sign;
    if (((a ^ b) & sign) != 0) return size_a + size_b;
    return size_a > size_b ? size_a - size_b : size_b - size_a;
  }
};

}  // namespace detail
}  // namespace kdtr
