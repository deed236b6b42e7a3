// The scheduler of simt.h. Never compiled with -fsanitize=thread: what the scheduler
// itself does is not the kernel's, and would order the kernel's memory.

#include "host/simt.h"

#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "host/fiber.h"

namespace kdtree::host {

constinit thread_local Lane* current = nullptr;

namespace {

constexpr int kExitStuck = 86;
constexpr unsigned kMaxThreads = 1024;

long setting(const char* name, long otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::atol(value);
}

bool sanitized() { return has_address_sanitizer() || has_race_detector(); }

// --- warp operations -------------------------------------------------------------------------------------------------

template <typename F>
void for_lanes(unsigned mask, F f) {
  for (; mask != 0; mask &= mask - 1) f(static_cast<unsigned>(std::countr_zero(mask)));
}

template <typename T>
T& part(void* const* parts, unsigned lane) {
  return *static_cast<T*>(parts[lane]);
}

// What a lane outside the mask would give is undefined: all bits set, a NaN.
void shuffle_parts(unsigned mask, void* const* parts) {
  uint64_t values[32];
  std::memset(values, 0xff, sizeof(values));
  for_lanes(mask, [&](unsigned i) { values[i] = part<ShufflePart>(parts, i).value; });
  for_lanes(mask, [&](unsigned i) { part<ShufflePart>(parts, i).value = values[part<ShufflePart>(parts, i).source]; });
}

void vote(unsigned mask, void* const* parts) {
  uint64_t votes = 0;
  for_lanes(mask, [&](unsigned i) { votes |= uint64_t{part<uint64_t>(parts, i) != 0} << i; });
  for_lanes(mask, [&](unsigned i) { part<uint64_t>(parts, i) = votes; });
}

void match(unsigned mask, void* const* parts) {
  uint64_t same[32] = {};
  for_lanes(mask, [&](unsigned i) {
    for_lanes(mask,
              [&](unsigned j) { same[i] |= uint64_t{part<uint64_t>(parts, i) == part<uint64_t>(parts, j)} << j; });
  });
  for_lanes(mask, [&](unsigned i) { part<uint64_t>(parts, i) = same[i]; });
}

template <typename T, T (*f)(T, T)>
void reduce(unsigned mask, void* const* parts) {
  T result = static_cast<T>(part<uint64_t>(parts, std::countr_zero(mask)));
  for_lanes(mask & (mask - 1), [&](unsigned i) { result = f(result, static_cast<T>(part<uint64_t>(parts, i))); });
  for_lanes(mask, [&](unsigned i) { part<uint64_t>(parts, i) = static_cast<uint32_t>(result); });
}

template <typename T>
T least(T a, T b) {
  return a < b ? a : b;
}
template <typename T>
T most(T a, T b) {
  return a < b ? b : a;
}
unsigned sum(unsigned a, unsigned b) { return a + b; }
unsigned bits_and(unsigned a, unsigned b) { return a & b; }
unsigned bits_or(unsigned a, unsigned b) { return a | b; }
unsigned bits_xor(unsigned a, unsigned b) { return a ^ b; }

}  // namespace

const WarpOp kSyncWarp{"__syncwarp", nullptr};
const WarpOp kShuffle{"__shfl_sync", shuffle_parts};
const WarpOp kShuffleUp{"__shfl_up_sync", shuffle_parts};
const WarpOp kShuffleDown{"__shfl_down_sync", shuffle_parts};
const WarpOp kShuffleXor{"__shfl_xor_sync", shuffle_parts};
const WarpOp kBallot{"__ballot_sync", vote};
const WarpOp kAny{"__any_sync", vote};
const WarpOp kAll{"__all_sync", vote};
const WarpOp kMatchAny{"__match_any_sync", match};
const WarpOp kReduceAdd{"__reduce_add_sync", reduce<unsigned, sum>};
const WarpOp kReduceMin{"__reduce_min_sync", reduce<unsigned, least>};
const WarpOp kReduceMax{"__reduce_max_sync", reduce<unsigned, most>};
const WarpOp kReduceMinSigned{"__reduce_min_sync", reduce<int, least>};
const WarpOp kReduceMaxSigned{"__reduce_max_sync", reduce<int, most>};
const WarpOp kReduceAnd{"__reduce_and_sync", reduce<unsigned, bits_and>};
const WarpOp kReduceOr{"__reduce_or_sync", reduce<unsigned, bits_or>};
const WarpOp kReduceXor{"__reduce_xor_sync", reduce<unsigned, bits_xor>};

// --- scheduler -------------------------------------------------------------------------------------------------------

namespace {

const char* name_of(Barrier kind) {
  switch (kind) {
    case Barrier::kOr:
      return "__syncthreads_or";
    case Barrier::kAnd:
      return "__syncthreads_and";
    case Barrier::kCount:
      return "__syncthreads_count";
    case Barrier::kPlain:
      break;
  }
  return "__syncthreads";
}

// A CUDA thread. What it waits at: `op` in a warp operation, `barrier` otherwise.
struct Thread : Lane {
  explicit Thread(void (*entry)(), unsigned position) : Lane{}, fiber(entry, position) { number = position; }

  Fiber fiber;
  Place place{};
  const WarpOp* op = nullptr;
  unsigned mask = 0;
  void* part = nullptr;
  Barrier barrier{};
  int predicate = 0;  // at the barrier: what it brings, after it: the result
};

// Each lane that there is in one of four sets.
struct Warp {
  unsigned runnable = 0, in_warp_op = 0, at_barrier = 0, exited = 0;
};

// xorshift64*
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u | 1) { below(1); }
  unsigned below(unsigned n) {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return static_cast<unsigned>((state_ * 0x2545f4914f6cdd1du) >> 33) % n;
  }

 private:
  uint64_t state_;
};

}  // namespace

// The threads of one block, and who runs next.
class Machine {
 public:
  void run_block(const Launch& launch, uint3 index, long seed);
  void meet(Thread& self, const WarpOp& op, unsigned mask, void* part, Place place);
  int wait_for_block(Thread& self, Barrier kind, int predicate, Place place);

 private:
  static void thread_main();

  void pass(unsigned warp, Random* random);
  bool open_barrier();
  void order_all(const std::vector<Thread*>& threads);
  [[noreturn]] void stuck(const char* why);

  const Launch* launch_ = nullptr;
  Block block_{};
  unsigned threads_ = 0, warps_count_ = 0;
  std::vector<std::unique_ptr<Thread>> pool_;
  Warp warps_[kMaxThreads / 32];
};

void Machine::thread_main() {
  auto* self = static_cast<Thread*>(current);
  Machine* machine = self->machine;
  self->fiber.entered();
  for (;;) {
    machine->launch_->call(machine->launch_->arguments);
    Warp& warp = machine->warps_[self->number / 32];
    warp.exited |= 1u << self->number % 32;
    self->fiber.leave();
  }
}

// All that these threads did so far happens before all that they do next. Says so to the race detector only.
void Machine::order_all(const std::vector<Thread*>& threads) {
  if (!has_race_detector() || threads.empty()) return;
  void* here = __tsan_get_current_fiber();
  for (int round = 0; round < 2; ++round) {
    switch_race_detector(threads.front()->fiber.race_fiber(), round > 0);
    for (Thread* thread : threads) switch_race_detector(thread->fiber.race_fiber(), true);
  }
  switch_race_detector(here, false);
}

void Machine::meet(Thread& self, const WarpOp& op, unsigned mask, void* part, Place place) {
  Warp& warp = warps_[self.number / 32];
  const unsigned bit = 1u << self.number % 32, first = self.number / 32 * 32;
  self.place = place;
  self.op = &op;
  self.mask = mask;
  self.part = part;
  warp.in_warp_op |= bit;
  if (!(mask & bit)) stuck("a lane is not in its own mask");
  const unsigned missing = mask & ~(warp.runnable | warp.in_warp_op | warp.at_barrier);
  if (missing & warp.exited) stuck("a lane of the mask has returned");
  if (missing) stuck("a lane of the mask does not exist in this block");

  bool complete = (warp.in_warp_op & mask) == mask;
  if (complete)
    for_lanes(mask, [&](unsigned i) {
      const Thread& other = *pool_[first + i];
      if (other.mask != mask)
        complete = false;
      else if (other.op != &op)
        stuck("the lanes of one mask are in different warp operations");
    });
  if (complete) {
    void* parts[32] = {};
    for_lanes(mask, [&](unsigned i) { parts[i] = pool_[first + i]->part; });
    if (op.combine != nullptr) {
      op.combine(mask, parts);
    } else if (has_race_detector()) {
      std::vector<Thread*> threads;
      for_lanes(mask, [&](unsigned i) { threads.push_back(pool_[first + i].get()); });
      order_all(threads);
    }
    warp.in_warp_op &= ~mask;
    warp.runnable |= mask;
  }
  self.fiber.leave();
}

int Machine::wait_for_block(Thread& self, Barrier kind, int predicate, Place place) {
  Warp& warp = warps_[self.number / 32];
  self.place = place;
  self.op = nullptr;
  self.barrier = kind;
  self.predicate = predicate;
  warp.at_barrier |= 1u << self.number % 32;
  self.fiber.leave();
  return self.predicate;
}

// Lets all go on if every thread that has not returned waits at the block barrier.
bool Machine::open_barrier() {
  std::vector<Thread*> waiting;
  for (unsigned w = 0; w < warps_count_; ++w) {
    if (warps_[w].in_warp_op) return false;
    for_lanes(warps_[w].at_barrier, [&](unsigned i) { waiting.push_back(pool_[w * 32 + i].get()); });
  }
  if (waiting.empty()) return false;
  const Thread& first = *waiting.front();
  int count = 0;
  for (const Thread* thread : waiting) {
    if (thread->barrier != first.barrier || thread->place.line != first.place.line ||
        std::strcmp(thread->place.file, first.place.file) != 0)
      stuck("the threads wait at different barriers");
    count += thread->predicate != 0;
  }
  const int everybody = static_cast<int>(waiting.size());
  const int result = first.barrier == Barrier::kOr    ? count > 0
                     : first.barrier == Barrier::kAnd ? count == everybody
                                                      : count;
  for (Thread* thread : waiting) thread->predicate = result;
  order_all(waiting);
  for (unsigned w = 0; w < warps_count_; ++w) {
    warps_[w].runnable = warps_[w].at_barrier;
    warps_[w].at_barrier = 0;
  }
  return true;
}

// Runs each lane that is runnable now up to where it waits.
void Machine::pass(unsigned w, Random* random) {
  Warp& warp = warps_[w];
  const unsigned turn = random == nullptr ? 0 : random->below(32);
  const bool backwards = random != nullptr && random->below(2) != 0;
  unsigned todo = warp.runnable;
  for (unsigned i = 0; i < 32 && todo != 0; ++i) {
    const unsigned lane = (backwards ? turn - i : turn + i) % 32;
    if (!(todo >> lane & 1)) continue;
    todo &= ~(1u << lane);
    warp.runnable &= ~(1u << lane);
    Thread& thread = *pool_[w * 32 + lane];
    current = &thread;
    thread.fiber.enter();
  }
}

void Machine::run_block(const Launch& launch, uint3 index, long seed) {
  launch_ = &launch;
  threads_ = launch.block.x * launch.block.y * launch.block.z;
  warps_count_ = (threads_ + 31) / 32;
  // An exact heap block, so that AddressSanitizer sees an overrun.
  std::unique_ptr<unsigned char[], decltype(&std::free)> dynamic(nullptr, std::free);
  if (launch.dynamic_bytes > 0) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 128, launch.dynamic_bytes) != 0) std::abort();
    std::memset(memory, 0xff, launch.dynamic_bytes);
    dynamic.reset(static_cast<unsigned char*>(memory));
  }
  block_ = {index, launch.block, launch.grid, dynamic.get()};
  while (pool_.size() < threads_)
    pool_.push_back(std::make_unique<Thread>(thread_main, static_cast<unsigned>(pool_.size())));
  for (unsigned i = 0; i < threads_; ++i) {
    Thread& thread = *pool_[i];
    thread.thread = {i % launch.block.x, i / launch.block.x % launch.block.y, i / launch.block.x / launch.block.y};
    thread.block = &block_;
    thread.machine = this;
  }
  for (unsigned w = 0; w < warps_count_; ++w) {
    const unsigned lanes = std::min(threads_ - w * 32, 32u);
    warps_[w] = Warp{};
    warps_[w].runnable = lanes == 32 ? ~0u : (1u << lanes) - 1;
  }

  unsigned order[kMaxThreads / 32];
  std::iota(order, order + warps_count_, 0u);
  Random random(static_cast<uint64_t>(seed) << 40 ^ uint64_t{index.z} << 32 ^ uint64_t{index.y} << 16 ^ index.x);
  const auto shuffle = [&] {
    for (unsigned i = warps_count_ - 1; i > 0; --i) std::swap(order[i], order[random.below(i + 1)]);
  };
  if (seed != 0) shuffle();
  for (;;) {
    unsigned i = 0;
    while (i < warps_count_ && warps_[order[i]].runnable == 0) ++i;
    if (i < warps_count_) {
      pass(order[i], seed != 0 ? &random : nullptr);
      if (seed != 0 && random.below(8) == 0) shuffle();
    } else if (!open_barrier()) {
      break;
    }
  }
  for (unsigned w = 0; w < warps_count_; ++w)
    if (warps_[w].in_warp_op) stuck("no thread can go on");
}

void Machine::stuck(const char* why) {
  std::fprintf(stderr, "kdtree host: %s\n  in %s, block (%u, %u, %u) of %u threads\n", why, launch_->name,
               block_.index.x, block_.index.y, block_.index.z, threads_);
  unsigned returned = 0, running = 0;
  std::string before;
  unsigned from = 0;
  for (unsigned i = 0; i <= threads_; ++i) {
    std::string here;
    if (i < threads_) {
      const Warp& warp = warps_[i / 32];
      const Thread& thread = *pool_[i];
      const unsigned bit = 1u << i % 32;
      char text[512];
      if (warp.exited & bit) {
        ++returned;
      } else if (warp.in_warp_op & bit) {
        std::snprintf(text, sizeof(text), "%s at %s:%d, mask %08x", thread.op->name, thread.place.file,
                      thread.place.line, thread.mask);
        here = text;
      } else if (warp.at_barrier & bit) {
        std::snprintf(text, sizeof(text), "%s at %s:%d", name_of(thread.barrier), thread.place.file, thread.place.line);
        here = text;
      } else {
        ++running;
      }
    }
    if (here == before && i < threads_) continue;
    if (!before.empty()) std::fprintf(stderr, "  threads %u-%u wait in %s\n", from, i - 1, before.c_str());
    before = here;
    from = i;
  }
  std::fprintf(stderr, "  %u can run, %u have returned\n", running, returned);
  std::fflush(stderr);
  _exit(kExitStuck);
}

void meet(const WarpOp& op, unsigned mask, void* part, Place place) {
  auto* self = static_cast<Thread*>(current);
  self->machine->meet(*self, op, mask, part, place);
}

int wait_for_block(Barrier kind, int predicate, Place place) {
  auto* self = static_cast<Thread*>(current);
  return self->machine->wait_for_block(*self, kind, predicate, place);
}

// --- launch ----------------------------------------------------------------------------------------------------------

namespace {

// Machines that wait for work: their stacks are made once.
class Idle {
 public:
  std::unique_ptr<Machine> take() {
    const std::lock_guard lock(mutex_);
    if (machines_.empty()) return std::make_unique<Machine>();
    std::unique_ptr<Machine> machine = std::move(machines_.back());
    machines_.pop_back();
    return machine;
  }
  void give(std::unique_ptr<Machine> machine) {
    const std::lock_guard lock(mutex_);
    machines_.push_back(std::move(machine));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Machine>> machines_;
};

Idle& idle() {
  static Idle idle;
  return idle;
}

// This OS thread's thread-local variables of the module that holds this code: the kernels' static shared arrays, and a
// few of the host code. They are set to all ones before a block, and put back after the launch.
class StaticShared {
 public:
  StaticShared() {
    current = nullptr;  // the block exists from its first use on
    dl_iterate_phdr(find, this);
    saved_.assign(begin_, begin_ + size_);
  }
  StaticShared(const StaticShared&) = delete;
  StaticShared& operator=(const StaticShared&) = delete;
  ~StaticShared() { std::memcpy(begin_, saved_.data(), size_); }

  void spoil() { std::memset(begin_, 0xff, size_); }

 private:
  static int find(dl_phdr_info* info, size_t, void* self) {
    const auto here = reinterpret_cast<uintptr_t>(&find);
    bool ours = false;
    size_t size = 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      const auto& segment = info->dlpi_phdr[i];
      const uintptr_t start = info->dlpi_addr + segment.p_vaddr;
      if (segment.p_type == PT_LOAD && start <= here && here < start + segment.p_memsz) ours = true;
      if (segment.p_type == PT_TLS) size = segment.p_memsz;
    }
    if (!ours) return 0;
    auto* shared = static_cast<StaticShared*>(self);
    shared->begin_ = static_cast<unsigned char*>(info->dlpi_tls_data);
    shared->size_ = shared->begin_ == nullptr ? 0 : size;
    return 1;
  }

  unsigned char* begin_ = nullptr;
  size_t size_ = 0;
  std::vector<unsigned char> saved_;
};

cudaError_t check(const Launch& launch) {
  const dim3 &b = launch.block, &g = launch.grid;
  const bool block_fits =
      b.x > 0 && b.y > 0 && b.z > 0 && b.x <= 1024 && b.y <= 1024 && b.z <= 64 && b.x * b.y * b.z <= kMaxThreads;
  const bool grid_fits = g.x > 0 && g.y > 0 && g.z > 0 && g.x <= 0x7fffffffu && g.y <= 65535 && g.z <= 65535;
  if (!block_fits || !grid_fits) return cudaErrorInvalidConfiguration;
  return launch.dynamic_bytes <= allowed_shared_memory(launch.kernel) ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

void run(const Launch& launch) {
  if (note(check(launch)) != cudaSuccess) return;
  const dim3& grid = launch.grid;
  const long seed = setting("KDTREE_HOST_SEED", 0);
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  // i -> (i * step + start) mod blocks takes every block once if step and blocks have no common factor.
  Random random(static_cast<uint64_t>(seed));
  uint64_t step = 1, start = 0;
  if (seed != 0) {
    start = random.below(0x7fffffff) % blocks;
    do step = 1 + random.below(0x7fffffff) % blocks;
    while (std::gcd(step, blocks) != 1);
  }
  std::atomic<uint64_t> next{0};
  const auto work = [&] {
    std::unique_ptr<Machine> machine = idle().take();
    std::unique_ptr<StaticShared> shared = sanitized() ? nullptr : std::make_unique<StaticShared>();
    for (uint64_t i; (i = next++) < blocks;) {
      const uint64_t b = static_cast<uint64_t>((static_cast<unsigned __int128>(i) * step + start) % blocks);
      const uint3 index{static_cast<unsigned>(b % grid.x), static_cast<unsigned>(b / grid.x % grid.y),
                        static_cast<unsigned>(b / grid.x / grid.y)};
      if (shared) shared->spoil();
      machine->run_block(launch, index, seed);
    }
    shared.reset();
    current = nullptr;
    idle().give(std::move(machine));
  };
  const long workers = sanitized() ? 1 : std::min<long>(setting("KDTREE_HOST_THREADS", 1), static_cast<long>(blocks));
  std::vector<std::thread> others;
  for (long i = 1; i < workers; ++i) others.emplace_back(work);
  work();
  for (std::thread& other : others) other.join();
}

}  // namespace kdtree::host
