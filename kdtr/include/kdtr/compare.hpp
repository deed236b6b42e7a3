// Applies the tolerance stored with a golden tensor, with the arithmetic and the verdicts of kdtr.compare in Python.
//
//   kdtr::compare(golden.at("scores"), scores).raise_if_failed();   // a std::vector<double>, or pointer and count
//   kdtr::compare(golden, actual).raise_if_failed();                // two files
//
// The rules are section 7 of kdtr/format.py. A golden is checked data: verify() its file first.
#pragma once

#include <algorithm>
#include <vector>

#include "kdtr.hpp"
#include "numbers.hpp"

namespace kdtr {

struct Verdict {
  std::string file, tensor;
  bool ok;
  std::uint64_t numel, bad;  // elements; those outside (modes 1 to 4), 1 if NaN or infinity is where it must not be
  double measure;            // largest |x - g| (mode 3), largest ULP distance (4), the ratio (5, 6)
  std::string message;       // what was asserted and what was found

  void raise_if_failed() const {
    if (!ok) throw std::runtime_error(file + ": tensor '" + tensor + "': " + message);
  }
};

namespace detail {

// Stored before use, so that a compiler with fused multiply-add rounds the product by itself, as the specification
// says.
inline double product(double a, double b) {
  const volatile double rounded = a * b;
  return rounded;
}

inline std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

class Comparer {
 public:
  Comparer(const Tensor& golden, const u8* actual)
      : golden_(golden), g_(golden.data, golden.dtype), x_(actual, golden.dtype) {}

  void run(Verdict& v) {
    const Compare mode = golden_.tolerance.mode;
    v.numel = golden_.numel;
    if (v.numel == 0 || mode == Compare::none) return;
    if (mode >= Compare::close && !specials_agree(v)) return;
    if (mode == Compare::similarity || mode == Compare::nmse) return ratio(v);
    for (u64 i = 0; i < v.numel; ++i)
      if (!element_passes(i, v)) {
        if (v.bad++ == 0) first_bad_ = i;
      }
    const double allowed = product(golden_.tolerance.limit, static_cast<double>(v.numel));
    v.ok = static_cast<double>(v.bad) <= (mode <= Compare::equal ? 0 : allowed);
    v.message = rule() + ": " + num(v.bad) + " of " + num(v.numel) + " elements are outside";
    if (v.bad > 0) v.message += ", the first at " + where(first_bad_);
    if (mode == Compare::close) v.message += "; largest |x - g| " + number(v.measure);
    if (mode == Compare::ulp) v.message += "; largest distance " + number(v.measure) + " ulp";
  }

 private:
  // Parts that are not finite must agree; those that do count as 0 in both.
  bool specials_agree(Verdict& v) {
    for (u64 p = 0; g_.is_float() && p < v.numel * g_.per_element(); ++p) {
      const double x = x_.value(p), g = g_.value(p);
      if (std::isfinite(x) && std::isfinite(g)) continue;
      if (std::isnan(x) ? std::isnan(g) : x == g) continue;
      v.ok = false;
      v.bad = 1;
      v.message = rule() + ": NaN or infinity on one side only, at " + where(p / g_.per_element());
      return false;
    }
    return true;
  }

  static double finite(double value) { return std::isfinite(value) ? value : 0; }

  bool element_passes(u64 i, Verdict& v) const {
    const u64 parts = g_.per_element(), first = i * parts;
    const Tolerance& t = golden_.tolerance;
    if (t.mode == Compare::close) {
      double difference[2] = {0, 0}, g[2] = {0, 0};
      for (u64 k = 0; k < parts; ++k) {
        g[k] = finite(g_.value(first + k));
        difference[k] = finite(x_.value(first + k)) - g[k];
      }
      const double distance = parts == 2 ? std::hypot(difference[0], difference[1]) : std::fabs(difference[0]);
      const double size = parts == 2 ? std::hypot(g[0], g[1]) : std::fabs(g[0]);
      v.measure = std::max(v.measure, distance);
      return distance <= t.atol + product(t.rtol, size);
    }
    bool passes = true;
    for (u64 p = first; p < first + parts; ++p) {
      const u64 x = x_.code(p), g = g_.code(p);
      if (x == g) continue;
      if (t.mode == Compare::bits) passes = false;
      if (t.mode == Compare::equal) {
        const double a = x_.value(p), b = g_.value(p);
        passes = passes && g_.is_float() && (a == b || (std::isnan(a) && std::isnan(b)));
      }
      if (t.mode == Compare::ulp && std::isfinite(g_.value(p))) {
        const u64 distance = g_.distance(x, g);
        v.measure = std::max(v.measure, static_cast<double>(distance));
        passes = passes && distance <= t.max_ulp;
      }
    }
    return passes;
  }

  void ratio(Verdict& v) const {
    const bool similarity = golden_.tolerance.mode == Compare::similarity;
    double above = 0, below = 0;
    for (u64 p = 0; p < v.numel * g_.per_element(); ++p) {
      const double x = finite(x_.value(p)), g = finite(g_.value(p));
      above += product(x - g, x - g);
      below += similarity ? product(x, x) + product(g, g) : product(g, g);
    }
    v.measure = above == 0 && below == 0 ? 0 : above / below;
    v.ok = std::isfinite(v.measure) && v.measure <= golden_.tolerance.limit;
    v.message = rule() + ": " + number(v.measure);
  }

  std::string rule() const {
    const Tolerance& t = golden_.tolerance;
    std::string text = COMPARE_NAMES[static_cast<int>(t.mode)];
    if (t.mode == Compare::close) text += " atol " + number(t.atol) + " rtol " + number(t.rtol);
    if (t.mode == Compare::ulp) text += " max_ulp " + num(t.max_ulp);
    if (t.mode >= Compare::similarity)
      text += " at most " + number(t.limit);
    else if (t.mode >= Compare::close && t.limit > 0)
      text += " but for a fraction " + number(t.limit);
    return text;
  }

  std::string where(u64 element) const {  // index, and both values
    std::string index = "]";
    u64 rest = element;
    for (int d = golden_.ndim; d-- > 0;) {
      const u64 extent = golden_.shape[static_cast<std::size_t>(d)];
      index = (d > 0 ? ", " : "") + num(rest % extent) + index;
      rest /= extent;
    }
    auto show = [&](const Parts& parts) {
      const u64 first = element * parts.per_element();
      std::string text = number(parts.value(first));
      if (parts.per_element() == 2) text += " + " + number(parts.value(first + 1)) + "i";
      return text + " (bits " + hex(parts.code(first)) + ")";
    };
    return "[" + index + ": expected " + show(g_) + ", found " + show(x_);
  }

  const Tensor& golden_;
  Parts g_, x_;
  u64 first_bad_ = 0;
};

inline std::string describe(DType dtype, const std::uint64_t* shape, int ndim) {
  std::string text = std::string(DTYPE_NAMES[static_cast<int>(dtype)]) + "[";
  for (int d = 0; d < ndim; ++d) text += (d > 0 ? ", " : "") + num(shape[d]);
  return text + "]";
}

}  // namespace detail

// The actual tensor has the golden's dtype and shape, else it fails.
inline Verdict compare(const Tensor& golden, const Tensor& actual) {
  Verdict v{std::string(golden.file), std::string(golden.name), true, 0, 0, 0, {}};
  if (golden.dtype != actual.dtype || golden.ndim != actual.ndim || golden.shape != actual.shape) {
    v.ok = false;
    v.message = "is " + detail::describe(actual.dtype, actual.shape.data(), actual.ndim) + ", the golden is " +
                detail::describe(golden.dtype, golden.shape.data(), golden.ndim);
  } else {
    detail::Comparer(golden, actual.data).run(v);
  }
  return v;
}

// `count` elements in C order, of the golden's dtype and number, else it fails. The shape is the caller's word.
template <class T>
Verdict compare(const Tensor& golden, const T* actual, std::uint64_t count) {
  Tensor t = golden;
  t.data = reinterpret_cast<const std::uint8_t*>(actual);
  if (dtype_of<T> != golden.dtype || count != golden.numel) {
    t.dtype = dtype_of<T>;
    t.ndim = 1;
    t.shape = {count};
  }
  return compare(golden, t);
}
template <class T>
Verdict compare(const Tensor& golden, const std::vector<T>& actual) {
  return compare(golden, actual.data(), actual.size());
}

// A payload as a file would have it: for bf16 and smaller types without a C++ type of their own.
inline Verdict compare_bytes(const Tensor& golden, const void* actual, std::uint64_t nbytes) {
  Tensor t = golden;
  t.data = static_cast<const std::uint8_t*>(actual);
  if (nbytes == golden.nbytes) return compare(golden, t);
  const std::string message = "has " + detail::num(nbytes) + " bytes, the golden has " + detail::num(golden.nbytes);
  return {std::string(golden.file), std::string(golden.name), false, golden.numel, 0, 0, message};
}

struct Comparison {
  std::string path;
  std::vector<Verdict> verdicts;

  // Without a verdict nothing was asserted: that is a failure.
  bool ok() const {
    return !verdicts.empty() && std::all_of(verdicts.begin(), verdicts.end(), [](const Verdict& v) { return v.ok; });
  }
  void raise_if_failed() const {
    std::string text = path + ": " + (verdicts.empty() ? "nothing was compared" : "tensors differ");
    for (const Verdict& v : verdicts)
      if (!v.ok) text += "\n  " + v.tensor + ": " + v.message;
    if (!ok()) throw std::runtime_error(text);
  }
};

// A file of tested tensors, each against the golden of its name. Each golden with role expected must be there; a tensor
// without a golden, or whose golden has no compare mode, fails.
inline Comparison compare(const File& golden, const File& actual) {
  Comparison result{golden.path(), {}};
  auto failed = [&](std::string_view name, const std::string& message) {
    result.verdicts.push_back({golden.path(), std::string(name), false, 0, 0, 0, message});
  };
  for (std::uint64_t i = 0; i < actual.size(); ++i) {
    const Tensor x = actual[i];
    if (!golden.contains(x.name)) {
      failed(x.name, "the golden file has no such tensor");
    } else if (const Tensor g = golden.at(x.name); g.tolerance.mode == Compare::none) {
      failed(x.name, "its golden has no compare mode: nothing would be asserted");
    } else {
      result.verdicts.push_back(compare(g, x));
    }
  }
  for (std::uint64_t i = 0; i < golden.size(); ++i)
    if (golden[i].role == Role::expected && !actual.contains(golden[i].name))
      failed(golden[i].name, "is expected and absent from " + actual.path());
  return result;
}

}  // namespace kdtr
