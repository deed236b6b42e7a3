// Reader of KDTR, the golden-data container: C++17, no dependency, also for .cu files; little-endian POSIX hosts.
//
//   kdtr::File golden("tree.kdtr");                                // level 1: header and index are checked
//   golden.verify();                                               // level 2: payloads are checked
//   kdtr::View<float> lp = golden.at("case0/lp").as<float, 2>();   // other dtype or rank: Error::TYPE
//   int budget = golden.at("case0/budget").scalar<std::int32_t>();
//
// Whatever a File hands out (Tensor, View, names, metadata) is valid as long as the File or a copy of it lives.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <complex>
#include <memory>
#include <new>
#include <stdexcept>
#include <system_error>
#include <type_traits>

#include "format.hpp"

namespace kdtr {

namespace detail {

template <class T>
constexpr DType native_dtype() {
  if constexpr (std::is_same_v<T, bool>) {
    return DType::bool_;
  } else if constexpr (std::is_integral_v<T>) {  // by size and sign: long and long long are both i64
    return static_cast<DType>((sizeof(T) == 1 ? 2 : sizeof(T) == 2 ? 4 : sizeof(T) == 4 ? 6 : 8) + std::is_signed_v<T>);
  } else if constexpr (std::is_floating_point_v<T> && sizeof(T) <= 8) {
    return sizeof(T) == 4 ? DType::f32 : DType::f64;
  } else {
    static_assert(std::is_same_v<T, std::complex<float>> || std::is_same_v<T, std::complex<double>>,
                  "specialise kdtr::dtype_of for this type");
    return sizeof(T) == 8 ? DType::c64 : DType::c128;
  }
}

inline std::shared_ptr<u8> allocate(u64 n, const std::string& file) {
  constexpr std::align_val_t alignment{4096};
  auto* p = static_cast<u8*>(::operator new(n, alignment, std::nothrow));
  if (p == nullptr) throw Exception(Error::IO, file, "", "cannot allocate " + num(n) + " bytes");
  return {p, [](u8* q) { ::operator delete(q, alignment); }};
}

struct Descriptor {
  int fd;
  std::string file;
  Descriptor(const char* path, int flags, const std::string& label)
      : fd(::open(path, flags | O_CLOEXEC, 0666)), file(label) {
    if (fd < 0) fail();
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
  [[noreturn]] void fail() const { throw Exception(Error::IO, file, "", std::generic_category().message(errno)); }
  u64 size() const {
    struct stat status;
    if (::fstat(fd, &status) != 0) fail();
    if (!S_ISREG(status.st_mode)) throw Exception(Error::IO, file, "", "not a regular file");
    return static_cast<u64>(status.st_size);
  }
  void read(u8* p, u64 n, u64 offset) const {
    for (u64 done = 0; done < n;) {
      const auto got = ::pread(fd, p + done, n - done, static_cast<off_t>(offset + done));
      if (got < 0 && errno != EINTR) fail();
      if (got == 0) throw Exception(Error::TRUNCATED, file, "", "ends at " + num(offset + done) + " while it is read");
      if (got > 0) done += static_cast<u64>(got);
    }
  }
  void write(const u8* p, u64 n, u64 offset) const {
    for (u64 done = 0; done < n;) {
      const auto put = ::pwrite(fd, p + done, n - done, static_cast<off_t>(offset + done));
      if (put < 0 && errno != EINTR) fail();
      if (put > 0) done += static_cast<u64>(put);
    }
  }
};

}  // namespace detail

// The dtype that as<T>() asks for. Specialise it for types of your own:
//   template <> inline constexpr kdtr::DType kdtr::dtype_of<__nv_bfloat16> = kdtr::DType::bf16;
template <class T>
inline constexpr DType dtype_of = detail::native_dtype<T>();

// Elements of a tensor in C order (last index fastest).
template <class T>
struct View {
  const T* data;
  std::uint64_t size;
  int ndim;
  std::array<std::uint64_t, 8> shape;  // zeros past ndim

  const T* begin() const { return data; }
  const T* end() const { return data + size; }
  const T& operator[](std::uint64_t i) const { return data[i]; }

  // view(i, j, ...): one index an axis, checked: std::out_of_range.
  template <class... Index>
  const T& operator()(Index... index) const {
    const std::array<std::uint64_t, sizeof...(index)> at{static_cast<std::uint64_t>(index)...};
    bool good = static_cast<int>(at.size()) == ndim;
    std::uint64_t flat = 0;
    for (std::size_t axis = 0; good && axis < at.size(); ++axis) {
      good = at[axis] < shape[axis];
      flat = flat * shape[axis] + at[axis];
    }
    if (!good) throw std::out_of_range("kdtr::View: index outside the shape, or not one index an axis");
    return data[flat];
  }
};

struct Tensor {
  std::string_view file, name;
  DType dtype;
  Role role;
  Tolerance tolerance;
  int ndim;
  std::array<std::uint64_t, 8> shape;  // zeros past ndim
  std::uint64_t numel, nbytes, offset, data_sum;
  const std::uint8_t* data;  // nbytes, 256-aligned in an opened file; sub-byte types are packed, low bits first

  // The elements as T, whose dtype (and Rank, unless -1) must be this tensor's. bool is safe after verify() only.
  template <class T, int Rank = -1>
  View<T> as() const {
    if (dtype != dtype_of<T>) fail("asked for as ", DTYPE_NAMES[static_cast<int>(dtype_of<T>)]);
    return bits<T, Rank>();
  }
  // The elements as any T of the same width, e.g. bf16 as std::uint16_t.
  template <class T, int Rank = -1>
  View<T> bits() const {
    static_assert(std::is_trivially_copyable_v<T>, "elements are bytes of a file");
    if (8 * sizeof(T) != DTYPE_BITS[static_cast<int>(dtype)]) fail("asked for with element bytes ", sizeof(T));
    if (Rank >= 0 && ndim != Rank) fail("asked for with rank ", Rank);
    return {reinterpret_cast<const T*>(data), numel, ndim, shape};
  }
  template <class T>
  T scalar() const {
    return as<T, 0>()[0];
  }
  std::string_view text() const {  // a 1-d u8 tensor
    const auto bytes = as<std::uint8_t, 1>();
    return {reinterpret_cast<const char*>(bytes.data), bytes.size};
  }

 private:
  template <class Asked>
  [[noreturn]] void fail(const char* what, Asked asked) const {
    std::string text = std::string("is ") + DTYPE_NAMES[static_cast<int>(dtype)] + "[";
    for (int d = 0; d < ndim; ++d) text += (d ? ", " : "") + detail::num(shape[static_cast<std::size_t>(d)]);
    text += std::string("], ") + what;
    if constexpr (std::is_integral_v<Asked>)
      text += std::to_string(asked);
    else
      text += asked;
    throw Exception(Error::TYPE, std::string(file), std::string(name), text);
  }
};

enum class Mode { copy, map };  // map: pages are read when touched; a file cut while mapped ends the process (SIGBUS)

class File {
 public:
  // Level 1. Error::IO when the system refuses, else the class of the first check that fails.
  explicit File(const std::string& path, Mode mode = Mode::copy) : path_(std::make_shared<const std::string>(path)) {
    const detail::Descriptor in(path.c_str(), O_RDONLY | O_NONBLOCK, path);
    const std::uint64_t size = in.size();
    std::uint8_t head[128];
    in.read(head, size < 128 ? size : 128, 0);
    header_ = detail::check_header(head, size, path);
    const std::uint64_t start = detail::data_off(header_);
    if (mode == Mode::map) {
      void* base = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, in.fd, 0);
      if (base == MAP_FAILED) in.fail();
      prefix_ = {static_cast<std::uint8_t*>(base), [size](std::uint8_t* p) { ::munmap(p, size); }};
      payload_ = {prefix_, prefix_.get() + start};
      detail::check_index(prefix_.get(), header_, path);
    } else {
      const auto prefix = detail::allocate(start, path);
      std::memcpy(prefix.get(), head, 128);
      in.read(prefix.get() + 128, start - 128, 128);
      detail::check_index((prefix_ = prefix).get(), header_, path);
      const auto payload = detail::allocate(size - start, path);
      in.read(payload.get(), size - start, start);
      payload_ = payload;
    }
  }

  // Level 1 of a file in memory, which stays the caller's; `label` stands for its path in messages. Tensors are as
  // aligned as `data` is, up to 256 bytes: as<T>() needs what T needs.
  static File borrow(const void* data, std::uint64_t size, const std::string& label) {
    File file;
    const auto* p = size > 0 ? static_cast<const std::uint8_t*>(data) : detail::MAGIC;  // no bytes: any pointer will do
    file.path_ = std::make_shared<const std::string>(label);
    file.header_ = detail::check_header(p, size, label);
    detail::check_index(p, file.header_, label);
    file.prefix_ = {std::shared_ptr<void>(), p};
    file.payload_ = {std::shared_ptr<void>(), p + detail::data_off(file.header_)};
    return file;
  }

  // Level 2, of all tensors or of one.
  void verify() const {
    for (std::uint64_t i = 0; i < size(); ++i) verify(i);
  }
  void verify(std::uint64_t i) const {
    const auto r = record(i);
    const std::uint64_t end = i + 1 < size() ? record(i + 1).offset : header_.file_size;
    const auto name = detail::record_name(prefix_.get(), header_, r);
    detail::check_payload(payload(r), r, end, {*path_, std::string(name), ""});
  }

  const std::string& path() const { return *path_; }
  std::string_view kind() const {
    const auto* p = reinterpret_cast<const char*>(prefix_.get()) + 40;
    return {p, ::strnlen(p, 32)};
  }
  std::uint32_t kind_version() const { return header_.kind_version; }
  std::string_view meta() const {  // JSON, unchecked
    const auto* p = reinterpret_cast<const char*>(prefix_.get());
    return {p + 128 + 128 * size() + header_.names_len, header_.meta_len};
  }
  // All payloads as one piece, for one copy to a device: tensor t starts at byte t.offset - payload_offset() of it.
  const std::uint8_t* payloads() const { return payload_.get(); }
  std::uint64_t payload_offset() const { return detail::data_off(header_); }
  std::uint64_t payload_size() const { return header_.file_size - payload_offset(); }

  std::uint64_t size() const { return header_.n_tensors; }
  Tensor operator[](std::uint64_t i) const {  // in order of names; i < size()
    const auto r = record(i);
    Tensor t{*path_,
             detail::record_name(prefix_.get(), header_, r),
             DType{r.dtype},
             Role{r.role},
             {},
             r.ndim,
             {},
             1,
             r.nbytes,
             r.offset,
             r.data_sum,
             payload(r)};
    t.tolerance = {Compare{r.cmp}, r.max_ulp, detail::load<double>(&r.atol), detail::load<double>(&r.rtol),
                   detail::load<double>(&r.limit)};
    std::memcpy(t.shape.data(), r.dim, sizeof r.dim);
    for (int d = 0; d < r.ndim; ++d) t.numel *= r.dim[d];
    return t;
  }
  bool contains(std::string_view name) const { return find(name) < size(); }
  Tensor at(std::string_view name) const {
    const std::uint64_t i = find(name);
    if (i == size())
      throw Exception(Error::NOT_FOUND, *path_, std::string(name), "not among the " + detail::num(i) + " tensors");
    return (*this)[i];
  }

 private:
  File() = default;
  detail::Record record(std::uint64_t i) const { return detail::load<detail::Record>(prefix_.get() + 128 + 128 * i); }
  const std::uint8_t* payload(const detail::Record& r) const { return payload_.get() + (r.offset - payload_offset()); }
  std::uint64_t find(std::string_view name) const {
    std::uint64_t low = 0, high = size();
    while (low < high) {
      const std::uint64_t mid = (low + high) / 2;
      const int order = detail::record_name(prefix_.get(), header_, record(mid)).compare(name);
      if (order == 0) return mid;
      (order < 0 ? low = mid + 1 : high = mid);
    }
    return size();
  }

  std::shared_ptr<const std::string> path_;
  detail::Header header_{};
  std::shared_ptr<const std::uint8_t> prefix_, payload_;
};

}  // namespace kdtr
