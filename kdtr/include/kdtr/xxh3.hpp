// XXH3-64 with seed 0, the checksum of KDTR, in portable C++17: no intrinsics, so that it also compiles in a .cu file.
// Written from the published description of the algorithm (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "KDTR is little-endian and its readers use the bytes in place: big-endian hosts are not supported"
#endif

namespace kdtr {
namespace xxh3 {

using u8 = std::uint8_t;
using u64 = std::uint64_t;

constexpr u64 P32_1 = 0x9E3779B1, P32_2 = 0x85EBCA77, P32_3 = 0xC2B2AE3D;
constexpr u64 P64_1 = 0x9E3779B185EBCA87, P64_2 = 0xC2B2AE3D27D4EB4F, P64_3 = 0x165667B19E3779F9,
              P64_4 = 0x85EBCA77C2B2AE63, P64_5 = 0x27D4EB2F165667C5;
constexpr u64 MX1 = 0x165667919E3779F9, MX2 = 0x9FB21C651E98DF25;

// The algorithm's constant key of 192 bytes, which is read at any byte offset.
alignas(64) constexpr u8 SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4,
    0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e,
    0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43,
    0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19,
    0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7,
    0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78,
    0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16,
    0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

inline u64 read64(const u8* p) noexcept {
  u64 value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

inline u64 read32(const u8* p) noexcept {
  std::uint32_t value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

inline u64 rotate(u64 x, int bits) noexcept { return (x << bits) | (x >> (64 - bits)); }

inline u64 swap_bytes(u64 x) noexcept {
  x = ((x & 0x00FF00FF00FF00FF) << 8) | ((x >> 8) & 0x00FF00FF00FF00FF);
  x = ((x & 0x0000FFFF0000FFFF) << 16) | ((x >> 16) & 0x0000FFFF0000FFFF);
  return (x << 32) | (x >> 32);
}

// Low half xor high half of the 128-bit product, from four 32-bit products.
inline u64 multiply_fold(u64 a, u64 b) noexcept {
  const u64 a0 = a & 0xFFFFFFFF, a1 = a >> 32, b0 = b & 0xFFFFFFFF, b1 = b >> 32;
  const u64 low = a0 * b0, mid = a1 * b0 + (low >> 32), cross = a0 * b1 + (mid & 0xFFFFFFFF);
  return ((cross << 32) | (low & 0xFFFFFFFF)) ^ (a1 * b1 + (mid >> 32) + (cross >> 32));
}

inline u64 avalanche(u64 h) noexcept {
  h = (h ^ (h >> 37)) * MX1;
  return h ^ (h >> 32);
}

inline u64 avalanche64(u64 h) noexcept {
  h = (h ^ (h >> 33)) * P64_2;
  h = (h ^ (h >> 29)) * P64_3;
  return h ^ (h >> 32);
}

inline u64 mix16(const u8* p, const u8* key) noexcept {
  return multiply_fold(read64(p) ^ read64(key), read64(p + 8) ^ read64(key + 8));
}

inline u64 hash_short(const u8* p, u64 n) noexcept {  // n <= 16
  const u8* s = SECRET;
  if (n > 8) {
    const u64 low = read64(p) ^ read64(s + 24) ^ read64(s + 32);
    const u64 high = read64(p + n - 8) ^ read64(s + 40) ^ read64(s + 48);
    return avalanche(n + swap_bytes(low) + high + multiply_fold(low, high));
  }
  if (n >= 4) {
    u64 h = (read32(p + n - 4) + (read32(p) << 32)) ^ read64(s + 8) ^ read64(s + 16);
    h = (h ^ rotate(h, 49) ^ rotate(h, 24)) * MX2;
    h = (h ^ ((h >> 35) + n)) * MX2;
    return h ^ (h >> 28);
  }
  if (n == 0) return avalanche64(read64(s + 56) ^ read64(s + 64));
  const u64 bytes = (u64{p[0]} << 16) | (u64{p[n >> 1]} << 24) | u64{p[n - 1]} | (n << 8);
  return avalanche64(bytes ^ read32(s) ^ read32(s + 4));
}

inline u64 hash_medium(const u8* p, u64 n) noexcept {  // 17 <= n <= 240
  const u8* s = SECRET;
  u64 acc = n * P64_1;
  if (n <= 128) {
    for (u64 i = (n - 1) / 32 + 1; i-- > 0;)
      acc += mix16(p + 16 * i, s + 32 * i) + mix16(p + n - 16 * (i + 1), s + 32 * i + 16);
    return avalanche(acc);
  }
  for (u64 i = 0; i < 8; ++i) acc += mix16(p + 16 * i, s + 16 * i);
  acc = avalanche(acc);
  for (u64 i = 8; i < n / 16; ++i) acc += mix16(p + 16 * i, s + 16 * (i - 8) + 3);
  return avalanche(acc + mix16(p + n - 16, s + 119));
}

// The lanes go in pairs, so that -O2 makes vector code of them: twice as fast as indexing lane i ^ 1.
inline void accumulate(u64* acc, const u8* p, const u8* key) noexcept {
  for (int i = 0; i < 8; i += 2) {
    const u64 d0 = read64(p + 8 * i), d1 = read64(p + 8 * i + 8);
    const u64 k0 = d0 ^ read64(key + 8 * i), k1 = d1 ^ read64(key + 8 * i + 8);
    acc[i] += d1 + (k0 & 0xFFFFFFFF) * (k0 >> 32);
    acc[i + 1] += d0 + (k1 & 0xFFFFFFFF) * (k1 >> 32);
  }
}

inline u64 hash_long(const u8* p, u64 n) noexcept {  // n > 240
  u64 acc[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
  const u64 blocks = (n - 1) / 1024;
  for (u64 b = 0; b < blocks; ++b) {
    for (u64 i = 0; i < 16; ++i) accumulate(acc, p + 1024 * b + 64 * i, SECRET + 8 * i);
    for (u64 i = 0; i < 8; ++i) acc[i] = (acc[i] ^ (acc[i] >> 47) ^ read64(SECRET + 128 + 8 * i)) * P32_1;
  }
  const u64 stripes = (n - 1 - 1024 * blocks) / 64;
  for (u64 i = 0; i < stripes; ++i) accumulate(acc, p + 1024 * blocks + 64 * i, SECRET + 8 * i);
  accumulate(acc, p + n - 64, SECRET + 121);
  u64 h = n * P64_1;
  for (int i = 0; i < 4; ++i)
    h += multiply_fold(acc[2 * i] ^ read64(SECRET + 11 + 16 * i), acc[2 * i + 1] ^ read64(SECRET + 19 + 16 * i));
  return avalanche(h);
}

}  // namespace xxh3

inline std::uint64_t xxh3_64(const void* data, std::uint64_t n) noexcept {
  const auto* p = static_cast<const std::uint8_t*>(data);
  return n <= 16 ? xxh3::hash_short(p, n) : n <= 240 ? xxh3::hash_medium(p, n) : xxh3::hash_long(p, n);
}

}  // namespace kdtr
