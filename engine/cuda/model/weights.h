// Weights of a model on the device, float32 or bf16, each under its published name in one allocation.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "model/memory.h"
#include "model/random_weights.h"
#include "model/tensors.h"

namespace kdtree {

// gate_up: [2 * width, hidden], gate rows, then up rows.
template <typename T>
struct SwigluWeights {
  const T* gate_up;
  const T* down;  // [hidden, width]
};

// Arrays are asked for first, then copied to the device one after the other. T, of the place: float, or uint16_t for
// bf16 bits. What the file keeps as T goes to the device as it is, random weights are made there; all else
// is converted, a tensor at a time.
class WeightStore {
 public:
  explicit WeightStore(const TensorMap& tensors) : tensors_(tensors) {}

  // One tensor as it is, several one behind the other, or one through a function of its values.
  template <typename T>
  void take(const T** place, const std::string& name) {
    take(place, std::vector<std::string>{name});
  }
  template <typename T>
  void take(const T** place, std::vector<std::string> names) {
    size_t elements = 0;
    for (const std::string& name : names) elements += static_cast<size_t>(tensors_.at(name).elements());
    want(place, elements, [this, names = std::move(names)](unsigned char* to) {
      for (const std::string& name : names) {
        const HostTensor& tensor = tensors_.at(name);
        if (tensor.random.has_value()) {
          fill_random(reinterpret_cast<T*>(to), *tensor.random, static_cast<size_t>(tensor.elements()));
          to += static_cast<size_t>(tensor.elements()) * sizeof(T);
        } else {
          to += tensor.holds<T>() ? put(to, tensor.data) : put(to, tensor.values<T>(name));
        }
      }
    });
  }
  template <typename T>
  void take(const T** place, const std::string& name, size_t elements,
            std::function<std::vector<T>(const std::vector<T>&)> change) {
    want(place, elements, [this, name, change = std::move(change)](unsigned char* to) {
      (void)put(to, change(tensors_.at(name).values<T>(name)));
    });
  }
  template <typename T>
  void take(SwigluWeights<T>* place, const std::string& at) {
    take(&place->gate_up, std::vector<std::string>{at + "gate_proj.weight", at + "up_proj.weight"});
    take(&place->down, at + "down_proj.weight");
  }
  // What is computed on the host, tables for example.
  void add(const float** place, std::vector<float> values) {
    const size_t elements = values.size();
    want(place, elements, [values = std::move(values)](unsigned char* to) { (void)put(to, values); });
  }

  void upload() {
    buffer_ = DeviceBuffer(total_);
    for (const Wanted& wanted : wanted_) wanted.fill(buffer_.data() + wanted.offset);
    wanted_.clear();
  }
  size_t bytes() const { return buffer_.bytes(); }

 private:
  using Fill = std::function<void(unsigned char*)>;
  struct Wanted {
    size_t offset;
    Fill fill;
  };

  template <typename T>
  void want(const T** place, size_t elements, Fill fill) {
    wanted_.push_back({total_, [place, fill = std::move(fill)](unsigned char* to) {
                         fill(to);
                         *place = reinterpret_cast<const T*>(to);
                       }});
    total_ = round_up(total_ + elements * sizeof(T), 256);
  }
  // Copies to the device; how many bytes.
  template <typename Values>
  static size_t put(unsigned char* to, const Values& values) {
    const size_t bytes = values.size() * sizeof(*values.data());
    copy_to_device(to, values.data(), bytes);
    return bytes;
  }

  const TensorMap& tensors_;
  std::vector<Wanted> wanted_;
  size_t total_ = 0;
  DeviceBuffer buffer_;
};

}  // namespace kdtree
