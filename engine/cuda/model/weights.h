// Weights of a model on the device, float32, each under its published name in one allocation.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "model/memory.h"
#include "model/tensors.h"

namespace kdtree {

// gate_up: [2 * width, hidden], gate rows, then up rows.
struct SwigluWeights {
  const float* gate_up;
  const float* down;  // [hidden, width]
};

// Arrays are asked for first, then copied to the device together.
class WeightStore {
 public:
  explicit WeightStore(const TensorMap& tensors) : tensors_(tensors) {}

  // One tensor as it is, several one behind the other, or one through a function of its values.
  void take(const float** place, const std::string& name) { take(place, std::vector<std::string>{name}); }
  void take(const float** place, std::vector<std::string> names) {
    add(place, [this, names = std::move(names)] {
      std::vector<float> all;
      for (const std::string& name : names) {
        const std::vector<float> values = tensors_.at(name).floats(name);
        all.insert(all.end(), values.begin(), values.end());
      }
      return all;
    });
  }
  void take(const float** place, const std::string& name,
            std::function<std::vector<float>(std::vector<float>)> change) {
    add(place, [this, name, change = std::move(change)] { return change(tensors_.at(name).floats(name)); });
  }
  void take(SwigluWeights* place, const std::string& at) {
    take(&place->gate_up, std::vector<std::string>{at + "gate_proj.weight", at + "up_proj.weight"});
    take(&place->down, at + "down_proj.weight");
  }
  // What is computed on the host, tables for example.
  void add(const float** place, std::function<std::vector<float>()> values) {
    wanted_.push_back({place, std::move(values)});
  }

  void upload() {
    std::vector<size_t> offsets;
    std::vector<std::vector<float>> all;
    size_t total = 0;
    for (const Wanted& wanted : wanted_) {
      all.push_back(wanted.values());
      offsets.push_back(total);
      total = round_up(total + all.back().size() * sizeof(float), 256);
    }
    buffer_ = DeviceBuffer(total);
    for (size_t i = 0; i < wanted_.size(); ++i) {
      unsigned char* const at = buffer_.data() + offsets[i];
      copy_to_device(at, all[i].data(), all[i].size() * sizeof(float));
      *wanted_[i].place = reinterpret_cast<const float*>(at);
    }
    wanted_.clear();
  }
  size_t bytes() const { return buffer_.bytes(); }

 private:
  struct Wanted {
    const float** place;
    std::function<std::vector<float>()> values;
  };
  const TensorMap& tensors_;
  std::vector<Wanted> wanted_;
  DeviceBuffer buffer_;
};

}  // namespace kdtree
