// The scheduler of simt.h. Never compiled with -fsanitize=thread: what the scheduler does is not the kernel's doing,
// and would order the kernel's memory.

#include "host/simt.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "host/fiber.h"
#include "host/static_shared.h"
#include "host/warp_ops.h"

namespace kdtree::host {

constinit thread_local Lane* current = nullptr;

namespace {

constexpr int kExitStuck = 86;
constexpr unsigned kMaxThreads = 1024, kMaxWarps = kMaxThreads / 32;

long setting(const char* name, long otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::atol(value);
}

bool sanitized() { return has_address_sanitizer() || has_race_detector(); }

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

bool same(const Place& a, const Place& b) {
  return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}

// A CUDA thread, and what it waits for: `op` in a warp operation, `barrier` at the block barrier.
struct Thread : Lane {
  struct Copy {
    AsyncCopy copy;
    unsigned group;
  };

  Thread(void (*entry)(), unsigned number) : Lane{{}, number, nullptr, nullptr}, fiber(entry, number) {}

  Fiber fiber;
  Place place{};
  const WarpOp* op = nullptr;
  unsigned mask = 0;
  void* part = nullptr;
  Barrier barrier{};
  int predicate = 0;  // brought to the barrier, then the result
  std::deque<Copy> copies;
  unsigned closed_groups = 0;
};

// Each lane that there is stands in one of these sets, or is the one that runs.
struct Warp {
  unsigned runnable = 0, in_warp_op = 0, at_barrier = 0, returned = 0;
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

// Which warp and which of its lanes come first. Seed 0: in order. Otherwise as badly as can be, one warp running ahead
// until it must wait: with seed 1 always the last one and its last lane, with others one by lot, which changes now and
// then.
class Order {
 public:
  Order(uint64_t seed, uint64_t block, unsigned warps) : random_(seed << 40 ^ block), seed_(seed), warps_(warps) {
    std::iota(priority_, priority_ + warps, 0u);
    if (seed == 1) std::reverse(priority_, priority_ + warps);
    if (seed > 1) shuffle();
  }

  unsigned warp(unsigned place) const { return priority_[place]; }

  // The lane to start with, and the step to the next one modulo 32.
  void turn(unsigned* first, unsigned* step) {
    constexpr unsigned kBack = 31;
    *first = seed_ > 1 ? random_.below(32) : seed_ == 1 ? 31 : 0;
    *step = seed_ == 1 || (seed_ > 1 && random_.below(2) != 0) ? kBack : 1;
    if (seed_ > 1 && random_.below(8) == 0) shuffle();
  }

 private:
  void shuffle() {
    for (unsigned i = warps_ - 1; i > 0; --i) std::swap(priority_[i], priority_[random_.below(i + 1)]);
  }

  Random random_;
  uint64_t seed_;
  unsigned warps_;
  unsigned priority_[kMaxWarps];
};

// The same for blocks: i -> (i step + start) mod n, a permutation since step and n have no common factor.
class BlockOrder {
 public:
  BlockOrder(uint64_t seed, uint64_t n) : n_(n) {
    if (seed == 0) return;
    start_ = step_ = n - 1;
    if (seed == 1) return;
    Random random(seed);
    start_ = random.below(0x7fffffff) % n;
    do step_ = 1 + random.below(0x7fffffff) % n;
    while (std::gcd(step_, n) != 1);
  }

  uint64_t operator()(uint64_t i) const {
    __extension__ using Wide = unsigned __int128;
    return static_cast<uint64_t>((static_cast<Wide>(i) * step_ + start_) % n_);
  }

 private:
  uint64_t n_, step_ = 1, start_ = 0;
};

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

}  // namespace

// The threads of one block, and who runs next.
class Machine {
 public:
  Machine() { together_.reserve(kMaxThreads); }  // no allocation on behalf of a thread: the race detector watches those

  void run_block(const Launch& launch, uint3 index, uint64_t seed);
  void meet(Thread& self, const WarpOp& op, unsigned mask, void* part, Place place);
  int wait_for_block(Thread& self, Barrier kind, int predicate, Place place);
  [[noreturn]] void stop(const std::string& why) const;

 private:
  static void thread_main();

  void start_threads();
  void run_lanes(unsigned warp, Order& order);
  bool open_barrier();
  void order_memory();
  std::string whereabouts(unsigned thread) const;

  const Launch* launch_ = nullptr;
  Block block_{};
  unsigned threads_ = 0, warps_ = 0;
  std::vector<std::unique_ptr<Thread>> pool_;
  Warp warp_[kMaxWarps];
  std::vector<Thread*> together_;  // who meets just now
};

void Machine::thread_main() {
  auto* self = static_cast<Thread*>(current);
  Machine* machine = self->machine;
  self->fiber.entered();
  for (;;) {
    machine->launch_->call(machine->launch_->arguments);
    machine->warp_[self->number / 32].returned |= 1u << self->number % 32;
    self->fiber.leave();
  }
}

// Tells the race detector that all that the threads of together_ did so far happens before all that they do next.
void Machine::order_memory() {
  if (!has_race_detector()) return;
  void* here = __tsan_get_current_fiber();
  bool ordered = false;
  for (int round = 0; round < 2; ++round)
    for (const Thread* thread : together_) {
      switch_race_detector(thread->fiber.race_fiber(), ordered);
      ordered = true;
    }
  switch_race_detector(here, false);
}

void Machine::meet(Thread& self, const WarpOp& op, unsigned mask, void* part, Place place) {
  Warp& warp = warp_[self.number / 32];
  const unsigned first = self.number / 32 * 32, bit = 1u << self.number % 32;
  self.place = place;
  self.op = &op;
  self.mask = mask;
  self.part = part;
  warp.in_warp_op |= bit;
  if ((mask & bit) == 0) stop("a lane is not in its own mask");
  if ((mask & warp.returned) != 0) stop("a lane of the mask has returned");
  if (first + 32 > threads_ && mask >> (threads_ - first) != 0) stop("a lane of the mask is not in this block");

  bool complete = (warp.in_warp_op & mask) == mask;
  if (complete) {
    void* parts[32] = {};
    for_lanes(mask, [&](unsigned i) {
      const Thread& other = *pool_[first + i];
      parts[i] = other.part;
      if (other.mask != mask)
        complete = false;
      else if (other.op != &op)
        stop("the lanes of one mask are in different warp operations");
    });
    if (complete) {
      if (op.combine != nullptr) {
        op.combine(mask, parts);
      } else {
        together_.clear();
        for_lanes(mask, [&](unsigned i) { together_.push_back(pool_[first + i].get()); });
        order_memory();
      }
      warp.in_warp_op &= ~mask;
      warp.runnable |= mask;
    }
  }
  self.fiber.leave();
}

int Machine::wait_for_block(Thread& self, Barrier kind, int predicate, Place place) {
  self.place = place;
  self.barrier = kind;
  self.predicate = predicate;
  warp_[self.number / 32].at_barrier |= 1u << self.number % 32;
  self.fiber.leave();
  return self.predicate;
}

// When nobody can run: opens the block barrier if all that have not returned wait there. False: all have returned.
bool Machine::open_barrier() {
  together_.clear();
  for (unsigned w = 0; w < warps_; ++w) {
    if (warp_[w].in_warp_op != 0) stop("a warp operation waits for lanes that do not come");
    for_lanes(warp_[w].at_barrier, [&](unsigned i) { together_.push_back(pool_[w * 32 + i].get()); });
  }
  if (together_.empty()) return false;

  const Thread& first = *together_.front();
  int count = 0;
  for (const Thread* thread : together_) {
    if (thread->barrier != first.barrier || !same(thread->place, first.place))
      stop("the threads of the block wait at different barriers");
    count += thread->predicate != 0;
  }
  const bool all = count == static_cast<int>(together_.size());
  const int result = first.barrier == Barrier::kCount ? count : first.barrier == Barrier::kAnd ? all : count > 0;
  for (Thread* thread : together_) thread->predicate = result;
  order_memory();
  for (unsigned w = 0; w < warps_; ++w) {
    warp_[w].runnable = warp_[w].at_barrier;
    warp_[w].at_barrier = 0;
  }
  return true;
}

// Runs each lane that is runnable now up to where it waits.
void Machine::run_lanes(unsigned w, Order& order) {
  Warp& warp = warp_[w];
  unsigned lane, step, todo = warp.runnable;
  order.turn(&lane, &step);
  for (; todo != 0; lane = (lane + step) % 32) {
    const unsigned bit = 1u << lane;
    if ((todo & bit) == 0) continue;
    todo &= ~bit;
    warp.runnable &= ~bit;
    Thread& thread = *pool_[w * 32 + lane];
    current = &thread;
    thread.fiber.enter();
  }
}

void Machine::start_threads() {
  const dim3& size = block_.size;
  while (pool_.size() < threads_)
    pool_.push_back(std::make_unique<Thread>(thread_main, static_cast<unsigned>(pool_.size())));
  for (unsigned i = 0; i < threads_; ++i) {
    Thread& thread = *pool_[i];
    thread.thread = {i % size.x, i / size.x % size.y, i / size.x / size.y};
    thread.block = &block_;
    thread.machine = this;
    thread.copies.clear();
    thread.closed_groups = 0;
  }
  for (unsigned w = 0; w < warps_; ++w) {
    const unsigned lanes = std::min(threads_ - w * 32, 32u);
    warp_[w] = Warp{};
    warp_[w].runnable = 0xffffffffu >> (32 - lanes);
  }
}

void Machine::run_block(const Launch& launch, uint3 index, uint64_t seed) {
  launch_ = &launch;
  // An array of its own and no longer than asked for, so that AddressSanitizer sees an overrun.
  std::unique_ptr<void, Free> dynamic;
  if (launch.dynamic_bytes > 0) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 128, launch.dynamic_bytes) != 0) std::abort();
    dynamic.reset(std::memset(memory, 0xff, launch.dynamic_bytes));
  }
  block_ = {index, launch.block, launch.grid, static_cast<unsigned char*>(dynamic.get())};
  threads_ = launch.block.x * launch.block.y * launch.block.z;
  warps_ = (threads_ + 31) / 32;
  start_threads();

  void* here = has_race_detector() ? __tsan_get_current_fiber() : nullptr;
  for (unsigned i = 0; i < threads_ && has_race_detector(); ++i) {
    switch_race_detector(pool_[i]->fiber.race_fiber(), true);
    switch_race_detector(here, false);
  }
  Order order(seed, uint64_t{index.z} << 32 ^ uint64_t{index.y} << 16 ^ index.x, warps_);
  for (;;) {
    unsigned i = 0;
    while (i < warps_ && warp_[order.warp(i)].runnable == 0) ++i;
    if (i < warps_)
      run_lanes(order.warp(i), order);
    else if (!open_barrier())
      break;
  }
  for (unsigned i = 0; i < threads_ && has_race_detector(); ++i) {
    switch_race_detector(pool_[i]->fiber.race_fiber(), false);
    switch_race_detector(here, true);
  }
}

std::string Machine::whereabouts(unsigned i) const {
  const Warp& warp = warp_[i / 32];
  const unsigned bit = 1u << i % 32;
  const Thread& thread = *pool_[i];
  if ((warp.returned & bit) != 0) return "returned";
  const std::string place =
      std::string(" at ") + (thread.place.file ? thread.place.file : "") + ":" + std::to_string(thread.place.line);
  if ((warp.in_warp_op & bit) != 0) {
    char mask[32];
    std::snprintf(mask, sizeof(mask), " with mask %08x", thread.mask);
    return std::string(thread.op->name) + place + mask;
  }
  if ((warp.at_barrier & bit) != 0) return name_of(thread.barrier) + place;
  return (warp.runnable & bit) != 0 ? "may run" : "runs";
}

void Machine::stop(const std::string& why) const {
  std::fprintf(stderr, "kdtree host: %s\n  %s, block (%u, %u, %u) of %u threads:\n", why.c_str(), launch_->name,
               block_.index.x, block_.index.y, block_.index.z, threads_);
  for (unsigned from = 0, to; from < threads_; from = to) {
    const std::string where = whereabouts(from);
    for (to = from + 1; to < threads_ && whereabouts(to) == where;) ++to;
    std::fprintf(stderr, "  threads %u-%u: %s\n", from, to - 1, where.c_str());
  }
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

void start_copy(AsyncCopy copy) {
  auto* self = static_cast<Thread*>(current);
  self->copies.push_back({copy, self->closed_groups});
}

void close_copies() { ++static_cast<Thread*>(current)->closed_groups; }

bool take_copy(unsigned pending, AsyncCopy* copy) {
  auto* self = static_cast<Thread*>(current);
  if (self->copies.empty() || self->copies.front().group + pending >= self->closed_groups) return false;
  *copy = self->copies.front().copy;
  self->copies.pop_front();
  return true;
}

void check_alignment(const void* address, size_t alignment, const char* instruction) {
  if (reinterpret_cast<uintptr_t>(address) % alignment == 0) return;
  const auto* self = static_cast<Thread*>(current);
  self->machine->stop("misaligned address in " + std::string(instruction) + " of thread " +
                      std::to_string(self->number));
}

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

cudaError_t check(const Launch& launch) {
  const dim3 &b = launch.block, &g = launch.grid;
  const bool block_fits = b.x > 0 && b.y > 0 && b.z > 0 && b.x <= kMaxThreads && b.y <= kMaxThreads && b.z <= 64 &&
                          b.x * b.y * b.z <= kMaxThreads;
  const bool grid_fits = g.x > 0 && g.y > 0 && g.z > 0 && g.x <= 0x7fffffffu && g.y <= 65535 && g.z <= 65535;
  if (!block_fits || !grid_fits) return cudaErrorInvalidConfiguration;
  return launch.dynamic_bytes <= allowed_shared_memory(launch.kernel) ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

void run(const Launch& launch) {
  if (note(check(launch)) != cudaSuccess) return;
  const dim3& grid = launch.grid;
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  const auto seed = static_cast<uint64_t>(setting("KDTREE_HOST_SEED", 0));
  const BlockOrder order(seed, blocks);
  std::atomic<uint64_t> next{0};
  const auto work = [&] {
    std::unique_ptr<Machine> machine = idle().take();
    // A sanitizer keeps state of its own among the thread-local variables.
    const std::unique_ptr<StaticShared> shared = sanitized() ? nullptr : std::make_unique<StaticShared>();
    for (uint64_t i; (i = next++) < blocks;) {
      const uint64_t b = order(i);
      if (shared) shared->spoil();
      machine->run_block(launch,
                         {static_cast<unsigned>(b % grid.x), static_cast<unsigned>(b / grid.x % grid.y),
                          static_cast<unsigned>(b / grid.x / grid.y)},
                         seed);
    }
    idle().give(std::move(machine));
  };
  const long wanted = sanitized() ? 1 : setting("KDTREE_HOST_THREADS", 1);
  std::vector<std::thread> helpers;
  for (long i = 1; i < std::min<long>(wanted, static_cast<long>(blocks)); ++i) helpers.emplace_back(work);
  work();
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace kdtree::host
