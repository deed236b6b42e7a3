// The test layer of the C++ tests: cases, checks that print what they compared, guarded device arrays, golden files.
//
//   #include "tests/check.h"
//   TEST(root_alone) {
//     check::Array<int32_t> count(1);
//     ...
//     CHECK_OK(kdtree_tree_build(&args));
//     CHECK_EQUAL(count.read()[0], 0);
//   }
//
// One .cu file is one program; it brings main() by including this. `program [word]` runs the cases whose name holds the
// word. Exit status: 0 passed, 1 failed, 77 there is no device to run on (the reason is printed). The same source is
// compiled by nvcc for a GPU and, with KDTREE_HOST, by g++ for the CPU: cudaMalloc and friends are there in both.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <kdtr/kdtr.hpp>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "common/port.h"
#include "kdtree_engine.h"

namespace check {

// KDTREE_TINY=1: a sanitizer watches, and every block costs a hundred times as much. Shrink grids, not their kinds.
inline bool tiny() {
  const char* value = std::getenv("KDTREE_TINY");
  return value != nullptr && std::strcmp(value, "1") == 0;
}

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  const char* slash = std::strrchr(file, '/');
  throw std::runtime_error(std::string(slash ? slash + 1 : file) + ":" + std::to_string(line) + ": " + what);
}

template <class T>
std::string text(const T& value) {
  std::ostringstream out;
  out.precision(17);
  if constexpr (std::is_same_v<T, std::nullptr_t>)
    out << "NULL";
  else if constexpr (std::is_enum_v<T> || (std::is_integral_v<T> && sizeof(T) == 1))
    out << static_cast<int>(value);
  else
    out << value;
  return out.str();
}

template <class T>
constexpr bool negative(T value) {
  if constexpr (std::is_signed_v<T>)
    return value < 0;
  else
    return false;
}

// Signed and unsigned numbers compare as numbers: -1 is not 0xffffffff.
template <class A, class B>
bool same(const A& a, const B& b) {
  if constexpr (std::is_integral_v<A> && std::is_integral_v<B>) {
    if (negative(a) != negative(b)) return false;
    return static_cast<std::common_type_t<A, B>>(a) == static_cast<std::common_type_t<A, B>>(b);
  } else {
    return a == b;
  }
}

template <class A, class B>
void equal(const A& actual, const B& expected, const char* expression, const char* file, int line) {
  if (!same(actual, expected))
    fail(file, line, std::string(expression) + ": expected " + text(expected) + ", got " + text(actual));
}

// `what` names the array. NaN equals nothing; compare bits where NaN may stand.
template <class A, class B>
void equal_all(const A& actual, const B& expected, const char* what, const char* file, int line) {
  const size_t n = static_cast<size_t>(std::end(expected) - std::begin(expected));
  equal(static_cast<size_t>(std::end(actual) - std::begin(actual)), n, (std::string(what) + ", size").c_str(), file,
        line);
  for (size_t i = 0; i < n; ++i)
    equal(std::begin(actual)[i], std::begin(expected)[i], (std::string(what) + "[" + std::to_string(i) + "]").c_str(),
          file, line);
}

inline void near(double actual, double expected, double tolerance, const char* expression, const char* file, int line) {
  if (!(std::fabs(actual - expected) <= tolerance))  // written so that NaN fails
    fail(file, line,
         std::string(expression) + ": expected " + text(expected) + " within " + text(tolerance) + ", got " +
             text(actual));
}

inline void cuda(cudaError_t error, const char* expression, const char* file, int line) {
  if (error != cudaSuccess)
    fail(file, line, std::string(expression) + ": " + cudaGetErrorName(error) + ", " + cudaGetErrorString(error));
}

inline void status(kdtree_status got, kdtree_status expected, const char* expression, const char* file, int line) {
  if (got != expected)
    fail(file, line,
         std::string(expression) + ": expected status " + text(expected) + ", got " + text(got) + ": '" +
             kdtree_last_error() + "'");
}

#define CHECK(condition) ((condition) ? (void)0 : check::fail(__FILE__, __LINE__, #condition " is false"))
#define CHECK_EQUAL(actual, expected) check::equal(actual, expected, #actual, __FILE__, __LINE__)
#define CHECK_EQUAL_ALL(actual, expected, what) check::equal_all(actual, expected, what, __FILE__, __LINE__)
#define CHECK_NEAR(actual, expected, tolerance) check::near(actual, expected, tolerance, #actual, __FILE__, __LINE__)
#define CHECK_CUDA(call) check::cuda(call, #call, __FILE__, __LINE__)
#define CHECK_OK(call) check::status(call, KDTREE_OK, #call, __FILE__, __LINE__)
// For calls that must be refused.
#define CHECK_STATUS(call, expected) check::status(call, expected, #call, __FILE__, __LINE__)

// n elements in device memory. New ones hold 0xa5 in every byte, so that what nothing wrote is seen; the bytes around
// are guarded: read() fails if something wrote there.
template <class T>
class Array {
 public:
  explicit Array(size_t n) : n_(n) {
    CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&base_), bytes() + 2 * kGuard));
    CHECK_CUDA(cudaMemset(base_, kFiller, bytes() + 2 * kGuard));
  }
  Array(std::initializer_list<T> values) : Array(std::vector<T>(values)) {}
  explicit Array(const std::vector<T>& values) : Array(values.size()) { write(values.data(), values.size()); }
  explicit Array(const kdtr::View<T>& view) : Array(static_cast<size_t>(view.size)) { write(view.data, n_); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  Array(Array&& other) noexcept : n_(other.n_), base_(other.base_) { other.base_ = nullptr; }
  ~Array() {
    if (base_ != nullptr) (void)cudaFree(base_);
  }

  size_t size() const { return n_; }
  size_t bytes() const { return n_ * sizeof(T); }
  T* get() const { return reinterpret_cast<T*>(base_ + kGuard); }

  void write(const T* values, size_t n) {
    CHECK(n <= n_);
    if (n > 0) CHECK_CUDA(cudaMemcpy(get(), values, n * sizeof(T), cudaMemcpyHostToDevice));
  }

  // Waits for the device.
  std::vector<T> read() const {
    std::vector<unsigned char> all(bytes() + 2 * kGuard);
    CHECK_CUDA(cudaDeviceSynchronize());
    CHECK_CUDA(cudaMemcpy(all.data(), base_, all.size(), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < kGuard; ++i) {
      const size_t after = kGuard + bytes() + i;
      if (all[i] != kFiller) fail(__FILE__, __LINE__, std::to_string(kGuard - i) + " bytes before an array were hit");
      if (all[after] != kFiller) fail(__FILE__, __LINE__, std::to_string(i) + " bytes behind an array were hit");
    }
    std::vector<T> values(n_);
    if (n_ > 0) std::memcpy(values.data(), all.data() + kGuard, bytes());
    return values;
  }

 private:
  static constexpr size_t kGuard = 256;  // also keeps what lies between aligned to 256
  static constexpr unsigned char kFiller = 0xa5;
  size_t n_;
  unsigned char* base_ = nullptr;
};

// datasets/golden/<name>, verified. $KDTREE_GOLDEN: another folder.
inline kdtr::File golden(const std::string& name) {
  const char* folder = std::getenv("KDTREE_GOLDEN");
  const std::string here = __FILE__;
  const std::string base = folder ? folder : here.substr(0, here.rfind('/') + 1) + "../../../datasets/golden";
  kdtr::File file(base + "/" + name);
  file.verify();
  return file;
}

struct Case {
  const char* name;
  void (*body)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Registered {
  Registered(const char* name, void (*body)()) { cases().push_back({name, body}); }
};

#define TEST(name)                                         \
  static void name();                                      \
  static const check::Registered name##_case(#name, name); \
  static void name()

// Why nothing can run here; "" if it can.
inline std::string device_missing() {
  int32_t count = 0;
  if (kdtree_device_count(&count) != KDTREE_OK) return kdtree_last_error();
  if (count == 0) return "no CUDA device";
  kdtree_device_info info{};
  info.struct_size = sizeof(info);
  if (kdtree_device_query(&info) != KDTREE_OK) return kdtree_last_error();
  if (!info.usable) return std::string(info.name) + " is none of the built architectures " + kdtree_architectures();
  return "";
}

inline int main(int argc, char** argv) {
  if (const std::string reason = device_missing(); !reason.empty()) {
    std::printf("SKIP: %s\n", reason.c_str());
    return 77;
  }
  int ran = 0, failed = 0;
  for (const Case& one : cases()) {
    if (argc > 1 && std::strstr(one.name, argv[1]) == nullptr) continue;
    ++ran;
    try {
      one.body();
      std::printf("ok %s\n", one.name);
    } catch (const std::exception& error) {
      ++failed;
      std::printf("FAILED %s: %s\n", one.name, error.what());
    }
    std::fflush(stdout);
  }
  std::printf("%d cases, %d failed\n", ran, failed);
  return ran == 0 || failed > 0 ? 1 : 0;
}

}  // namespace check

int main(int argc, char** argv) { return check::main(argc, argv); }
