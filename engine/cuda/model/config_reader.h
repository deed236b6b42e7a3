// Takes the entries of a config one by one, checks type and range, and refuses what nobody took.
#pragma once

#include <cmath>
#include <cstring>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "model/tensors.h"

namespace kdtree {

// Entries are tensors `<prefix><key>`: 0-d i64, f64 or bool, 1-d i64 for lists, 1-d u8 for text; an absent one is null.
class ConfigReader {
 public:
  ConfigReader(const TensorMap& tensors, std::string where, std::string prefix = "config/")
      : tensors_(tensors), where_(std::move(where)), prefix_(std::move(prefix)) {}

  bool has(const std::string& key) const { return tensors_.count(prefix_ + key) > 0; }
  bool has_object(const std::string& key) const {
    const std::string start = prefix_ + key + "/";
    const auto next = tensors_.lower_bound(start);
    return next != tensors_.end() && next->first.compare(0, start.size(), start) == 0;
  }
  ConfigReader object(const std::string& key) {
    taken_.insert(key + "/");
    return ConfigReader(tensors_, where_ + ", " + key, prefix_ + key + "/");
  }
  void ignore(const std::string& key) { taken_.insert(key); }
  void ignore_prefix(const std::string& prefix) {
    const std::string start = prefix_ + prefix;
    for (auto at = tensors_.lower_bound(start); at != tensors_.end(); ++at) {
      if (at->first.compare(0, start.size(), start) != 0) break;
      taken_.insert(at->first.substr(prefix_.size()));
    }
  }
  // What stands at a key: "" for a value, "/a", "/b/c" for the entries of an object.
  std::map<std::string, const HostTensor*> entries(const std::string& key) const {
    std::map<std::string, const HostTensor*> found;
    const std::string start = prefix_ + key;
    for (auto at = tensors_.lower_bound(start); at != tensors_.end(); ++at) {
      if (at->first.compare(0, start.size(), start) != 0) break;
      const std::string rest = at->first.substr(start.size());
      if (rest.empty() || rest[0] == '/') found[rest] = &at->second;
    }
    return found;
  }

  int64_t integer(const std::string& key, int64_t least = 1) { return integer_of(take(key), key, least); }
  int64_t integer(const std::string& key, int64_t least, int64_t otherwise) {
    return has(key) ? integer(key, least) : (ignore(key), otherwise);
  }
  double number(const std::string& key) {
    const HostTensor& entry = take(key);
    const double value = number_of(entry).value_or(NAN);
    if (!(std::isfinite(value) && value > 0)) fail(key, "must be a positive number, got " + text_of(entry));
    return value;
  }
  double number(const std::string& key, double otherwise) { return has(key) ? number(key) : (ignore(key), otherwise); }
  // A number >= 0, or nothing.
  std::optional<double> optional_number(const std::string& key) {
    ignore(key);
    if (!has(key)) return std::nullopt;
    const HostTensor& entry = tensors_.at(prefix_ + key);
    if (text_of(entry) == "0") return 0.0;
    return number(key);
  }
  bool boolean(const std::string& key) {
    const HostTensor& entry = take(key);
    if (!entry.shape.empty() || entry.dtype != "bool") fail(key, "must be true or false, got " + text_of(entry));
    return entry.data[0] != 0;
  }
  bool boolean(const std::string& key, bool otherwise) { return has(key) ? boolean(key) : (ignore(key), otherwise); }
  std::vector<int> integers(const std::string& key, int64_t least) {
    const HostTensor& entry = take(key);
    std::vector<int> values;
    if (entry.dtype != "i64" || entry.shape.size() > 1) fail(key, "must hold integers, got " + text_of(entry));
    for (size_t i = 0; i < static_cast<size_t>(entry.elements()); ++i) {
      if (load(entry, i) < least || load(entry, i) > INT32_MAX)
        fail(key, "must hold integers >= " + std::to_string(least) + ", got " + text_of(entry));
      values.push_back(static_cast<int>(load(entry, i)));
    }
    return values;
  }
  std::string text(const std::string& key, const std::string& otherwise) {
    ignore(key);
    return has(key) ? text_of(tensors_.at(prefix_ + key)) : otherwise;
  }

  // The entry may be absent; its value must be one of these texts (numbers and truth values as text_of writes them).
  void only(const std::string& key, const std::vector<std::string>& supported) {
    ignore(key);
    if (!has(key)) return;
    const std::string value = text_of(tensors_.at(prefix_ + key));
    std::string all;
    for (const std::string& one : supported) {
      if (one == value) return;
      all += (all.empty() ? "" : " or ") + one;
    }
    fail(key, "is " + value + ", supported is " + (all.empty() ? "null" : all));
  }

  // Refuses every entry that was not taken and could change the numbers.
  void finish(const std::set<std::string>& neutral) const {
    std::string unknown;
    for (auto at = tensors_.lower_bound(prefix_); at != tensors_.end(); ++at) {
      if (at->first.compare(0, prefix_.size(), prefix_) != 0) break;
      const std::string key = at->first.substr(prefix_.size()), head = key.substr(0, key.find('/'));
      if (taken_.count(key) || taken_.count(head + "/") || neutral.count(head)) continue;
      unknown += (unknown.empty() ? "" : ", ") + key + " = " + text_of(at->second);
    }
    if (!unknown.empty()) throw ModelError(where_ + ": not understood and possibly changing the numbers: " + unknown);
  }

  // Equal numbers, of whatever type, or the same entry.
  static bool equal(const HostTensor& a, const HostTensor& b) {
    const auto x = number_of(a), y = number_of(b);
    if (x && y) return *x == *y;
    return a.dtype == b.dtype && a.shape == b.shape && a.data == b.data;
  }

  [[noreturn]] void fail(const std::string& key, const std::string& what) const {
    throw ModelError(where_ + ": " + key + " " + what);
  }

 private:
  const HostTensor& take(const std::string& key) {
    taken_.insert(key);
    const auto found = tensors_.find(prefix_ + key);
    if (found == tensors_.end()) fail(key, "is missing");
    return found->second;
  }
  static int64_t load(const HostTensor& entry, size_t index) {
    int64_t value;
    std::memcpy(&value, entry.data.data() + index * sizeof value, sizeof value);
    return value;
  }
  static std::optional<double> number_of(const HostTensor& entry) {
    if (!entry.shape.empty() || (entry.dtype != "f64" && entry.dtype != "i64")) return std::nullopt;
    double value = 0;
    if (entry.dtype == "f64") std::memcpy(&value, entry.data.data(), sizeof value);
    return entry.dtype == "f64" ? value : static_cast<double>(load(entry, 0));
  }
  int64_t integer_of(const HostTensor& entry, const std::string& key, int64_t least) const {
    if (!entry.shape.empty() || entry.dtype != "i64" || load(entry, 0) < least || load(entry, 0) > INT32_MAX)
      fail(key, "must be an integer >= " + std::to_string(least) + ", got " + text_of(entry));
    return load(entry, 0);
  }
  static std::string text_of(const HostTensor& entry) {
    if (entry.dtype == "u8") return {entry.data.begin(), entry.data.end()};
    if (entry.dtype == "bool" && entry.shape.empty()) return entry.data[0] ? "true" : "false";
    if (entry.dtype == "f64" && entry.shape.empty()) {
      double value;
      std::memcpy(&value, entry.data.data(), sizeof value);
      char text[32];
      std::snprintf(text, sizeof text, "%.17g", value);
      return text;
    }
    if (entry.dtype == "i64" && entry.shape.size() < 2) {
      std::string text;
      for (size_t i = 0; i < static_cast<size_t>(entry.elements()); ++i)
        text += (i > 0 ? ", " : "") + std::to_string(load(entry, i));
      return entry.shape.empty() ? text : "[" + text + "]";
    }
    return entry.dtype + shape_text(entry.shape);
  }

  const TensorMap& tensors_;
  std::string where_, prefix_;
  std::set<std::string> taken_;
};

}  // namespace kdtree
