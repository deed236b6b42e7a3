#include "model/tensors.h"

#include <cmath>
#include <cstring>
#include <kdtr/kdtr.hpp>

#include "model/random_weights.h"

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

float from_bf16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

template <typename T, typename Stored, typename Widen>
std::vector<T> converted(const Bytes& data, Widen widen) {
  std::vector<T> values(data.size() / sizeof(Stored));
  for (size_t i = 0; i < values.size(); ++i) {
    Stored stored;
    std::memcpy(&stored, data.data() + i * sizeof(Stored), sizeof(Stored));
    keep(widen(stored), &values[i]);
  }
  return values;
}

}  // namespace

void keep(float value, float* to) { *to = value; }
void keep(float value, uint16_t* to) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  *to = std::isnan(value) ? uint16_t{0x7fc0} : static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

Bytes Bytes::copied(const void* data, size_t size) {
  const std::shared_ptr<unsigned char> copy(new unsigned char[size], std::default_delete<unsigned char[]>());
  if (size > 0) std::memcpy(copy.get(), data, size);
  return {copy, size};
}

bool Bytes::operator==(const Bytes& other) const {
  return size_ == other.size_ &&
         (data() == other.data() || size_ == 0 || std::memcmp(data(), other.data(), size_) == 0);
}

int64_t HostTensor::elements() const {
  int64_t product = 1;
  for (const int64_t size : shape) product *= size;
  return product;
}

template <typename T>
std::vector<T> HostTensor::values(const std::string& name) const {
  if (random.has_value()) return random_values<T>(*random, static_cast<size_t>(elements()));
  if (dtype == "f32") return converted<T, float>(data, [](float value) { return value; });
  if (dtype == "f64") return converted<T, double>(data, [](double value) { return static_cast<float>(value); });
  if (dtype == "f16") return converted<T, uint16_t>(data, from_half);
  if (dtype == "bf16") return converted<T, uint16_t>(data, from_bf16);
  throw ModelError(name + " has type " + dtype + ", a weight is one of f32, f64, bf16, f16");
}

template std::vector<float> HostTensor::values(const std::string& name) const;
template std::vector<uint16_t> HostTensor::values(const std::string& name) const;

TensorMap read_kdtr(const std::string& path, const std::string& kind) {
  try {
    const auto file = std::make_shared<const kdtr::File>(path);
    if (file->kind() != kind)
      throw ModelError(path + ": a KDTR file of kind '" + std::string(file->kind()) + "', expected '" + kind + "'");
    file->verify();
    TensorMap tensors;
    for (uint64_t i = 0; i < file->size(); ++i) {
      const kdtr::Tensor tensor = (*file)[i];
      HostTensor& made = tensors[std::string(tensor.name)];
      made.dtype = kdtr::DTYPE_NAMES[static_cast<int>(tensor.dtype)];
      made.shape.assign(tensor.shape.begin(), tensor.shape.begin() + tensor.ndim);
      made.data = {std::shared_ptr<const unsigned char>(file, tensor.data), tensor.nbytes};
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
