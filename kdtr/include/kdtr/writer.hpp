// Writer of KDTR: hands fixtures back, byte for byte as kdtr.save() in Python writes the same content.
//
//   kdtr::Writer out("topk", kdtr::metadata("topk", 1, {"./kernel_test", "NVIDIA H200"}));
//   out.add("logits", logits, {rows, columns}, kdtr::Role::input);   // a std::vector<float>
//   out.add("ids", ids.data(), ids.size(), {rows, k}, kdtr::Role::expected, kdtr::Tolerance::equal());
//   out.save("topk.kdtr");                                           // complete or not at all
//
// What the format cannot hold is refused with Error::ENCODE when the file is made.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <random>
#include <vector>

#include "kdtr.hpp"

namespace kdtr {

inline constexpr const char* WRITER_VERSION = "0.1.0";

// What level 3 asks of the metadata; an empty string is stored as null. Text is UTF-8.
struct Provenance {
  std::string command, device, seed, rng, repo, git_sha;
};

// Metadata of a file of this kind, as canonical JSON.
inline std::string metadata(const std::string& kind, std::uint32_t kind_version, const Provenance& from = {}) {
  auto text = [](const std::string& value) {
    if (value.empty()) return std::string("null");
    static constexpr const char* CONTROL[] = {"\\b", "\\t", "\\n", "", "\\f", "\\r"};  // 8 to 13
    std::string out = "\"";
    for (const char c : value) {
      const auto code = static_cast<unsigned char>(c);
      if (code >= 8 && code <= 13 && code != 11)
        out += CONTROL[code - 8];
      else if (code < 0x20)
        out += "\\u00" + detail::hex(code).substr(16);
      else if (c == '"' || c == '\\')
        (out += '\\') += c;
      else
        out += c;
    }
    return out + '"';
  };
#if defined(__x86_64__)
  const char* arch = "x86_64";
#elif defined(__aarch64__)
  const char* arch = "aarch64";
#else
  const char* arch = "";
#endif
#if defined(__APPLE__)
  const char* os = "darwin";
#else
  const char* os = "linux";
#endif
  return "{\"command\":" + text(from.command) +
         ",\"generator\":{\"name\":\"kdtr.hpp\",\"version\":" + text(WRITER_VERSION) + "}" +
         ",\"kind_schema\":" + text(kind + "/" + std::to_string(kind_version)) +
         ",\"libs\":{},\"platform\":{\"arch\":" + text(arch) + ",\"device\":" + text(from.device) +
         ",\"os\":" + text(os) + "},\"rng\":" + text(from.rng) + ",\"seed\":" + text(from.seed) +
         ",\"source\":{\"dirty\":null,\"git_sha\":" + text(from.git_sha) + ",\"repo\":" + text(from.repo) + "}}";
}

class Writer {
 public:
  using Shape = std::vector<std::uint64_t>;

  // `meta` is canonical JSON, stored as it is: that of metadata() or of another File.
  Writer(const std::string& kind, const std::string& meta, std::uint32_t kind_version = 1)
      : kind_(kind), meta_(meta), kind_version_(kind_version) {}

  // Copies `count` elements, which are in C order; count must be the product of the shape.
  template <class T>
  void add(const std::string& name, const T* data, std::uint64_t count, const Shape& shape, Role role = Role::none,
           const Tolerance& tolerance = {}) {
    add_bytes(name, dtype_of<T>, shape, data, count * sizeof(T), role, tolerance);
  }
  template <class T>
  void add(const std::string& name, const std::vector<T>& data, const Shape& shape, Role role = Role::none,
           const Tolerance& tolerance = {}) {
    add(name, data.data(), data.size(), shape, role, tolerance);
  }
  template <class T>
  void add_scalar(const std::string& name, const T& value, Role role = Role::none, const Tolerance& tolerance = {}) {
    add(name, &value, 1, {}, role, tolerance);
  }
  void add_text(const std::string& name, std::string_view text, Role role = Role::none) {
    add_bytes(name, DType::u8, {text.size()}, text.data(), text.size(), role, {});
  }
  void add(const Tensor& t) {  // a tensor of another file, as it is there
    const Shape shape(t.shape.begin(), t.shape.begin() + t.ndim);
    add_bytes(std::string(t.name), t.dtype, shape, t.data, t.nbytes, t.role, t.tolerance);
  }
  // Copies payload bytes as the file has them: little-endian, types below 8 bits packed.
  void add_bytes(const std::string& name, DType dtype, const Shape& shape, const void* data, std::uint64_t nbytes,
                 Role role, const Tolerance& tolerance) {
    if (shape.size() > 8 || name.size() > 255)
      throw Exception(Error::ENCODE, "new file", name, "has more than 8 dimensions, or a name of more than 255 bytes");
    const auto* bytes = static_cast<const std::uint8_t*>(data);
    Entry entry{name, {}, {bytes, bytes + nbytes}};
    detail::Record& r = entry.record;
    r.name_len = static_cast<std::uint16_t>(name.size());
    r.dtype = static_cast<std::uint8_t>(dtype);
    r.ndim = static_cast<std::uint8_t>(shape.size());
    r.nbytes = nbytes;
    r.data_sum = xxh3_64(data, nbytes);
    std::copy(shape.begin(), shape.end(), r.dim);
    r.role = static_cast<std::uint8_t>(role);
    r.cmp = static_cast<std::uint8_t>(tolerance.mode);
    r.max_ulp = tolerance.max_ulp;
    r.atol = detail::load<std::uint64_t>(&tolerance.atol);
    r.rtol = detail::load<std::uint64_t>(&tolerance.rtol);
    r.limit = detail::load<std::uint64_t>(&tolerance.limit);
    entries_.push_back(std::move(entry));
  }

  // The whole file in memory; `label` stands for its path in messages.
  std::vector<std::uint8_t> bytes(const std::string& label = "new file") {
    std::vector<std::uint8_t> out = prefix(label);
    const auto size = detail::load<detail::Header>(out.data()).file_size;
    out.resize(size);
    for (const Entry& e : entries_)
      std::copy(e.payload.begin(), e.payload.end(), out.begin() + static_cast<std::ptrdiff_t>(e.record.offset));
    return out;
  }

  // Publishes the file under `path` at once when it is complete and synchronised; a file of that name is replaced.
  void save(const std::string& path) {
    const std::vector<std::uint8_t> head = prefix(path);
    const std::unique_ptr<char, decltype(&std::free)> real(::realpath(path.c_str(), nullptr), &std::free);
    const std::string target = real ? real.get() : path;  // through a symbolic link, not over it
    const auto slash = target.rfind('/');
    const std::string folder = slash == std::string::npos ? "." : target.substr(0, slash + 1);
    std::random_device random;
    const std::string temporary = folder + "/.kdtr-" + detail::hex((std::uint64_t{random()} << 32) | random()) + ".tmp";
    {
      const detail::Descriptor out(temporary.c_str(), O_RDWR | O_CREAT | O_EXCL, path);
      try {
        if (::ftruncate(out.fd, static_cast<off_t>(detail::load<detail::Header>(head.data()).file_size)) != 0)
          out.fail();
        for (const Entry& e : entries_) out.write(e.payload.data(), e.payload.size(), e.record.offset);
        out.write(head.data(), head.size(), 0);
        if (::fsync(out.fd) != 0 || ::rename(temporary.c_str(), target.c_str()) != 0) out.fail();
      } catch (...) {
        ::unlink(temporary.c_str());
        throw;
      }
    }
    const detail::Descriptor directory(folder.c_str(), O_RDONLY | O_DIRECTORY, path);
    if (::fsync(directory.fd) != 0) directory.fail();
  }

 private:
  struct Entry {
    std::string name;
    detail::Record record;
    std::vector<std::uint8_t> payload;
  };

  // Lays the file out and gives its prefix, which has passed the checks of the reader.
  std::vector<std::uint8_t> prefix(const std::string& label) {
    auto refuse = [&](const std::string& what) { throw Exception(Error::ENCODE, label, "", what); };
    if (entries_.size() > detail::MAX_TENSORS) refuse(detail::num(entries_.size()) + " tensors, at most 2^20");
    if (meta_.size() > detail::MAX_META) refuse("metadata of " + detail::num(meta_.size()) + " bytes, at most 16 MiB");
    if (kind_.size() > 32) refuse("kind " + detail::quoted(kind_) + " has more than 32 bytes");
    std::sort(entries_.begin(), entries_.end(), [](const Entry& a, const Entry& b) { return a.name < b.name; });
    detail::Header h{};
    std::memcpy(h.magic, detail::MAGIC, 8);
    h.major_version = 1;
    h.n_tensors = static_cast<std::uint32_t>(entries_.size());
    h.meta_len = static_cast<std::uint32_t>(meta_.size());
    h.kind_version = kind_version_;
    std::copy(kind_.begin(), kind_.end(), h.kind);
    for (Entry& e : entries_) {
      e.record.name_off = h.names_len;
      h.names_len += e.record.name_len;
    }
    std::uint64_t end = detail::data_off(h);
    std::vector<std::uint8_t> out(end);
    std::uint8_t* text = out.data() + 128 + 128 * entries_.size();
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      Entry& e = entries_[i];
      e.record.offset = detail::align(end, 256);
      end = e.record.offset + e.record.nbytes;
      std::memcpy(out.data() + 128 + 128 * i, &e.record, 128);
      text = std::copy(e.name.begin(), e.name.end(), text);
    }
    std::copy(meta_.begin(), meta_.end(), text);
    h.file_size = detail::align(end, 4096);
    h.prefix_sum = xxh3_64(out.data() + 128, out.size() - 128);
    h.header_sum = xxh3_64(&h, 120);
    std::memcpy(out.data(), &h, 128);
    try {
      detail::check_header(out.data(), h.file_size, label);
      detail::check_index(out.data(), h, label);
      for (const Entry& e : entries_) detail::check_values(e.payload.data(), e.record, {label, e.name, ""});
    } catch (const Exception& error) {
      throw Exception(Error::ENCODE, label, error.tensor, error.message);
    }
    return out;
  }

  std::string kind_, meta_;
  std::uint32_t kind_version_;
  std::vector<Entry> entries_;
};

}  // namespace kdtr
