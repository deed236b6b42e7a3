// The named tensors of a model on the host: weights by their published names, and the config as `config/...` entries.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace kdtree {

// A model that is not what it says. The message lists every fault.
class ModelError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// dtype: a KDTR name ("f32", "bf16", "i64" ...). data: elements in C order.
struct HostTensor {
  std::string dtype;
  std::vector<int64_t> shape;
  std::vector<unsigned char> data;

  int64_t elements() const;
  // As float32: f32 and bf16 exactly, f16 exactly, f64 rounded. Throws ModelError for other types.
  std::vector<float> floats(const std::string& name) const;
};

using TensorMap = std::map<std::string, HostTensor>;

// All tensors of a KDTR file, verified. kind: "model" or "drafter". Throws ModelError naming the file.
TensorMap read_kdtr(const std::string& path, const std::string& kind);

// "[3, 4]"
std::string shape_text(const std::vector<int64_t>& shape);

}  // namespace kdtree
