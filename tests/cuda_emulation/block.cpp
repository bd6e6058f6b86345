// SPDX-License-Identifier: Apache-2.0
#include "block.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <vector>

#include "barrier_sites.h"
#include "fiber.h"
#include "sanitizers.h"
#include "symbol.h"

namespace emulation {

__thread Here here;
__thread int running_on = -1;

namespace {

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

class Block {
 public:
  // Runs one block. False once something went wrong.
  bool run(const Launch& launch, uint3 index, Random& random);
  int barrier(Barrier barrier, int predicate, Site site);
  uint64_t warp(Warp operation, unsigned mask, uint64_t value, int source, Site site);
  unsigned own_lane() const { return 1u << lane_of(*self_); }
  [[noreturn]] void stop(const std::string& what);
  const std::string& failure() const { return failure_; }
  void forget_failure() { failure_.clear(); }

 private:
  static void body(void* block);
  void prepare(const Launch& launch, uint3 index);
  void resume(Thread& thread);
  void make_ready(Thread& thread) {
    thread.state = State::kReady;
    ready_[ready_count_++] = static_cast<int>(&thread - threads_.get());
  }
  void suspend();
  void complete_barrier();
  void complete_warp(Thread* first, unsigned mask);
  int lane_of(const Thread& thread) const { return static_cast<int>(&thread - threads_.get()) % kWarpSize; }
  Thread* lane_zero(const Thread& thread) {
    return threads_.get() + (&thread - threads_.get()) / kWarpSize * kWarpSize;
  }
  std::string name(const Thread& thread) const;
  std::string doing(const Thread& thread) const;
  void fail(const Thread& thread, const std::string& what);
  void report_stuck();

  std::unique_ptr<Thread[]> threads_;
  int allocated_ = 0;
  const Launch* launch_ = nullptr;
  int count_ = 0, waiting_ = 0, exited_ = 0, ready_count_ = 0;
  int ready_[kMaxThreads];
  Thread* self_ = nullptr;
  char begins_, ends_, barriers_[2];  // addresses that TSan orders by
  int turn_ = 0;
  std::string failure_;
};

thread_local Block* running = nullptr;

uint64_t combine(Warp operation, uint64_t a, uint64_t b) {
  switch (operation) {
    case Warp::kAdd:
      return a + b;
    case Warp::kMin:
      return std::min(a, b);
    case Warp::kMax:
      return std::max(a, b);
    case Warp::kAnd:
      return a & b;
    case Warp::kOr:
      return a | b;
    default:
      return a ^ b;
  }
}

// What `thread` gets from the lanes of its mask, the first of which is lane 0's.
uint64_t warp_result(const Thread& thread, const Thread* lanes, unsigned mask) {
  if (thread.operation == Warp::kSync) return 0;
  if (thread.operation == Warp::kShuffle) return lanes[thread.source & 31].value;
  const bool is_mask = thread.operation == Warp::kBallot || thread.operation == Warp::kMatch;
  const int lowest = __builtin_ctz(mask);
  uint64_t result = is_mask ? 0 : lanes[lowest].value;
  for (int lane = is_mask ? lowest : lowest + 1; lane < kWarpSize; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    const uint64_t value = lanes[lane].value;
    if (is_mask) {
      const bool set = thread.operation == Warp::kMatch ? value == thread.value : value != 0;
      result |= uint64_t{set} << lane;
    } else {
      result = combine(thread.operation, result, value);
    }
  }
  return result;
}

std::string text(const char* format, auto... values) {
  char buffer[256];
  std::snprintf(buffer, sizeof(buffer), format, values...);
  return buffer;
}

std::string text(uint3 index) {
  return text("(%u, %u, %u)", index.x, index.y, index.z);
}

std::string text(Site site) {
  return text("%s:%d", site.file, site.line);
}

const char* text(Warp operation) {
  switch (operation) {
    case Warp::kSync:
      return "__syncwarp";
    case Warp::kBallot:
      return "vote";
    case Warp::kShuffle:
      return "shuffle";
    case Warp::kMatch:
      return "match";
    default:
      return "reduction";
  }
}

std::string Block::name(const Thread& thread) const {
  return "thread " + text(thread.here.thread) + " of block " + text(thread.here.block) + " of " +
         symbol_name(launch_->function);
}

std::string Block::doing(const Thread& thread) const {
  switch (thread.state) {
    case State::kAtBarrier:
      return "waits at the barrier " + text(thread.site);
    case State::kInWarp:
      return text("waits in the %s ", text(thread.operation)) + text(thread.site) +
             text(" with mask 0x%08x", thread.mask);
    case State::kExited:
      return "has exited";
    default:
      return "runs";
  }
}

void Block::fail(const Thread& thread, const std::string& what) {
  if (failure_.empty()) failure_ = name(thread) + " " + what;
}

void Block::body(void* block) {
  auto* self = static_cast<Block*>(block);
  acquire(&self->begins_);
  running_on = self->launch_->device;
  self->launch_->call(self->launch_->function, self->launch_->arguments);
  running_on = -1;
  release(&self->ends_);
  self->self_->state = State::kExited;
}

void Block::prepare(const Launch& launch, uint3 index) {
  launch_ = &launch;
  count_ = static_cast<int>(launch.block.x * launch.block.y * launch.block.z);
  if (count_ > allocated_) {
    const Invisible invisible;
    threads_ = std::make_unique<Thread[]>(count_);
    allocated_ = count_;
  }
  waiting_ = exited_ = ready_count_ = 0;
  for (int i = 0; i < count_; ++i) {
    Thread& thread = threads_[i];
    const auto linear = static_cast<unsigned>(i);
    thread.here = {
        {linear % launch.block.x, linear / launch.block.x % launch.block.y, linear / launch.block.x / launch.block.y},
        index,
        {launch.block.x, launch.block.y, launch.block.z},
        {launch.grid.x, launch.grid.y, launch.grid.z}};
    thread.fiber.start(&Block::body, this);
    make_ready(thread);
  }
}

void Block::resume(Thread& thread) {
  self_ = &thread;
  emulation::here = thread.here;
  thread.fiber.enter();
  if (thread.state == State::kExited) ++exited_;
}

bool Block::run(const Launch& launch, uint3 index, Random& random) {
  prepare(launch, index);
  release(&begins_);
  while (ready_count_ > 0 && failure_.empty()) {
    const int64_t pick = random.below(ready_count_);
    Thread& thread = threads_[ready_[pick]];
    ready_[pick] = ready_[--ready_count_];
    resume(thread);
  }
  acquire(&ends_);
  if (exited_ < count_ && failure_.empty()) report_stuck();
  return failure_.empty();
}

void Block::suspend() {
  self_->fiber.leave();
}

void Block::stop(const std::string& what) {
  fail(*self_, what);
  suspend();
  __builtin_unreachable();
}

int Block::barrier(Barrier barrier, int predicate, Site site) {
  Thread& self = *self_;
  self.state = State::kAtBarrier;
  self.barrier = barrier;
  self.value = predicate != 0;
  self.site = site;
  const char* const order = &barriers_[turn_];
  release(order);
  if (++waiting_ == count_) complete_barrier();
  suspend();
  acquire(order);
  return static_cast<int>(self.result);
}

void Block::complete_barrier() {
  uint64_t set = 0;
  for (int i = 0; i < count_; ++i) {
    const Thread& thread = threads_[i];
    set += thread.value;
    if (thread.site != self_->site) {
      fail(thread, doing(thread) + ", but " + name(*self_) + " " + doing(*self_));
      return;
    }
  }
  waiting_ = 0;
  turn_ ^= 1;
  for (int i = 0; i < count_; ++i) {
    Thread& thread = threads_[i];
    const auto all = static_cast<uint64_t>(count_);
    thread.result = thread.barrier == Barrier::kCount ? set : thread.barrier == Barrier::kAnd ? set == all : set > 0;
    make_ready(thread);
  }
}

uint64_t Block::warp(Warp operation, unsigned mask, uint64_t value, int source, Site site) {
  Thread& self = *self_;
  self.state = State::kInWarp;
  self.operation = operation;
  self.mask = mask;
  self.value = value;
  self.source = source;
  self.site = site;
  Thread* const first = lane_zero(self);
  if ((mask >> lane_of(self) & 1) == 0) {
    stop(doing(self) + ", which does not have its own lane");
  }
  // Lanes meet at an address of the mask's lowest lane, so that disjoint masks do not order each other.
  Thread& meeting = first[__builtin_ctz(mask)];
  const char* const order = &meeting.orders[meeting.turn];
  if (operation == Warp::kSync) release(order);
  bool complete = true;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    const Thread& other = first[lane];
    if (&other - threads_.get() >= count_) {
      stop(doing(self) + text(", but its warp has no lane %d", lane));
    }
    complete = complete && other.state == State::kInWarp && other.mask == mask && other.operation == operation &&
               other.site == site;
  }
  if (complete) complete_warp(first, mask);
  suspend();
  if (operation == Warp::kSync) acquire(order);
  return self.result;
}

void Block::complete_warp(Thread* first, unsigned mask) {
  first[__builtin_ctz(mask)].turn ^= 1;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    Thread& thread = first[lane];
    if (thread.operation == Warp::kShuffle && (mask >> (thread.source & 31) & 1) == 0) {
      fail(thread, text("reads lane %d, which is not in the mask: it ", thread.source) + doing(thread));
      return;
    }
    thread.result = warp_result(thread, first, mask);
  }
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if ((mask >> lane & 1) != 0) make_ready(first[lane]);
  }
}

// Nobody can run, and somebody waits: name one who waits, and one whom it waits for.
void Block::report_stuck() {
  for (int i = 0; i < count_; ++i) {
    const Thread& thread = threads_[i];
    if (thread.state == State::kExited) continue;
    for (int j = 0; j < count_; ++j) {
      const Thread& other = threads_[j];
      const bool same_warp = i / kWarpSize == j / kWarpSize;
      const bool awaited =
          thread.state == State::kAtBarrier || (same_warp && (thread.mask >> (j % kWarpSize) & 1) != 0);
      const bool there =
          other.state == thread.state && other.site == thread.site &&
          (thread.state == State::kAtBarrier || (other.mask == thread.mask && other.operation == thread.operation));
      if (!awaited || there) continue;
      fail(thread, doing(thread) + ", but " + name(other) + " " + doing(other));
      return;
    }
  }
}

std::vector<uint3> shuffled_blocks(dim3 grid, Random& random) {
  std::vector<uint3> blocks;
  blocks.reserve(static_cast<size_t>(grid.x) * grid.y * grid.z);
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) blocks.push_back({x, y, z});
    }
  }
  for (size_t i = blocks.size(); i > 1; --i) {
    const auto j = static_cast<size_t>(random.below(static_cast<int64_t>(i)));
    const uint3 swapped = blocks[i - 1];
    blocks[i - 1] = blocks[j];
    blocks[j] = swapped;
  }
  return blocks;
}

// In its scope a fiber runs the emulator's code.
class EmulatorsOwn {
 public:
  EmulatorsOwn() { running_on = -1; }
  ~EmulatorsOwn() { running_on = device_; }

 private:
  const int device_ = running_on;
};

}  // namespace

int block_barrier(Barrier barrier, int predicate, Site site) {
  const EmulatorsOwn own;
  if (!barrier_is_kept(site)) return predicate != 0;
  return running->barrier(barrier, predicate, site);
}

uint64_t warp_operation(Warp operation, unsigned mask, uint64_t value, int source, Site site) {
  const EmulatorsOwn own;
  if (!barrier_is_kept(site)) mask = running->own_lane();
  return running->warp(operation, mask, value, source, site);
}

void fail_thread(const std::string& what) {
  running->stop(what);
}

std::string run_launch(const Launch& launch, Random& random) {
  static thread_local std::unique_ptr<Block> block;
  std::vector<uint3> order;
  {
    const Invisible invisible;
    if (block == nullptr) block = std::make_unique<Block>();
    order = shuffled_blocks(launch.grid, random);
  }
  running = block.get();
  bool good = true;
  for (const uint3 index : order) {
    good = block->run(launch, index, random);
    if (!good) break;
  }
  running = nullptr;
  std::string failure = good ? std::string() : block->failure();
  block->forget_failure();
  return failure;
}

}  // namespace emulation
