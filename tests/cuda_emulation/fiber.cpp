// SPDX-License-Identifier: Apache-2.0
#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <new>

#include "sanitizers.h"

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace emulation {

// Whom fiber_main runs; set just before the first switch to a started fiber.
static thread_local Fiber* entering = nullptr;

void fiber_main() {
  entering->run();
}

#ifdef __x86_64__

// Saves what a function must preserve on the stack that it leaves, and takes it from the one that it goes to. Both
// sides have the same floating-point modes.
extern "C" void emulation_switch_stack(void** from, void* to);
__asm__(R"(
.text
.p2align 4
.globl emulation_switch_stack
.hidden emulation_switch_stack
.type emulation_switch_stack, @function
emulation_switch_stack:
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
.size emulation_switch_stack, .-emulation_switch_stack
)");

static void switch_stack(void** from, void** to) {
  emulation_switch_stack(from, *to);
}

static void* prepare_stack(char* stack, void*) {
  auto** top = reinterpret_cast<void**>(stack + Fiber::kStackBytes);
  *--top = nullptr;  // fiber_main's return address: it does not return
  *--top = reinterpret_cast<void*>(&fiber_main);
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  return top;
}

static void free_place(void*) {}
static void* make_place() {
  return nullptr;
}

#else

static void switch_stack(void** from, void** to) {
  swapcontext(static_cast<ucontext_t*>(*from), static_cast<ucontext_t*>(*to));
}

static void* make_place() {
  return new ucontext_t;
}

static void free_place(void* place) {
  delete static_cast<ucontext_t*>(place);
}

static void* prepare_stack(char* stack, void* place) {
  auto* context = static_cast<ucontext_t*>(place);
  getcontext(context);
  context->uc_stack.ss_sp = stack;
  context->uc_stack.ss_size = Fiber::kStackBytes;
  context->uc_link = nullptr;
  makecontext(context, &fiber_main, 0);
  return context;
}

#endif

// A page below the stack catches what runs over it.
static size_t guard_bytes() {
  return static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

Fiber::Fiber() {
  const size_t guard = guard_bytes();
  void* memory = mmap(nullptr, guard + kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mprotect(memory, guard, PROT_NONE);
  stack_ = static_cast<char*>(memory) + guard;
  here_ = make_place();
  thread_ = make_place();
}

Fiber::~Fiber() {
#ifdef EMULATION_TSAN
  if (fiber_state_ != nullptr) __tsan_destroy_fiber(fiber_state_);
#endif
  permit(stack_, kStackBytes);
  free_place(here_);
  free_place(thread_);
  munmap(stack_ - guard_bytes(), guard_bytes() + kStackBytes);
}

void Fiber::start(Body body, void* argument) {
  body_ = body;
  argument_ = argument;
  if (!finished_) permit(stack_, kStackBytes);
#ifdef EMULATION_TSAN
  if (!finished_ && fiber_state_ != nullptr) {
    __tsan_destroy_fiber(fiber_state_);
    fiber_state_ = nullptr;
  }
  if (fiber_state_ == nullptr) fiber_state_ = __tsan_create_fiber(0);
#endif
  finished_ = false;
  here_ = prepare_stack(stack_, here_);
}

void Fiber::enter() {
  entering = this;
#ifdef EMULATION_TSAN
  thread_state_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(fiber_state_, __tsan_switch_to_fiber_no_sync);
#endif
#ifdef EMULATION_ASAN
  __sanitizer_start_switch_fiber(&thread_state_, stack_, kStackBytes);
#endif
  switch_stack(&thread_, &here_);
#ifdef EMULATION_ASAN
  __sanitizer_finish_switch_fiber(thread_state_, nullptr, nullptr);
#endif
}

void Fiber::switched_to_fiber() {
#ifdef EMULATION_ASAN
  __sanitizer_finish_switch_fiber(fiber_state_, &thread_stack_, &thread_stack_bytes_);
#endif
}

void Fiber::return_to_thread(bool finished) {
#ifdef EMULATION_TSAN
  __tsan_switch_to_fiber(thread_state_, __tsan_switch_to_fiber_no_sync);
#endif
#ifdef EMULATION_ASAN
  __sanitizer_start_switch_fiber(finished ? nullptr : &fiber_state_, thread_stack_, thread_stack_bytes_);
#endif
  finished_ = finished;
  switch_stack(&here_, &thread_);
}

void Fiber::leave() {
  return_to_thread(false);
  switched_to_fiber();
}

void Fiber::run() {
#ifdef EMULATION_ASAN
  fiber_state_ = nullptr;
#endif
  switched_to_fiber();
  body_(argument_);
  return_to_thread(true);
}

}  // namespace emulation
