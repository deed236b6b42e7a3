// The named tensors of a model on the host: weights by their published names, and the config as `config/...` entries.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace kdtree {

// A model that is not what it says. The message lists every fault.
class ModelError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Bytes that nobody changes: copies share them, with a file's if they lie there.
class Bytes {
 public:
  Bytes() = default;
  Bytes(std::shared_ptr<const unsigned char> data, size_t size) : data_(std::move(data)), size_(size) {}
  static Bytes copied(const void* data, size_t size);

  const unsigned char* data() const { return data_.get(); }
  size_t size() const { return size_; }
  const unsigned char* begin() const { return data(); }
  const unsigned char* end() const { return data() + size_; }
  unsigned char operator[](size_t i) const { return data()[i]; }
  bool operator==(const Bytes& other) const;

 private:
  std::shared_ptr<const unsigned char> data_;
  size_t size_ = 0;
};

// Uniform numbers in [centre - spread, centre + spread): functions of a seed, the tensor's number and the element's.
struct RandomValues {
  uint64_t seed;
  uint32_t number;
  float centre, spread;
};

// dtype: a KDTR name ("f32", "bf16", "i64" ...). data: elements in C order. random: in place of both.
struct HostTensor {
  std::string dtype;
  std::vector<int64_t> shape;
  Bytes data;
  std::optional<RandomValues> random;

  int64_t elements() const;
  // The elements as T: float, or uint16_t for bf16 bits. What T cannot hold is rounded to nearest, ties to even, f64 to
  // bf16 by way of f32; f32, bf16 and f16 fit float32 exactly. Throws ModelError for other types.
  template <typename T>
  std::vector<T> values(const std::string& name) const;
  // Whether they are kept as T.
  template <typename T>
  bool holds() const {
    static_assert(sizeof(T) == sizeof(float) || sizeof(T) == sizeof(uint16_t), "float or bf16 bits");
    return dtype == (sizeof(T) == sizeof(float) ? "f32" : "bf16");
  }
};

// A value as float, or as the nearest bf16 bits, ties to even.
void keep(float value, float* to);
void keep(float value, uint16_t* to);

using TensorMap = std::map<std::string, HostTensor>;

// All tensors of a KDTR file, verified. kind: "model" or "drafter". Throws ModelError naming the file.
TensorMap read_kdtr(const std::string& path, const std::string& kind);

// "[3, 4]"
std::string shape_text(const std::vector<int64_t>& shape);

}  // namespace kdtree
