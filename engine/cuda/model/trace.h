// A copy of every array of a pass, for comparison with the reference's dump of the same pass.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/port.h"

namespace kdtree {

// Collects arrays by the reference's trace names and writes them as one KDTR file. Waits for the stream at every array.
class Trace {
 public:
  explicit Trace(std::string prefix = "") : prefix_(std::move(prefix)) {}

  // `rows` rows of `width` elements, `stride` elements apart; their product is that of `shape`. uint16_t is bf16, and
  // kept as the float32 that it is.
  template <typename T>
  void add(const std::string& name, const T* device, int64_t rows, int64_t width, int64_t stride,
           std::vector<int64_t> shape, cudaStream_t stream) {
    static_assert(std::is_same_v<T, float> || std::is_same_v<T, double> || std::is_same_v<T, int32_t> ||
                  std::is_same_v<T, uint16_t>);
    const char* dtype = std::is_same_v<T, double> ? "f64" : std::is_same_v<T, int32_t> ? "i32" : "f32";
    copy(name, dtype, sizeof(T), device, rows, width, stride, std::move(shape), stream);
  }

  struct Array {
    std::string name, dtype;  // a KDTR type
    std::vector<int64_t> shape;
    std::vector<unsigned char> bytes;
  };
  const std::vector<Array>& arrays() const { return arrays_; }
  void write(const std::string& path) const;  // KDTR; "/" in names becomes "."

 private:
  void copy(const std::string& name, const char* dtype, size_t element, const void* device, int64_t rows, int64_t width,
            int64_t stride, std::vector<int64_t> shape, cudaStream_t stream);

  std::string prefix_;
  std::vector<Array> arrays_;
};

}  // namespace kdtree
