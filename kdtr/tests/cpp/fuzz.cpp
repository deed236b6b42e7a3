// Mutation fuzzer of the C++ reader, to be built with AddressSanitizer and UndefinedBehaviorSanitizer:
//   fuzz SEED FIRST COUNT DUMP FILE...
// Execution i (FIRST <= i < FIRST + COUNT) takes one of the files, changes it in a few places, mostly repairs what
// follows from the change and seals the checksums again, and reads the result up to level 2. It depends on SEED and i
// alone. What passes level 2 must be rebuilt byte for byte by the writer, since there is one legal encoding, and equal
// itself. Ends with a crash, after naming the execution and keeping the mutant in the file ./crash.kdtr, at any fault,
// at an allocation above 1 MiB, and after 2 s of processor time in one execution. Prints executions and verdicts by
// class. DUMP is "-" or a file that gets every mutant with its verdict, for a comparison with another reader:
//   u32 size of the mutant, u8 length and text of the class or OK, u8 length and text of the tensor's name, the mutant
#include <sys/time.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <kdtr/compare.hpp>
#include <kdtr/kdtr.hpp>
#include <kdtr/writer.hpp>
#include <string>
#include <vector>

// Declared here, since not every compiler's package brings the sanitizers' headers.
extern "C" {
int __sanitizer_install_malloc_and_free_hooks(void (*on_malloc)(const volatile void*, std::size_t),
                                              void (*on_free)(const volatile void*));
void __asan_poison_memory_region(const volatile void* address, std::size_t size);
void __asan_unpoison_memory_region(const volatile void* address, std::size_t size);
const char* __asan_default_options() { return "abort_on_error=1"; }
const char* __ubsan_default_options() { return "abort_on_error=1:print_stacktrace=1"; }
}

namespace {

using u8 = std::uint8_t;
using u64 = std::uint64_t;
using Bytes = std::vector<u8>;

constexpr u64 CAPACITY = 1 << 15;
constexpr std::size_t MAX_ALLOCATION = 1 << 20;
constexpr int OK = 255;

volatile u64 execution = 0;
const u8* mutant_bytes = nullptr;
volatile u64 mutant_size = 0;

void keep_mutant(int) {  // on SIGABRT, by which the sanitizers end the process, too
  std::fprintf(stderr, "execution %llu, mutant of %llu bytes kept in crash.kdtr\n", (unsigned long long)execution,
               (unsigned long long)mutant_size);
  if (std::FILE* out = std::fopen("crash.kdtr", "wb")) {
    std::fwrite(mutant_bytes, 1, mutant_size, out);
    std::fclose(out);
  }
}

[[noreturn]] void fault(const char* what) {
  std::fprintf(stderr, "FAULT: %s\n", what);
  std::abort();
}

void on_allocation(const volatile void*, std::size_t size) {
  if (size > MAX_ALLOCATION) fault("allocation above 1 MiB");
}

void on_tick(int) {  // every second of processor time
  static u64 seen = ~u64{0};
  static int ticks = 0;
  ticks = seen == execution ? ticks + 1 : 0;
  seen = execution;
  if (ticks >= 2) fault("2 s in one execution");
}

struct Random {  // SplitMix64
  u64 state;
  u64 next() {
    u64 z = state += 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
  }
  u64 below(u64 n) { return next() % n; }
  bool one_in(u64 n) { return below(n) == 0; }
};

struct Field {
  u64 offset, width;
};
constexpr Field HEADER_FIELDS[] = {{8, 2},  {10, 2}, {12, 4}, {16, 8}, {24, 4},  {28, 4},  {32, 4},
                                   {36, 4}, {40, 8}, {64, 8}, {72, 8}, {104, 8}, {112, 8}, {120, 8}};
constexpr Field RECORD_FIELDS[] = {{0, 4},  {4, 2},  {6, 1},  {7, 1},  {8, 8},  {16, 8},  {24, 8},  {32, 8},  {40, 8},
                                   {48, 8}, {88, 8}, {96, 1}, {97, 1}, {98, 2}, {100, 4}, {104, 8}, {112, 8}, {120, 8}};

class Mutant {
 public:
  explicit Mutant(Random& random) : random_(random), bytes_(CAPACITY) {}
  const u8* data() const { return bytes_.data(); }
  u64 size() const { return size_; }

  void make(const Bytes& base) {
    __asan_unpoison_memory_region(bytes_.data(), CAPACITY);
    size_ = base.size();
    std::copy(base.begin(), base.end(), bytes_.begin());
    for (u64 left = random_.below(random_.one_in(4) ? 8 : 3) + 1; left > 0; --left) change();
    if (size_ >= 128) {
      if (!random_.one_in(4)) repair();
      if (!random_.one_in(16)) seal();
    }
    __asan_poison_memory_region(bytes_.data() + size_, CAPACITY - size_);
  }

 private:
  template <class T>
  T get(u64 offset) const {
    return kdtr::detail::load<T>(bytes_.data() + offset);
  }
  void put(u64 offset, u64 value, u64 width) { std::memcpy(bytes_.data() + offset, &value, width); }
  u64 records() const {
    const u64 n = get<std::uint32_t>(24), most = size_ < 256 ? 0 : (size_ - 128) / 128;
    return n < most ? n : most;
  }

  u64 odd_number(u64 near) {
    const u64 power = u64{1} << random_.below(64);
    const u64 numbers[] = {0,
                           1,
                           ~u64{0},
                           near + 1,
                           near - 1,
                           near + 256,
                           near - 256,
                           near + 4096,
                           near - 4096,
                           near ^ power,
                           power,
                           power - 1,
                           power + 1,
                           size_,
                           random_.below(300),
                           random_.next(),
                           near * 2,
                           near / 2,
                           u64{1} << 48,
                           0x3FF0000000000000,
                           0x7FF0000000000000,
                           0xFFF8000000000000};
    return numbers[random_.below(std::size(numbers))];
  }

  void set_field(u64 base, const Field& field) {
    if (base + field.offset + 8 > size_) return;
    put(base + field.offset, odd_number(get<u64>(base + field.offset) & (~u64{0} >> (64 - 8 * field.width))),
        field.width);
  }

  void change() {
    if (size_ < 128) return resize();
    const u64 n = records(), record = 128 + 128 * (n > 0 ? random_.below(n) : 0);
    switch (random_.below(12)) {
      case 0:
        bytes_[random_.below(size_)] ^= static_cast<u8>(1 << random_.below(8));
        break;
      case 1:
        bytes_[random_.below(size_)] = static_cast<u8>(random_.next());
        break;
      case 2:
        set_field(0, HEADER_FIELDS[random_.below(std::size(HEADER_FIELDS))]);
        break;
      case 3:
      case 4:
      case 5:
        set_field(record, RECORD_FIELDS[random_.below(std::size(RECORD_FIELDS))]);
        break;
      case 6:  // dtype, rank and dims, small enough to be repaired
        if (n == 0 || record + 128 > size_) break;
        put(record + 6, random_.below(32), 1);
        put(record + 7, random_.below(4), 1);
        for (u64 d = 0; d < 8; ++d) put(record + 32 + 8 * d, d < bytes_[record + 7] ? random_.below(9) : 0, 8);
        break;
      case 7: {  // role and tolerance
        if (n == 0 || record + 128 > size_) break;
        put(record + 96, random_.below(6), 1);
        put(record + 97, random_.below(7), 1);
        if (random_.one_in(2)) std::memset(bytes_.data() + record + 100, 0, 28);
        break;
      }
      case 8: {  // a byte of a name that matters to the grammar
        const u64 at = 128 + 128 * n + random_.below(24);
        static constexpr char LETTERS[] = "/.//..az-%[]@\0\n\\ \x80\xff";
        if (at < size_) bytes_[at] = static_cast<u8>(LETTERS[random_.below(sizeof LETTERS)]);
        break;
      }
      case 9: {  // one record over another
        const u64 other = 128 + 128 * (n > 0 ? random_.below(n) : 0);
        if (record + 128 <= size_ && other + 128 <= size_)
          std::memmove(bytes_.data() + record, bytes_.data() + other, 128);
        break;
      }
      case 10:  // one tensor more or less
        put(24, get<std::uint32_t>(24) + (random_.one_in(2) ? 1 : ~u64{0}), 4);
        break;
      default:
        resize();
    }
  }

  void resize() {
    const u64 sizes[] = {
        size_ - 1,         size_ + 1, size_ - 4096, size_ + 4096, random_.below(CAPACITY), 4096 * random_.below(5),
        random_.below(130)};
    const u64 size = sizes[random_.below(std::size(sizes))];
    if (size >= CAPACITY) return;
    if (size > size_) std::memset(bytes_.data() + size_, random_.one_in(8) ? 1 : 0, size - size_);
    size_ = size;
    if (size_ >= 128 && random_.one_in(2)) put(16, size_, 8);
  }

  // Makes some of what is derived follow from the rest again, so that the later checks are reached.
  void repair() {
    const u64 what = random_.next(), n = records();
    u64 name_off = 0, cursor = kdtr::detail::data_off(get<kdtr::detail::Header>(0));
    for (u64 i = 0; i < n; ++i) {
      auto r = get<kdtr::detail::Record>(128 + 128 * i);
      if (what & 1) r.name_off = static_cast<std::uint32_t>(name_off);
      u64 numel = 1;
      for (int d = 0; d < r.ndim && d < 8; ++d) numel *= r.dim[d];
      if ((what & 2) && r.dtype < kdtr::DTYPES) r.nbytes = (numel * kdtr::DTYPE_BITS[r.dtype] + 7) / 8;
      if (what & 4) r.offset = kdtr::detail::align(cursor, 256);
      name_off += r.name_len;
      cursor = r.offset + r.nbytes;
      std::memcpy(bytes_.data() + 128 + 128 * i, &r, 128);
    }
    if (what & 8) put(28, name_off, 4);
    if (what & 16) put(16, size_, 8);
    if (what & 32 && n > 0) {
      const u64 end = kdtr::detail::align(cursor, 4096);
      if (end >= 4096 && end < CAPACITY) {
        if (end > size_) std::memset(bytes_.data() + size_, 0, end - size_);
        put(16, size_ = end, 8);
      }
    }
    if (what & 64 && n > 0) {  // zero padding, legal values
      const u64 used = 128 + 128 * n + get<std::uint32_t>(28) + get<std::uint32_t>(32);
      const u64 end = kdtr::detail::align(used, 4096);
      if (end <= size_) std::memset(bytes_.data() + used, 0, end - used);
    }
  }

  void seal() {
    const u64 what = random_.below(32);  // 0: leaves the payload sums as they are
    for (u64 i = 0; what != 0 && i < records(); ++i) {
      const auto r = get<kdtr::detail::Record>(128 + 128 * i);
      if (r.offset <= size_ && r.nbytes <= size_ - r.offset)
        put(128 + 128 * i + 24, kdtr::xxh3_64(bytes_.data() + r.offset, r.nbytes), 8);
    }
    const u64 end = kdtr::detail::data_off(get<kdtr::detail::Header>(0));
    if (what != 1 && end <= size_) put(112, kdtr::xxh3_64(bytes_.data() + 128, end - 128), 8);
    if (what != 2) put(120, kdtr::xxh3_64(bytes_.data(), 120), 8);
  }

  Random& random_;
  Bytes bytes_;
  u64 size_ = 0;
};

struct Result {
  int code;
  std::string tensor;
};

std::string verdict_name(std::size_t code) { return code == OK ? "OK" : kdtr::ERROR_NAMES[code]; }

template <class Open>
Result read(const Open& open) {
  try {
    const kdtr::File file = open();
    file.verify();
    return {OK, ""};
  } catch (const kdtr::Exception& error) {
    return {static_cast<int>(error.code), error.tensor};
  }
}

// What a file that passes level 2 owes.
void check_good(const kdtr::File& file, const u8* bytes, u64 size) {
  kdtr::Writer writer(std::string(file.kind()), std::string(file.meta()), file.kind_version());
  for (u64 i = 0; i < file.size(); ++i) {
    const kdtr::Tensor t = file[i];
    if (!kdtr::compare(t, t).ok) fault("a tensor differs from itself");
    if (file.at(t.name).data != t.data) fault("a tensor is not found by its name");
    writer.add(t);
  }
  const Bytes again = writer.bytes();
  const bool minor = bytes[10] != 0 || bytes[11] != 0;  // the one field that is free
  if (!minor && (again.size() != size || std::memcmp(again.data(), bytes, size) != 0)) fault("a second legal encoding");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 6) return std::fprintf(stderr, "usage: fuzz SEED FIRST COUNT DUMP|- FILE...\n"), 2;
  const u64 seed = std::strtoull(argv[1], nullptr, 10), first = std::strtoull(argv[2], nullptr, 10);
  const u64 count = std::strtoull(argv[3], nullptr, 10);
  const std::string dump_path = argv[4];
  std::vector<Bytes> bases;
  for (int i = 5; i < argc; ++i) {
    std::ifstream in(argv[i], std::ios::binary);
    bases.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
    if (!in || bases.back().size() > CAPACITY - 4096) return std::fprintf(stderr, "%s: cannot be used\n", argv[i]), 2;
  }
  std::ofstream dump;
  if (dump_path != "-") dump.open(dump_path, std::ios::binary);

  std::signal(SIGABRT, keep_mutant);
  __sanitizer_install_malloc_and_free_hooks(on_allocation, [](const volatile void*) {});
  std::signal(SIGVTALRM, on_tick);
  const itimerval second{{1, 0}, {1, 0}};
  ::setitimer(ITIMER_VIRTUAL, &second, nullptr);

  const std::string scratch = "mutant-" + std::to_string(::getpid()) + ".kdtr";
  Random random{0};
  Mutant mutant(random);
  std::vector<u64> verdicts(256);
  for (u64 i = first; i < first + count; ++i) {
    execution = i;
    random.state = seed * 0x9E3779B97F4A7C15 + i * 0xD1B54A32D192ED03;
    mutant.make(bases[random.below(bases.size())]);
    mutant_bytes = mutant.data();
    mutant_size = mutant.size();
    auto borrow = [&] { return kdtr::File::borrow(mutant.data(), mutant.size(), "mutant"); };
    const Result result = read(borrow);
    ++verdicts[static_cast<std::size_t>(result.code)];
    if (result.code == OK) check_good(borrow(), mutant.data(), mutant.size());
    if (i % 8192 == 0) {  // the same through the file system
      std::ofstream(scratch, std::ios::binary)
          .write(reinterpret_cast<const char*>(mutant.data()), static_cast<std::streamsize>(mutant.size()));
      for (const auto mode : {kdtr::Mode::copy, kdtr::Mode::map}) {
        const Result other = read([&] { return kdtr::File(scratch, mode); });
        if (other.code != result.code || other.tensor != result.tensor)
          fault("opened as a file it has another verdict");
      }
      std::remove(scratch.c_str());
    }
    if (dump.is_open()) {
      const auto size = static_cast<std::uint32_t>(mutant.size());
      dump.write(reinterpret_cast<const char*>(&size), 4);
      for (const std::string& text : {verdict_name(static_cast<std::size_t>(result.code)), result.tensor})
        dump.put(static_cast<char>(text.size())) << text;
      dump.write(reinterpret_cast<const char*>(mutant.data()), size);
    }
  }
  std::printf("executions %llu\n", static_cast<unsigned long long>(count));
  for (std::size_t code = 0; code < verdicts.size(); ++code)
    if (verdicts[code] > 0)
      std::printf("%s %llu\n", verdict_name(code).c_str(), static_cast<unsigned long long>(verdicts[code]));
  return 0;
}
