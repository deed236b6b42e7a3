#include <algorithm>
#include <kdtr/writer.hpp>

#include "model/memory.h"
#include "model/trace.h"

namespace kdtree {
namespace {

// bf16 as float32: its bits are the upper half.
std::vector<unsigned char> widened(const std::vector<unsigned char>& narrow) {
  std::vector<unsigned char> wide(2 * narrow.size(), 0);
  for (size_t i = 0; i < narrow.size(); ++i) wide[i / 2 * 4 + 2 + i % 2] = narrow[i];
  return wide;
}

}  // namespace

void Trace::copy(const std::string& name, const char* dtype, size_t element, const void* device, int64_t rows,
                 int64_t width, int64_t stride, std::vector<int64_t> shape, cudaStream_t stream) {
  Array array{prefix_ + name, dtype, std::move(shape), {}};
  require_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  if (rows > 0 && width > 0) {
    std::vector<unsigned char> whole(static_cast<size_t>((rows - 1) * stride + width) * element);
    require_cuda(cudaMemcpy(whole.data(), device, whole.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    for (int64_t row = 0; row < rows; ++row) {
      const auto first = whole.begin() + row * stride * static_cast<int64_t>(element);
      array.bytes.insert(array.bytes.end(), first, first + width * static_cast<int64_t>(element));
    }
    if (element == sizeof(uint16_t)) array.bytes = widened(array.bytes);
  }
  arrays_.push_back(std::move(array));
}

void Trace::write(const std::string& path) const {
  kdtr::Writer out("any", kdtr::metadata("any", 1));
  for (const Array& array : arrays_) {
    std::string name = array.name;
    std::replace(name.begin(), name.end(), '/', '.');
    const kdtr::DType dtype = array.dtype == "f32"   ? kdtr::DType::f32
                              : array.dtype == "f64" ? kdtr::DType::f64
                                                     : kdtr::DType::i32;
    out.add_bytes(name, dtype, {array.shape.begin(), array.shape.end()}, array.bytes.data(), array.bytes.size(),
                  kdtr::Role::intermediate, {});
  }
  out.save(path);
}

}  // namespace kdtree
