// Reads files with the C++ reader and prints its verdicts: kdtr_check LEVEL FILE...
// One line a file: "OK", or class, tensor and message separated by tabs. All three ways of opening must agree.
#include <cstdio>
#include <fstream>
#include <functional>
#include <iterator>
#include <kdtr/kdtr.hpp>
#include <string>
#include <vector>

namespace {

std::string verdict(int level, const std::function<kdtr::File()>& open) {
  try {
    const kdtr::File file = open();
    if (level >= 2) file.verify();
    return "OK";
  } catch (const kdtr::Exception& error) {
    return std::string(kdtr::ERROR_NAMES[static_cast<int>(error.code)]) + "\t" + error.tensor + "\t" + error.what();
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int level = argc > 1 ? std::stoi(argv[1]) : 0;
  if (level < 1 || level > 2) return std::fprintf(stderr, "usage: kdtr_check 1|2 FILE...\n"), 2;
  for (int i = 2; i < argc; ++i) {
    const std::string path = argv[i];
    std::ifstream in(path, std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(in), {}};
    const std::string copied = verdict(level, [&] { return kdtr::File(path, kdtr::Mode::copy); });
    const std::string mapped = verdict(level, [&] { return kdtr::File(path, kdtr::Mode::map); });
    const std::string memory = verdict(level, [&] { return kdtr::File::borrow(bytes.data(), bytes.size(), path); });
    if (copied != mapped || (in && copied != memory)) {
      std::fprintf(stderr, "%s: copy: %s; map: %s; memory: %s\n", path.c_str(), copied.c_str(), mapped.c_str(),
                   memory.c_str());
      return 1;
    }
    std::puts(copied.c_str());
  }
  return 0;
}
