#include "model/tensors.h"

#include <cmath>
#include <cstring>
#include <kdtr/kdtr.hpp>

namespace kdtree {
namespace {

float from_half(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  float value;
  if (exponent == 31)
    value = mantissa == 0 ? INFINITY : NAN;
  else if (exponent == 0)
    value = std::ldexp(static_cast<float>(mantissa), -24);
  else
    value = std::ldexp(static_cast<float>(mantissa | 1024), exponent - 25);
  return bits >> 15 ? -value : value;
}

template <typename Stored, typename Convert>
std::vector<float> converted(const std::vector<unsigned char>& data, Convert convert) {
  std::vector<float> values(data.size() / sizeof(Stored));
  for (size_t i = 0; i < values.size(); ++i) {
    Stored stored;
    std::memcpy(&stored, data.data() + i * sizeof(Stored), sizeof(Stored));
    values[i] = convert(stored);
  }
  return values;
}

}  // namespace

int64_t HostTensor::elements() const {
  int64_t product = 1;
  for (const int64_t size : shape) product *= size;
  return product;
}

std::vector<float> HostTensor::floats(const std::string& name) const {
  if (dtype == "f32") return converted<float>(data, [](float value) { return value; });
  if (dtype == "f64") return converted<double>(data, [](double value) { return static_cast<float>(value); });
  if (dtype == "f16") return converted<uint16_t>(data, from_half);
  if (dtype == "bf16")
    return converted<uint16_t>(data, [](uint16_t bits) {
      const uint32_t wide = static_cast<uint32_t>(bits) << 16;
      float value;
      std::memcpy(&value, &wide, sizeof value);
      return value;
    });
  throw ModelError(name + " has type " + dtype + ", a weight is one of f32, f64, bf16, f16");
}

TensorMap read_kdtr(const std::string& path, const std::string& kind) {
  try {
    const kdtr::File file(path);
    if (file.kind() != kind)
      throw ModelError(path + ": a KDTR file of kind '" + std::string(file.kind()) + "', expected '" + kind + "'");
    file.verify();
    TensorMap tensors;
    for (uint64_t i = 0; i < file.size(); ++i) {
      const kdtr::Tensor tensor = file[i];
      HostTensor& made = tensors[std::string(tensor.name)];
      made.dtype = kdtr::DTYPE_NAMES[static_cast<int>(tensor.dtype)];
      made.shape.assign(tensor.shape.begin(), tensor.shape.begin() + tensor.ndim);
      made.data.assign(tensor.data, tensor.data + tensor.nbytes);
    }
    return tensors;
  } catch (const kdtr::Exception& error) {
    throw ModelError(error.what());
  }
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

}  // namespace kdtree
