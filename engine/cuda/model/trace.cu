#include <algorithm>
#include <kdtr/writer.hpp>

#include "model/memory.h"
#include "model/trace.h"

namespace kdtree {

void Trace::add(const std::string& name, const float* device, int64_t rows, int64_t width, int64_t stride,
                std::vector<int64_t> shape, cudaStream_t stream) {
  copy(name, false, device, rows, width, stride, std::move(shape), stream);
}

void Trace::add(const std::string& name, const int32_t* device, int64_t rows, int64_t width, int64_t stride,
                std::vector<int64_t> shape, cudaStream_t stream) {
  copy(name, true, device, rows, width, stride, std::move(shape), stream);
}

void Trace::copy(const std::string& name, bool integer, const void* device, int64_t rows, int64_t width, int64_t stride,
                 std::vector<int64_t> shape, cudaStream_t stream) {
  constexpr size_t kElement = 4;  // float32 or int32
  Array array{prefix_ + name, integer, std::move(shape), {}};
  require_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  if (rows > 0 && width > 0) {
    std::vector<unsigned char> whole(static_cast<size_t>((rows - 1) * stride + width) * kElement);
    require_cuda(cudaMemcpy(whole.data(), device, whole.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    for (int64_t row = 0; row < rows; ++row) {
      const auto first = whole.begin() + row * stride * static_cast<int64_t>(kElement);
      array.bytes.insert(array.bytes.end(), first, first + width * static_cast<int64_t>(kElement));
    }
  }
  arrays_.push_back(std::move(array));
}

void Trace::write(const std::string& path) const {
  kdtr::Writer out("activations", kdtr::metadata("activations", 1));
  for (const Array& array : arrays_) {
    std::string name = array.name;
    std::replace(name.begin(), name.end(), '/', '.');
    out.add_bytes(name, array.integer ? kdtr::DType::i32 : kdtr::DType::f32, {array.shape.begin(), array.shape.end()},
                  array.bytes.data(), array.bytes.size(), kdtr::Role::expected, {});
  }
  out.save(path);
}

}  // namespace kdtree
