// What the tests ask of the C++ side, on files:
//   kdtr_tool copy IN OUT             writes the content of IN anew
//   kdtr_tool values FILE             every part of every element as an exact hexadecimal float, one tensor a line
//   kdtr_tool compare GOLDEN ACTUAL   name, ok, bad elements, measure and message of each verdict, separated by tabs
//   kdtr_tool damage FILE             bit flips that went unnoticed, and cuts that were not found to be TRUNCATED: all
//   tried kdtr_tool time FILE ROUNDS        milliseconds of each level 1 and each level 2, of a mapped and of a copied
//   file
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <kdtr/compare.hpp>
#include <kdtr/kdtr.hpp>
#include <kdtr/writer.hpp>
#include <string>
#include <vector>

namespace {

void copy(const std::string& from, const std::string& to) {
  const kdtr::File in(from);
  in.verify();
  kdtr::Writer out(std::string(in.kind()), std::string(in.meta()), in.kind_version());
  for (std::uint64_t i = in.size(); i-- > 0;) out.add(in[i]);  // backwards: the order given must not matter
  out.save(to);
}

void values(const std::string& path) {
  const kdtr::File file(path);
  file.verify();
  for (std::uint64_t i = 0; i < file.size(); ++i) {
    const kdtr::Tensor t = file[i];
    const kdtr::detail::Parts parts(t.data, t.dtype);
    std::printf("%.*s", static_cast<int>(t.name.size()), t.name.data());
    for (std::uint64_t p = 0; p < t.numel * parts.per_element(); ++p) std::printf(" %a", parts.value(p));
    std::puts("");
  }
}

void compare(const std::string& golden, const std::string& actual) {
  for (const kdtr::Verdict& v : kdtr::compare(kdtr::File(golden), kdtr::File(actual)).verdicts)
    std::printf("%s\t%d\t%llu\t%.17g\t%s\n", v.tensor.c_str(), v.ok, static_cast<unsigned long long>(v.bad), v.measure,
                v.message.c_str());
}

bool passes(const std::vector<std::uint8_t>& bytes, std::size_t size, kdtr::Error* found) {
  try {
    kdtr::File::borrow(bytes.data(), size, "damaged").verify();
    return true;
  } catch (const kdtr::Exception& error) {
    *found = error.code;
    return false;
  }
}

void damage(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::vector<std::uint8_t> bytes{std::istreambuf_iterator<char>(in), {}};
  kdtr::Error found{};
  unsigned unnoticed = 0, other = 0;
  for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    const auto mask = static_cast<std::uint8_t>(1U << bit % 8);
    bytes[bit / 8] ^= mask;
    unnoticed += passes(bytes, bytes.size(), &found);
    bytes[bit / 8] ^= mask;
  }
  for (std::size_t size = 0; size < bytes.size(); ++size)
    other += passes(bytes, size, &found) || found != kdtr::Error::TRUNCATED;
  std::printf("%zu flips, %u unnoticed; %zu cuts, %u not TRUNCATED\n", 8 * bytes.size(), unnoticed, bytes.size(),
              other);
}

void time(const std::string& path, int rounds) {
  using Clock = std::chrono::steady_clock;
  auto ms = [](Clock::time_point a, Clock::time_point b) {
    return std::chrono::duration<double, std::milli>(b - a).count();
  };
  for (int i = 0; i < rounds; ++i)
    for (const auto mode : {kdtr::Mode::map, kdtr::Mode::copy}) {
      const auto start = Clock::now();
      const kdtr::File file(path, mode);
      const auto opened = Clock::now();
      file.verify();
      const auto verified = Clock::now();
      std::printf("%s %.4f %.4f\n", mode == kdtr::Mode::map ? "map" : "copy", ms(start, opened), ms(opened, verified));
    }
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv + 1, argv + argc);
  try {
    if (args.size() == 3 && args[0] == "copy")
      copy(args[1], args[2]);
    else if (args.size() == 2 && args[0] == "values")
      values(args[1]);
    else if (args.size() == 3 && args[0] == "compare")
      compare(args[1], args[2]);
    else if (args.size() == 2 && args[0] == "damage")
      damage(args[1]);
    else if (args.size() == 3 && args[0] == "time")
      time(args[1], std::stoi(args[2]));
    else
      return std::fprintf(stderr, "usage: kdtr_tool copy|values|compare|damage|time ...\n"), 2;
  } catch (const kdtr::Exception& error) {
    return std::fprintf(stderr, "%s\n", error.what()), 1;
  }
  return 0;
}
