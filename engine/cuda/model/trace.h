// A copy of every array of a pass, for comparison with the reference's dump of the same pass.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "common/port.h"

namespace kdtree {

// Collects arrays by the reference's trace names and writes them as one KDTR file. Waits for the stream at every array.
class Trace {
 public:
  explicit Trace(std::string prefix = "") : prefix_(std::move(prefix)) {}

  // `rows` rows of `width` elements, `stride` elements apart; their product is that of `shape`.
  void add(const std::string& name, const float* device, int64_t rows, int64_t width, int64_t stride,
           std::vector<int64_t> shape, cudaStream_t stream);
  void add(const std::string& name, const int32_t* device, int64_t rows, int64_t width, int64_t stride,
           std::vector<int64_t> shape, cudaStream_t stream);

  struct Array {
    std::string name;
    bool integer;
    std::vector<int64_t> shape;
    std::vector<unsigned char> bytes;
  };
  const std::vector<Array>& arrays() const { return arrays_; }
  void write(const std::string& path) const;  // KDTR, kind "activations"; "/" in names becomes "."

 private:
  void copy(const std::string& name, bool integer, const void* device, int64_t rows, int64_t width, int64_t stride,
            std::vector<int64_t> shape, cudaStream_t stream);

  std::string prefix_;
  std::vector<Array> arrays_;
};

}  // namespace kdtree
