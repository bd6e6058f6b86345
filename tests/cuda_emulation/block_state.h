// SPDX-License-Identifier: Apache-2.0
// A block while it runs: for block.cpp, warp.cpp and block_failure.cpp alone. Nothing that a fiber does here allocates:
// a fiber that fails is never resumed, and would lose what it owns.
#pragma once

#include <memory>
#include <string>

#include "block.h"
#include "fiber.h"

namespace emulation {

enum class State : uint8_t { kReady, kAtBarrier, kInWarp, kExited };

struct Thread {
  Fiber fiber;
  Here here;
  State state;
  Site site;  // where it waits, and for what:
  Barrier barrier;
  Warp operation;
  unsigned mask;
  int source;
  uint64_t value, result;
  char orders[2];  // addresses that TSan orders a warp's lanes by, in turn
  int turn;
};

// What went wrong in a thread.
struct Failure {
  enum Kind { kNone, kBarriersDiffer, kStuck, kOwnLane, kNoLane, kOutsideMask, kAccess };
  Kind kind = kNone;
  const Thread* thread = nullptr;
  const Thread* other = nullptr;  // kBarriersDiffer, kStuck: the one that did something else
  int lane = 0;                   // kNoLane, kOutsideMask
  uintptr_t address = 0;          // kAccess
  size_t bytes = 0;
};

class Block {
 public:
  // Runs one block. Returns an empty string, or what went wrong.
  std::string run(const Launch& launch, uint3 index, Random& random);

  // On a fiber:
  int meet_block(Barrier barrier, int predicate, Site site);
  uint64_t meet_warp(Warp operation, unsigned mask, uint64_t value, int source, Site site);
  const Thread* self() const { return self_; }
  unsigned own_lane() const { return 1u << lane_of(*self_); }
  [[noreturn]] void stop(Failure failure);

 private:
  static void body(void* block);
  void prepare(const Launch& launch, uint3 index);
  void resume(Thread& thread);
  void make_ready(Thread& thread) {
    thread.state = State::kReady;
    ready_[ready_count_++] = static_cast<int>(&thread - threads_.get());
  }
  void suspend() { self_->fiber.leave(); }
  void complete_barrier();
  bool has_met(const Thread* lanes, const Thread& self) const;
  void complete_warp(Thread* lanes, unsigned mask);
  Failure find_stuck() const;
  std::string explain(const Failure& failure) const;
  std::string name(const Thread& thread) const;

  int lane_of(const Thread& thread) const { return static_cast<int>(&thread - threads_.get()) % kWarpSize; }
  // The first thread of its warp.
  Thread* warp_of(const Thread& thread) const { return threads_.get() + (&thread - threads_.get() - lane_of(thread)); }
  bool exists(const Thread& thread) const { return &thread - threads_.get() < count_; }

  std::unique_ptr<Thread[]> threads_;
  int allocated_ = 0;
  const Launch* launch_ = nullptr;
  int count_ = 0, waiting_ = 0, exited_ = 0, ready_count_ = 0;
  int ready_[kMaxThreads];
  Thread* self_ = nullptr;
  char begins_, ends_, barriers_[2];  // addresses that TSan orders by
  int turn_ = 0;
  Failure failure_;
};

}  // namespace emulation
