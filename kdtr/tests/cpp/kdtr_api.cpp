// The public API of the C++ headers: kdtr_api FOLDER. Prints each failed check, and exits with 1 if there is one.
#include <sys/resource.h>
#include <sys/stat.h>

#include <cmath>
#include <complex>
#include <cstdio>
#include <fstream>
#include <functional>
#include <kdtr/compare.hpp>
#include <kdtr/kdtr.hpp>
#include <kdtr/writer.hpp>
#include <string>
#include <vector>

struct Bf16 {  // a user's own element type
  std::uint16_t bits;
};
template <>
inline constexpr kdtr::DType kdtr::dtype_of<Bf16> = kdtr::DType::bf16;

namespace {

using kdtr::Error;
using kdtr::Role;
using kdtr::Tolerance;

int failures = 0;

void check(bool good, int line, const std::string& what) {
  if (good) return;
  ++failures;
  std::printf("line %d: %s\n", line, what.c_str());
}
#define CHECK(condition) check(condition, __LINE__, #condition)

// `call` throws this class and its text holds all of `parts`.
void throws(int line, Error code, const std::vector<std::string>& parts, const std::function<void()>& call) {
  try {
    call();
    check(false, line, std::string("nothing thrown, expected ") + kdtr::ERROR_NAMES[static_cast<int>(code)]);
  } catch (const kdtr::Exception& error) {
    check(error.code == code, line, error.what());
    for (const auto& part : parts) check(std::string(error.what()).find(part) != std::string::npos, line, error.what());
  }
}
#define THROWS(code, parts, ...) throws(__LINE__, code, std::vector<std::string> parts, [&] { __VA_ARGS__; })

kdtr::Writer sample() {
  kdtr::Writer out("any", kdtr::metadata("any", 1, {"kdtr_api \"quoted\" \\ \t\x01 é", "", "7", "", "", ""}));
  out.add("matrix", std::vector<float>{0, 1, 2, 3, 4, 5}, {2, 3}, Role::expected, Tolerance::close(1e-6, 1e-5, 0.25));
  out.add("ids", std::vector<std::int32_t>{-1, 7}, {2}, Role::input);
  out.add("long", std::vector<long>{1}, {1});
  out.add("longlong", std::vector<long long>{2}, {1});
  out.add("half", std::vector<Bf16>{{0x3F80}, {0x4000}}, {2}, Role::expected, Tolerance::ulp(1));
  out.add("complex", std::vector<std::complex<double>>{{1, -2}}, {1});
  out.add("empty", std::vector<double>{}, {3, 0});
  out.add_scalar("flag", true);
  out.add_scalar("budget", std::int32_t{64});
  out.add_text("text", "tree");
  const std::uint8_t packed[] = {0x21, 0x03};
  out.add_bytes("packed", kdtr::DType::u4, {3}, packed, 2, Role::none, {});
  return out;
}

void reading(const std::string& path, kdtr::Mode mode) {
  kdtr::File first(path, mode);
  const kdtr::Tensor held = first.at("matrix");
  const kdtr::File file = std::move(first);  // what was handed out stays valid
  file.verify();
  CHECK(file.path() == path && file.kind() == "any" && file.kind_version() == 1 && file.size() == 11);
  const auto matrix = held.as<float, 2>();
  CHECK(matrix.size == 6 && matrix.ndim == 2 && matrix.shape[0] == 2 && matrix.shape[1] == 3 && matrix.shape[2] == 0);
  CHECK(matrix(1, 2) == 5 && matrix[4] == 4 && matrix(0, 1) == 1);
  CHECK(matrix.end() - matrix.begin() == 6);
  for (const auto& bad :
       {std::function<void()>([&] { matrix(2, 0); }), {[&] { matrix(0, -1); }}, {[&] { matrix(1); }}}) {
    try {
      bad();
      check(false, __LINE__, "an index outside the shape is taken");
    } catch (const std::out_of_range&) {
    }
  }
  CHECK(file.at("ids").as<std::int32_t>()[0] == -1);
  CHECK(file.at("long").as<long long>()[0] == 1 && file.at("longlong").as<long>()[0] == 2);
  CHECK(file.at("half").as<Bf16>()[1].bits == 0x4000 && file.at("half").bits<std::uint16_t>()[0] == 0x3F80);
  CHECK(file.at("complex").as<std::complex<double>>()[0] == std::complex<double>(1, -2));
  CHECK(file.at("empty").as<double>().size == 0 && file.at("empty").numel == 0 && file.at("empty").ndim == 2);
  CHECK(file.at("flag").scalar<bool>() && file.at("budget").scalar<std::int32_t>() == 64);
  CHECK(file.at("text").text() == "tree");
  CHECK(file.at("packed").nbytes == 2 && file.at("packed").numel == 3 && file.at("packed").data[1] == 3);
  CHECK(file.contains("flag") && !file.contains("fla") && !file.contains("flags") && !file.contains(""));
  const Tolerance t = held.tolerance;
  CHECK(held.role == Role::expected && t.mode == kdtr::Compare::close && t.atol == 1e-6 && t.rtol == 1e-5 &&
        t.limit == 0.25);
  CHECK(file.at("half").tolerance.max_ulp == 1);
  THROWS(Error::NOT_FOUND, ({path, "'fla'", "11"}), file.at("fla"));
  THROWS(Error::TYPE, ({path, "'matrix'", "f32[2, 3]", "f64"}), file.at("matrix").as<double>());
  THROWS(Error::TYPE, ({"'matrix'", "f32[2, 3]", "rank 1"}), file.at("matrix").as<float, 1>());
  THROWS(Error::TYPE, ({"'budget'", "i32[]", "u32"}), file.at("budget").scalar<std::uint32_t>());
  THROWS(Error::TYPE, ({"'ids'", "i32[2]", "rank 0"}), file.at("ids").scalar<std::int32_t>());
  THROWS(Error::TYPE, ({"'ids'", "u8"}), file.at("ids").text());
  THROWS(Error::TYPE, ({"'packed'", "u4[3]"}), file.at("packed").bits<std::uint8_t>());
  std::uint64_t expected = file.payload_offset();
  for (std::uint64_t i = 0; i < file.size(); ++i) {
    const kdtr::Tensor tensor = file[i];
    CHECK(reinterpret_cast<std::uintptr_t>(tensor.data) % 256 == 0);
    CHECK(tensor.data == file.payloads() + (tensor.offset - file.payload_offset()));
    CHECK(tensor.offset == expected);
    expected = (tensor.offset + tensor.nbytes + 255) / 256 * 256;
  }
  CHECK(file.payload_size() >= expected - file.payload_offset() && file.payload_size() % 4096 == 0);
}

void refusing(const std::string& folder) {
  THROWS(Error::IO, ({folder + "/absent", "No such file"}), kdtr::File(folder + "/absent"));
  THROWS(Error::IO, ({folder, "not a regular file"}), kdtr::File file(folder));
  const std::string fifo = folder + "/fifo";
  CHECK(::mkfifo(fifo.c_str(), 0600) == 0);
  THROWS(Error::IO, ({fifo, "not a regular file"}), kdtr::File file(fifo));

  sample().save(folder + "/refused.kdtr");  // what is refused leaves the file that is there
  auto encode = [&](int line, const std::vector<std::string>& parts, const std::function<void(kdtr::Writer&)>& fill,
                    const std::string& kind = "any") {
    kdtr::Writer out(kind, "{}");
    throws(line, Error::ENCODE, parts, [&] {
      fill(out);
      out.save(folder + "/refused.kdtr");
    });
  };
  const std::vector<float> two{1, 2};
  encode(__LINE__, {"refused.kdtr", "'a b'"}, [&](auto& w) { w.add("a b", two, {2}); });
  encode(__LINE__, {"255"}, [&](auto& w) { w.add(std::string(65537, 'n'), two, {2}); });
  encode(__LINE__, {"'a' comes after 'a'"}, [&](auto& w) { w.add("a", two, {2}), w.add("a", two, {2}); });
  encode(__LINE__, {"'a'", "nbytes 8, expected 12"}, [&](auto& w) { w.add("a", two, {3}); });
  encode(__LINE__, {"'a'", "2^48"},
         [&](auto& w) { w.add("a", two, {std::uint64_t{1} << 32, std::uint64_t{1} << 32}); });
  encode(__LINE__, {"'a'", "8 dimensions"}, [&](auto& w) { w.add("a", two, {1, 1, 1, 1, 1, 1, 1, 1, 2}); });
  encode(__LINE__, {"'a'", "assert nothing"}, [&](auto& w) { w.add("a", two, {2}, Role::expected); });
  encode(__LINE__, {"'a'", "nan"}, [&](auto& w) { w.add("a", two, {2}, Role::none, Tolerance::nmse(std::nan(""))); });
  encode(__LINE__, {"'a'", "ulp", "i32"},
         [&](auto& w) { w.add("a", std::vector<int>{1}, {1}, Role::none, Tolerance::ulp(1)); });
  const std::uint8_t byte = 0x22;
  encode(__LINE__, {"'a'", "bool"},
         [&](auto& w) { w.add_bytes("a", kdtr::DType::bool_, {1}, &byte, 1, Role::none, {}); });
  encode(__LINE__, {"'a'", "spare"},
         [&](auto& w) { w.add_bytes("a", kdtr::DType::u4, {1}, &byte, 1, Role::none, {}); });
  encode(__LINE__, {"kind ''"}, [](auto&) {}, "");
  encode(__LINE__, {"kind", "32"}, [](auto&) {}, std::string(33, 'k'));
  encode(__LINE__, {"kind 'a b"}, [](auto&) {}, "a b");
  THROWS(Error::ENCODE, ({"16777217"}), kdtr::Writer("any", std::string((16 << 20) + 1, ' ')).bytes());
  CHECK(kdtr::File(folder + "/refused.kdtr").at("text").text() == "tree");
  THROWS(Error::IO, ({folder + "/none/x.kdtr"}), sample().save(folder + "/none/x.kdtr"));
  THROWS(Error::IO, ({folder}), sample().save(folder));
}

// Descriptors and maps are given back, and a map outlives the file's replacement.
void holding(const std::string& folder) {
  const std::string path = folder + "/held.kdtr", bad = folder + "/bad.kdtr";
  std::vector<std::uint8_t> bytes = sample().bytes();
  std::ofstream(bad, std::ios::binary).write(reinterpret_cast<const char*>(bytes.data()), 5000);
  sample().save(path);
  rlimit before{}, few{};
  CHECK(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  few = {64, before.rlim_max};
  CHECK(::setrlimit(RLIMIT_NOFILE, &few) == 0);
  for (int i = 0; i < 10000; ++i) {
    const kdtr::File copied(path), mapped(path, kdtr::Mode::map);
    CHECK(copied.size() == mapped.size());
    if (i % 10 == 0) THROWS(Error::TRUNCATED, ({bad, "5000", "8192"}), kdtr::File file(bad, kdtr::Mode::map));
  }
  CHECK(::setrlimit(RLIMIT_NOFILE, &before) == 0);
  const kdtr::File old(path, kdtr::Mode::map);
  kdtr::Writer other("any", "{}");
  other.add_text("text", "other");
  other.save(path);
  CHECK(old.at("text").text() == "tree");
  old.verify();
  CHECK(kdtr::File(path).at("text").text() == "other");
}

void comparing(const std::string& path) {
  const kdtr::File file(path);
  const kdtr::Tensor matrix = file.at("matrix"), half = file.at("half");
  std::vector<float> x{0, 1, 2, 3, 4, 5};
  CHECK(kdtr::compare(matrix, x).ok);
  x[3] = 3.1F;
  const kdtr::Verdict one = kdtr::compare(matrix, x);  // a quarter of six elements may be bad
  CHECK(one.ok && one.bad == 1 && one.numel == 6 && std::fabs(one.measure - 0.1) < 1e-6);
  x[5] = 6;
  const kdtr::Verdict two = kdtr::compare(matrix, x);
  CHECK(!two.ok && two.bad == 2);
  for (const char* part : {"2 of 6", "[1, 0]", "expected 3", "found 3.0999"})
    check(two.message.find(part) != std::string::npos, __LINE__, two.message);
  x[5] = std::nanf("");
  CHECK(!kdtr::compare(matrix, x).ok);
  x.pop_back();
  CHECK(!kdtr::compare(matrix, x).ok);
  CHECK(!kdtr::compare(matrix, std::vector<double>{0, 1, 2, 3, 4, 5}).ok);
  const std::uint16_t next[] = {0x3F81, 0x4000}, after[] = {0x3F82, 0x4000};
  CHECK(kdtr::compare_bytes(half, next, 4).ok && !kdtr::compare_bytes(half, after, 4).ok);
  CHECK(!kdtr::compare_bytes(half, next, 2).ok);
  try {
    two.raise_if_failed();
    check(false, __LINE__, "a failed verdict does not throw");
  } catch (const std::runtime_error& error) {
    CHECK(std::string(error.what()).find(path + ": tensor 'matrix'") == 0);
  }
  // Two files: of the sample only `matrix` and `half` assert something.
  auto tested = [&](const std::vector<std::string>& names) {
    kdtr::Writer out("any", "{}");
    for (const auto& name : names) out.add(file.at(name));
    const auto bytes = out.bytes();
    return kdtr::compare(file, kdtr::File::borrow(bytes.data(), bytes.size(), "tested"));
  };
  CHECK(tested({"matrix", "half"}).ok());
  CHECK(!tested({"matrix"}).ok() && !tested({"matrix", "half", "ids"}).ok() && !tested({}).ok());
  try {
    tested({"matrix", "ids"}).raise_if_failed();
    check(false, __LINE__, "a failed comparison does not throw");
  } catch (const std::runtime_error& error) {
    for (const char* part :
         {path.c_str(), "half: is expected and absent from tested", "ids: its golden has no compare mode"})
      check(std::string(error.what()).find(part) != std::string::npos, __LINE__, error.what());
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string folder = argc > 1 ? argv[1] : ".", path = folder + "/sample.kdtr";
  sample().save(path);
  reading(path, kdtr::Mode::copy);
  reading(path, kdtr::Mode::map);
  refusing(folder);
  holding(folder);
  comparing(path);
  return failures == 0 ? 0 : 1;
}
