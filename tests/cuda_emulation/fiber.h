// SPDX-License-Identifier: Apache-2.0
// Fiber: a stack, and the place where its code goes on. A thread enters a fiber, which runs until it leaves; then the
// thread goes on behind enter(). A fiber is entered by one thread only. To TSan each is a thread of its own, and no
// switch orders anything.
#pragma once

#include <cstddef>

namespace emulation {

class Fiber {
 public:
  using Body = void (*)(void* argument);

  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // The next enter() calls body(argument). A body that had not returned is forgotten, its objects not destroyed.
  void start(Body body, void* argument);
  void enter();
  // On the fiber itself: back to the thread that entered.
  void leave();

  const char* stack() const { return stack_; }
  static constexpr size_t kStackBytes = size_t{256} << 10;

 private:
  friend void fiber_main();
  void run();
  void return_to_thread(bool finished);
  void switched_to_fiber();

  char* stack_ = nullptr;
  Body body_ = nullptr;
  void* argument_ = nullptr;
  bool finished_ = true;
  void* here_ = nullptr;    // where the fiber goes on
  void* thread_ = nullptr;  // where the thread goes on
  // What the sanitizers keep for either side.
  void* fiber_state_ = nullptr;
  void* thread_state_ = nullptr;
  const void* thread_stack_ = nullptr;
  size_t thread_stack_bytes_ = 0;
};

}  // namespace emulation
