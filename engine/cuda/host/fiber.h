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
struct Context {
  void *stack, *frame, *next;
};

// In line and without call and ret, so that the processor's stack of return addresses goes on predicting: lanes in step
// return to where the lane before them was called.
inline void switch_context(Context& from, Context& to) {
  Context *save = &from, *load = &to;
  __asm__ volatile(
      "leaq 1f(%%rip), %%rax\n\t"
      "movq %%rsp, (%0)\n\t"
      "movq %%rbp, 8(%0)\n\t"
      "movq %%rax, 16(%0)\n\t"
      "movq (%1), %%rsp\n\t"
      "movq 8(%1), %%rbp\n\t"
      "jmpq *16(%1)\n"
      "1:"
      : "+D"(save), "+S"(load)
      :
      : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0", "xmm1", "xmm2",
        "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15",
        "cc", "memory");
}

inline void make_context(Context& context, char* bottom, size_t size, void (*entry)()) {
  auto* top = reinterpret_cast<uintptr_t*>(reinterpret_cast<uintptr_t>(bottom + size) / 16 * 16) - 1;
  *top = 0;  // entry's return address: the end of a backtrace
  context = {top, nullptr, reinterpret_cast<void*>(entry)};
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
