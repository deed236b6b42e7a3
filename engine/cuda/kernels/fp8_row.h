// A cache row in 656 bytes, the layout that FlashMLA and vLLM call fp8_ds_mla: 512 latents as e4m3 codes, a float32
// scale for each 128 of them, 64 rope channels in bf16. reference/fp8_row.py
//
// A latent is code * scale, rounded to bf16: whoever wrote the row, any scale will do. Rows written here have the least
// power of two that brings the largest of 128 latents to 448 or less, so that their products are bf16 numbers already;
// but no less than 2^-117, below which those would lose bits. Zeros have that least scale too. A NaN or an infinity
// makes its group's scale a NaN, and all its latents with it.
//
// The row's values alone decide its bits, on any device.
#pragma once

#include "kernels/bf16.h"

namespace kdtree {

struct Fp8Row {
  static constexpr int kLatent = 512, kRope = 64, kGroup = 128;
  static constexpr int kScalesAt = kLatent, kRopeAt = kScalesAt + kLatent / kGroup * 4, kBytes = kRopeAt + 2 * kRope;
};
static_assert(Fp8Row::kBytes == 656);

// The scale of latents of which the largest has these bits, the sign left out.
__device__ inline float fp8_scale(uint32_t largest) {
  if (largest >= 0x7f800000u) return __uint_as_float(0x7fc00000u);
  const int exponent = static_cast<int>(largest >> 23) - 8 + ((largest & 0x7fffffu) > 0x600000u ? 1 : 0);
  return __uint_as_float(static_cast<uint32_t>(max(exponent, 127 - 117)) << 23);
}

// The code nearest to `value`, ties to even, +-448 at most; 0x7f of a NaN.
__device__ inline uint32_t e4m3_code(float value) {
  const uint32_t bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7f;
  // Below 2^-6 codes lie 2^-9 apart, as floats do from 2^14 on.
  const uint32_t code = magnitude < 121u << 23
                            ? __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 0x1p14f)) - __float_as_uint(0x1p14f)
                            : ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
  return min(code, 0x7eu) | bits >> 31 << 7;
}

// The values of the codes in the two low bytes, the lowest first.
__device__ inline float2 e4m3_pair(uint32_t codes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  float2 values;
  asm("{\n.reg .b32 both;\n.reg .f16 first, second;\n"
      "cvt.rn.f16x2.e4m3x2 both, %2;\n"
      "mov.b32 {first, second}, both;\n"
      "cvt.f32.f16 %0, first;\n"
      "cvt.f32.f16 %1, second;\n}"
      : "=f"(values.x), "=f"(values.y)
      : "h"(static_cast<uint16_t>(codes)));
  return values;
#else
  const auto value = [](uint32_t code) {  // its exponent and mantissa as those of a float that is 2^120 too small
    const float small = __uint_as_float((code & 0x7fu) << 20 | (code & 0x80u) << 24);
    return (code & 0x7fu) == 0x7f ? __uint_as_float(0x7fc00000u) : small * 0x1p120f;
  };
  return make_float2(value(codes & 0xffu), value(codes >> 8 & 0xffu));
#endif
}

// Channel `i` of a row, rope behind the latents.
__device__ inline float fp8_row_value(const unsigned char* row, int i) {
  if (i >= Fp8Row::kLatent) return widen(reinterpret_cast<const uint16_t*>(row + Fp8Row::kRopeAt)[i - Fp8Row::kLatent]);
  const float scale = reinterpret_cast<const float*>(row + Fp8Row::kScalesAt)[i / Fp8Row::kGroup];
  return rounded<uint16_t>(e4m3_pair(row[i]).x * scale);
}

// Latents c to c + 3 of a row, by each lane of a warp that has the 128 of a group.
__device__ inline void put_fp8_latents(unsigned char* row, int c, float4 v) {
  const auto magnitude = [](float value) { return __float_as_uint(value) & 0x7fffffffu; };
  const uint32_t own = max(max(magnitude(v.x), magnitude(v.y)), max(magnitude(v.z), magnitude(v.w)));
  const float scale = fp8_scale(__reduce_max_sync(kAllLanes, own));
  *reinterpret_cast<uint32_t*>(row + c) = e4m3_code(v.x / scale) | e4m3_code(v.y / scale) << 8 |
                                          e4m3_code(v.z / scale) << 16 | e4m3_code(v.w / scale) << 24;
  if (c % Fp8Row::kGroup == 0) reinterpret_cast<float*>(row + Fp8Row::kScalesAt)[c / Fp8Row::kGroup] = scale;
}

}  // namespace kdtree
