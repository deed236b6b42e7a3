// The KDTR format: its vocabulary, its byte layout and the checks of levels 1 and 2. The specification is the docstring
// of kdtr/format.py; a "step" here is a step of its section 9. Users include kdtr.hpp.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>

#include "xxh3.hpp"

namespace kdtr {

// clang-format off
enum class Error {  // the classes, with their names in Python, in the order of the steps
  NOT_KDTR, TRUNCATED, VERSION, HEADER_SUM, UNSUPPORTED, HEADER, LIMIT, TRAILING, PREFIX_SUM, PADDING, INDEX, NAME,
  DTYPE, SHAPE, LAYOUT, COMPARE, DATA_SUM, VALUE, META, NOT_FOUND, TYPE, IO, ENCODE
};
inline constexpr const char* ERROR_NAMES[] = {
  "NOT_KDTR", "TRUNCATED", "VERSION", "HEADER_SUM", "UNSUPPORTED", "HEADER", "LIMIT", "TRAILING", "PREFIX_SUM",
  "PADDING", "INDEX", "NAME", "DTYPE", "SHAPE", "LAYOUT", "COMPARE", "DATA_SUM", "VALUE", "META", "NOT_FOUND", "TYPE",
  "IO", "ENCODE"
};
enum class Role : std::uint8_t { none, input, expected, param, intermediate, aux };
enum class Compare : std::uint8_t { none, bits, equal, close, ulp, similarity, nmse };
inline constexpr const char* COMPARE_NAMES[] = { "none", "bits", "equal", "close", "ulp", "similarity", "nmse" };
enum class DType : std::uint8_t {
  bool_ = 1, u8, i8, u16, i16, u32, i32, u64, i64, f16, bf16, f32, f64, c64, c128, f8_e4m3fn, f8_e5m2, f8_e4m3fnuz,
  f8_e5m2fnuz, f8_e8m0fnu, f8_e3m4, f8_e4m3, f8_e4m3b11fnuz, i4, u4, i2, u2, f4_e2m1fn, f6_e2m3fn, f6_e3m2fn
};
inline constexpr int DTYPES = 31;  // codes 1 to 30
inline constexpr const char* DTYPE_NAMES[DTYPES] = {
  "none", "bool", "u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64", "f16", "bf16", "f32", "f64", "c64", "c128",
  "f8_e4m3fn", "f8_e5m2", "f8_e4m3fnuz", "f8_e5m2fnuz", "f8_e8m0fnu", "f8_e3m4", "f8_e4m3", "f8_e4m3b11fnuz",
  "i4", "u4", "i2", "u2", "f4_e2m1fn", "f6_e2m3fn", "f6_e3m2fn"
};
inline constexpr std::uint8_t DTYPE_BITS[DTYPES] = {
  0, 8, 8, 8, 16, 16, 32, 32, 64, 64, 16, 16, 32, 64, 64, 128, 8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 2, 2, 4, 6, 6
};
// clang-format on

// what() is "CLASS: file: tensor 'name': message"; tensor is empty where none is concerned.
struct Exception : std::runtime_error {
  Exception(Error code_, const std::string& file_, const std::string& tensor_, const std::string& message_)
      : std::runtime_error(std::string(ERROR_NAMES[static_cast<int>(code_)]) + ": " + file_ + ": " +
                           (tensor_.empty() ? "" : "tensor '" + tensor_ + "': ") + message_),
        code(code_),
        file(file_),
        tensor(tensor_),
        message(message_) {}
  Error code;
  std::string file, tensor, message;
};

struct Tolerance {  // section 7 of the specification
  Compare mode = Compare::none;
  std::uint32_t max_ulp = 0;
  double atol = 0, rtol = 0, limit = 0;

  static Tolerance bits() { return {Compare::bits, 0, 0, 0, 0}; }
  static Tolerance equal() { return {Compare::equal, 0, 0, 0, 0}; }
  static Tolerance close(double atol, double rtol, double bad_fraction = 0) {
    return {Compare::close, 0, atol, rtol, bad_fraction};
  }
  static Tolerance ulp(std::uint32_t max_ulp, double bad_fraction = 0) {
    return {Compare::ulp, max_ulp, 0, 0, bad_fraction};
  }
  static Tolerance similarity(double limit) { return {Compare::similarity, 0, 0, 0, limit}; }
  static Tolerance nmse(double limit) { return {Compare::nmse, 0, 0, 0, limit}; }
};

namespace detail {
using u8 = std::uint8_t;
using u64 = std::uint64_t;
constexpr u64 MAX_TENSORS = u64{1} << 20, MAX_NAMES = u64{64} << 20, MAX_META = u64{16} << 20, MAX_NUMEL = u64{1} << 48;
inline constexpr u8 MAGIC[8] = {0x89, 'K', 'D', 'T', 'R', '\r', '\n', 0x1A};

struct Header {
  u8 magic[8];
  std::uint16_t major_version, minor_version;
  std::uint32_t required_flags;
  u64 file_size;
  std::uint32_t n_tensors, names_len, meta_len, kind_version;
  char kind[32];
  u8 reserved[40];
  u64 prefix_sum, header_sum;
};
struct Record {
  std::uint32_t name_off;
  std::uint16_t name_len;
  u8 dtype, ndim;
  u64 offset, nbytes, data_sum, dim[8];
  u8 role, cmp;
  std::uint16_t flags;
  std::uint32_t max_ulp;
  u64 atol, rtol, limit;  // the bits of f64 values, which are checked as bits
};
static_assert(sizeof(Header) == 128 && sizeof(Record) == 128, "the layout of the file is the natural layout");
static_assert(sizeof(std::size_t) == 8, "sizes are 64-bit numbers: 32-bit hosts are not supported");

template <class T>
T load(const void* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}
inline u64 align(u64 x, u64 to) { return (x + to - 1) & ~(to - 1); }
inline std::string num(u64 x) { return std::to_string(x); }
inline std::string hex(u64 x) {
  std::string text = "0x0000000000000000";
  for (std::size_t i = 17; x != 0; --i, x >>= 4) text[i] = "0123456789abcdef"[x & 15];
  return text;
}
inline std::string quoted(std::string_view bytes) {  // bytes outside printable ASCII as \xNN
  std::string text = "'";
  for (const char c : bytes) {
    if (c >= 0x20 && c < 0x7F)
      text += c;
    else
      text += "\\x" + hex(static_cast<u8>(c)).substr(16);
  }
  return text + "'";
}
inline bool all_zero(const u8* p, u64 n) { return n == 0 || (p[0] == 0 && std::memcmp(p, p + 1, n - 1) == 0); }
inline u64 data_off(const Header& h) { return align(128 + u64{128} * h.n_tensors + h.names_len + h.meta_len, 4096); }

// Throws for one file and, unless empty, one tensor of it; `record` introduces a tensor that has no good name.
struct Fail {
  const std::string& file;
  std::string tensor, record;
  [[noreturn]] void operator()(Error code, const std::string& what) const {
    throw Exception(code, file, tensor, record + what);
  }
  void unless_equal(Error code, const char* field, u64 value, u64 expected) const {
    if (value != expected) (*this)(code, std::string(field) + " " + num(value) + ", expected " + num(expected));
  }
  void unless_sum(Error code, const char* field, u64 value, const u8* p, u64 n) const {
    const u64 expected = xxh3_64(p, n);
    if (value != expected) (*this)(code, std::string(field) + " " + hex(value) + ", the data has " + hex(expected));
  }
};

// Steps 1 to 8; p holds the first min(128, size) bytes of a file of `size` bytes.
inline Header check_header(const u8* p, u64 size, const std::string& file) {
  const Fail fail{file, "", ""};
  if (std::memcmp(p, MAGIC, size < 8 ? size : 8) != 0) {
    const std::string start(reinterpret_cast<const char*>(p), size < 128 ? size : 128);
    if (start.rfind("version https://git-lfs.", 0) == 0)
      fail(Error::NOT_KDTR, "is a Git-LFS pointer, not the data: fetch it with `git lfs pull`");
    fail(Error::NOT_KDTR, "starts with " + quoted(start.substr(0, 8)) + ", expected '\\x89KDTR\\x0d\\x0a\\x1a'");
  }
  if (size < 128) fail(Error::TRUNCATED, "has " + num(size) + " bytes, a header has 128");
  const auto h = load<Header>(p);
  if (h.major_version != 1) fail(Error::VERSION, "major version " + num(h.major_version) + ", expected 1");
  fail.unless_sum(Error::HEADER_SUM, "header_sum", h.header_sum, p, 120);
  if (h.required_flags != 0) fail(Error::UNSUPPORTED, "required_flags " + hex(h.required_flags) + ", known are none");
  if (!all_zero(h.reserved, 40)) fail(Error::HEADER, "a reserved byte is not zero");
  u64 good = 0, shown = 32;
  while (good < 32 && h.kind[good] > 0x20 && h.kind[good] < 0x7F) ++good;
  while (shown > 0 && h.kind[shown - 1] == 0) --shown;
  if (good == 0 || good != shown)
    fail(Error::HEADER, "kind " + quoted({h.kind, shown}) + ", expected 1 to 32 bytes in 0x21..0x7E, then zeros");
  auto cap = [&](const char* field, u64 value, u64 most) {
    if (value > most) fail(Error::LIMIT, std::string(field) + " " + num(value) + ", at most " + num(most));
  };
  cap("n_tensors", h.n_tensors, MAX_TENSORS);
  cap("names_len", h.names_len, MAX_NAMES);
  cap("meta_len", h.meta_len, MAX_META);
  if (h.file_size < data_off(h) || h.file_size % 4096 != 0)
    fail(Error::HEADER, "file_size " + num(h.file_size) + ", expected a multiple of 4096 from " + num(data_off(h)));
  if (size != h.file_size)
    fail(size < h.file_size ? Error::TRUNCATED : Error::TRAILING,
         "has " + num(size) + " bytes, its header says " + num(h.file_size));
  return h;
}

inline bool valid_name(std::string_view name) {
  if (name.empty() || name.size() > 255) return false;
  std::size_t start = 0;
  for (std::size_t i = 0; i <= name.size(); ++i) {
    const char c = i < name.size() ? name[i] : '/';
    if (c == '/') {
      const auto segment = name.substr(start, i - start);
      if (segment.empty() || segment == "." || segment == "..") return false;
      start = i + 1;
    } else if (!((c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || (c >= '@' && c <= '[') || c == ']' || c == '_' ||
                 c == '.' || c == '-' || c == '+' || c == ',' || c == '=' || c == '%')) {
      return false;  // '@', A to Z and '[' are neighbours
    }
  }
  return true;
}

inline std::string_view record_name(const u8* prefix, const Header& h, const Record& r) {
  return {reinterpret_cast<const char*>(prefix) + 128 + u64{128} * h.n_tensors + r.name_off, r.name_len};
}

// Steps 13 and 14.
inline void check_shape(const Record& r, const Fail& fail) {
  if (r.dtype == 0 || r.dtype >= DTYPES) fail(Error::DTYPE, "dtype code " + num(r.dtype) + ", known are 1 to 30");
  if (r.ndim > 8) fail(Error::SHAPE, "ndim " + num(r.ndim) + ", at most 8");
  for (int d = r.ndim; d < 8; ++d) fail.unless_equal(Error::SHAPE, "dim past ndim", r.dim[d], 0);
  u64 product = 1;  // of the dims that are not 0
  bool empty = false;
  for (int d = 0; d < r.ndim; ++d) {
    if (r.dim[d] > MAX_NUMEL) fail(Error::LIMIT, "dim " + num(r.dim[d]) + ", at most 2^48");
    empty = empty || r.dim[d] == 0;
    if (r.dim[d] == 0) continue;
    if (product > MAX_NUMEL / r.dim[d])
      fail(Error::LIMIT, "the product of the dims exceeds 2^48 at dim " + num(r.dim[d]));
    product *= r.dim[d];
  }
  fail.unless_equal(Error::SHAPE, "nbytes", r.nbytes, empty ? 0 : (product * DTYPE_BITS[r.dtype] + 7) / 8);
}

// Step 16.
inline void check_tolerance(const Record& r, const Fail& fail) {
  if (r.role > 5) fail(Error::UNSUPPORTED, "role " + num(r.role) + ", known are 0 to 5");
  if (r.cmp > 6) fail(Error::UNSUPPORTED, "cmp " + num(r.cmp) + ", known are 0 to 6");
  const char* mode = COMPARE_NAMES[r.cmp];
  const bool has_ulp = (r.dtype >= 10 && r.dtype <= 23) || r.dtype >= 28;
  if (r.role == 2 && r.cmp == 0) fail(Error::COMPARE, "role expected with mode none would assert nothing");
  if (r.cmp == 4 && !has_ulp) fail(Error::COMPARE, std::string("mode ulp with dtype ") + DTYPE_NAMES[r.dtype]);
  if (r.cmp != 4 && r.max_ulp != 0) fail(Error::COMPARE, "max_ulp " + num(r.max_ulp) + ", unused in mode " + mode);
  // Values >= 0 sort as their bits do; a negative one, an infinity and a NaN are above all of them.
  auto check = [&](const char* field, u64 bits, bool used, double most) {
    if (bits <= (used ? load<u64>(&most) : 0)) return;
    const char* legal = !used       ? ", unused in mode "
                        : most == 1 ? ", expected 0 to 1 in mode "
                                    : ", expected finite and >= 0 in mode ";
    char value[32];
    std::snprintf(value, sizeof value, "%.17g", load<double>(&bits));
    fail(Error::COMPARE, std::string(field) + " " + value + legal + mode);
  };
  const double finite = std::numeric_limits<double>::max();
  check("atol", r.atol, r.cmp == 3, finite);
  check("rtol", r.rtol, r.cmp == 3, finite);
  check("limit", r.limit, r.cmp >= 3, r.cmp <= 4 ? 1 : finite);
}

// Steps 9 to 15e; prefix holds the first data_off bytes.
inline void check_index(const u8* prefix, const Header& h, const std::string& file) {
  const Fail whole{file, "", ""};
  const u64 end = data_off(h), used = 128 + u64{128} * h.n_tensors + h.names_len + h.meta_len;
  whole.unless_sum(Error::PREFIX_SUM, "prefix_sum", h.prefix_sum, prefix + 128, end - 128);
  if (!all_zero(prefix + used, end - used)) whole(Error::PADDING, "a byte between metadata and payloads is not zero");
  u64 names_end = 0, payload_end = end;
  std::string_view before;
  for (u64 i = 0; i < h.n_tensors; ++i) {
    const auto r = load<Record>(prefix + 128 + 128 * i);
    Fail fail{file, "", "record " + num(i) + ": "};
    fail.unless_equal(Error::INDEX, "name_off", r.name_off, names_end);
    names_end += r.name_len;
    if (names_end > h.names_len) fail(Error::INDEX, "the name ends at " + num(names_end) + " of " + num(h.names_len));
    fail.unless_equal(Error::INDEX, "flags", r.flags, 0);
    const std::string_view name = record_name(prefix, h, r);
    if (!valid_name(name)) fail(Error::NAME, "the name " + quoted(name) + " is not legal");
    if (name <= before) fail(Error::NAME, "the name " + quoted(name) + " comes after " + quoted(before));
    before = name;
    fail.tensor = name;
    fail.record.clear();
    check_shape(r, fail);
    fail.unless_equal(Error::LAYOUT, "offset", r.offset, align(payload_end, 256));
    payload_end = r.offset + r.nbytes;
    if (r.nbytes > h.file_size - r.offset)
      fail(Error::LAYOUT, "ends at " + num(payload_end) + " of " + num(h.file_size));
    check_tolerance(r, fail);
  }
  whole.unless_equal(Error::INDEX, "names_len", h.names_len, names_end);
  whole.unless_equal(Error::LAYOUT, "file_size", h.file_size, align(payload_end, 4096));
}

// Step 17.3.
inline void check_values(const u8* payload, const Record& r, const Fail& fail) {
  if (r.dtype == static_cast<u8>(DType::bool_)) {
    u8 any = 0;
    for (u64 i = 0; i < r.nbytes; ++i) any = static_cast<u8>(any | payload[i]);
    if (any > 1) fail(Error::VALUE, "a bool byte is neither 0 nor 1");
  }
  if (DTYPE_BITS[r.dtype] < 8 && r.nbytes > 0) {
    u64 bits = DTYPE_BITS[r.dtype];
    for (int d = 0; d < r.ndim; ++d) bits *= r.dim[d];
    if (bits % 8 != 0 && payload[r.nbytes - 1] >> bits % 8 != 0)
      fail(Error::VALUE, "a spare bit of its last byte is set");
  }
}

// Step 17 for one tensor; payload holds the bytes from r.offset to `end`, the next tensor's offset or the file's end.
inline void check_payload(const u8* payload, const Record& r, u64 end, const Fail& fail) {
  fail.unless_sum(Error::DATA_SUM, "data_sum", r.data_sum, payload, r.nbytes);
  if (!all_zero(payload + r.nbytes, end - r.offset - r.nbytes)) fail(Error::PADDING, "a byte after it is not zero");
  check_values(payload, r, fail);
}

}  // namespace detail
}  // namespace kdtr
