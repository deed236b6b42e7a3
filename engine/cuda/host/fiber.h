// Stackful coroutines, and what AddressSanitizer and ThreadSanitizer have to be told of them. One build serves all: the
// sanitizers' functions are weak symbols, null where no sanitizer is linked.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <utility>

#if !defined(__x86_64__) || defined(KDTREE_HOST_UCONTEXT)
#define KDTREE_HOST_UCONTEXT_SWITCH
#include <ucontext.h>
#endif

extern "C" {
__attribute__((weak)) void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t size);
__attribute__((weak)) void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom, size_t* size);
__attribute__((weak)) void* __tsan_get_current_fiber();
__attribute__((weak)) void* __tsan_create_fiber(unsigned flags);
__attribute__((weak)) void __tsan_destroy_fiber(void* fiber);
__attribute__((weak)) void __tsan_switch_to_fiber(void* fiber, unsigned flags);
}

namespace kdtree::host {

inline bool has_address_sanitizer() { return __sanitizer_start_switch_fiber != nullptr; }
inline bool has_race_detector() { return __tsan_create_fiber != nullptr; }

// The race detector's side of a switch; `ordered`: all done so far happens before what `fiber` does next.
inline void switch_race_detector(void* fiber, bool ordered) {
  constexpr unsigned kNoSync = 1;
  if (has_race_detector()) __tsan_switch_to_fiber(fiber, ordered ? 0 : kNoSync);
}

#ifdef KDTREE_HOST_UCONTEXT_SWITCH
using Context = ucontext_t;
inline void switch_context(Context& from, Context& to) { swapcontext(&from, &to); }
inline void make_context(Context& context, char* bottom, size_t size, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = bottom;
  context.uc_stack.ss_size = size;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}
#else
using Context = void*;  // the stack pointer, under it the registers that a call preserves

extern "C" void kdtree_host_switch_context(void** from, void* to);
__asm__(R"(
  .text
  .p2align 4
  .weak kdtree_host_switch_context
  .hidden kdtree_host_switch_context
  .type kdtree_host_switch_context, @function
kdtree_host_switch_context:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size kdtree_host_switch_context, .-kdtree_host_switch_context
)");

inline void switch_context(Context& from, Context& to) { kdtree_host_switch_context(&from, to); }

inline void make_context(Context& context, char* bottom, size_t size, void (*entry)()) {
  constexpr int kRegisters = 6;
  auto* top = reinterpret_cast<uintptr_t*>(reinterpret_cast<uintptr_t>(bottom + size) / 16 * 16) - 2;
  top[0] = reinterpret_cast<uintptr_t>(entry);  // where `ret` goes
  top[1] = 0;                                   // entry's own return address: the end of a backtrace
  for (int i = 1; i <= kRegisters; ++i) top[-i] = 0;
  context = top - kRegisters;
}
#endif

// A stack with its execution. `entry` never returns.
class Fiber {
 public:
  // number: sets fibers' stacks off against each other, so that their tops do not share cache sets.
  Fiber(void (*entry)(), unsigned number) {
    memory_ = static_cast<char*>(
        mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (memory_ == MAP_FAILED || mprotect(memory_, kGuard, PROT_NONE) != 0) {
      std::perror("kdtree host: no memory for a stack");
      std::abort();
    }
    make_context(context_, memory_ + kGuard, kSize - kGuard - number % 64 * 64, entry);
    if (has_race_detector()) race_fiber_ = __tsan_create_fiber(0);
  }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber() {
    if (has_race_detector()) __tsan_destroy_fiber(race_fiber_);
    munmap(memory_, kSize);
  }

  void* race_fiber() const { return race_fiber_; }

  // Goes into the fiber until it calls leave.
  void enter() {
    void* fake_stack = nullptr;
    if (has_race_detector()) caller_race_fiber_ = __tsan_get_current_fiber();
    switch_race_detector(race_fiber_, false);
    if (has_address_sanitizer()) __sanitizer_start_switch_fiber(&fake_stack, memory_, kSize);
    switch_context(caller_, context_);
    if (has_address_sanitizer()) __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
  }

  // First thing in entry.
  void entered() {
    if (has_address_sanitizer()) __sanitizer_finish_switch_fiber(nullptr, &caller_stack_, &caller_stack_size_);
  }

  // Back to the caller of enter; returns at the next enter.
  void leave() {
    void* fake_stack = nullptr;
    switch_race_detector(caller_race_fiber_, false);
    if (has_address_sanitizer()) __sanitizer_start_switch_fiber(&fake_stack, caller_stack_, caller_stack_size_);
    switch_context(context_, caller_);
    if (has_address_sanitizer()) __sanitizer_finish_switch_fiber(fake_stack, &caller_stack_, &caller_stack_size_);
  }

 private:
  static constexpr size_t kSize = 256 << 10, kGuard = 4096;

  Context context_{}, caller_{};
  char* memory_ = nullptr;
  void *race_fiber_ = nullptr, *caller_race_fiber_ = nullptr;
  const void* caller_stack_ = nullptr;
  size_t caller_stack_size_ = 0;
};

}  // namespace kdtree::host
