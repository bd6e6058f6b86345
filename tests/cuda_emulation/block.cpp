// SPDX-License-Identifier: Apache-2.0
#include "block.h"

#include <utility>
#include <vector>

#include "barrier_sites.h"
#include "block_state.h"
#include "sanitizers.h"

namespace emulation {

__thread Here here;
__thread int running_on = -1;

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
  const dim3 size = launch.block, grid = launch.grid;
  count_ = static_cast<int>(size.x * size.y * size.z);
  if (count_ > allocated_) {
    const Invisible invisible;
    threads_ = std::make_unique<Thread[]>((count_ + kWarpSize - 1) / kWarpSize * kWarpSize);
    allocated_ = count_;
  }
  waiting_ = exited_ = ready_count_ = 0;
  failure_ = {};
  for (int i = 0; i < count_; ++i) {
    Thread& thread = threads_[i];
    const auto n = static_cast<unsigned>(i);
    thread.here = {{n % size.x, n / size.x % size.y, n / size.x / size.y},
                   index,
                   {size.x, size.y, size.z},
                   {grid.x, grid.y, grid.z}};
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

std::string Block::run(const Launch& launch, uint3 index, Random& random) {
  prepare(launch, index);
  release(&begins_);
  while (ready_count_ > 0 && failure_.kind == Failure::kNone) {
    const int64_t pick = random.below(ready_count_);
    Thread& thread = threads_[ready_[pick]];
    ready_[pick] = ready_[--ready_count_];
    resume(thread);
  }
  acquire(&ends_);
  if (exited_ == count_) return {};
  const Invisible invisible;
  return explain(failure_.kind == Failure::kNone ? find_stuck() : failure_);
}

void Block::stop(Failure failure) {
  failure_ = failure;
  suspend();
  __builtin_unreachable();
}

int Block::meet_block(Barrier barrier, int predicate, Site site) {
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
      failure_ = {Failure::kBarriersDiffer, &thread, self_};
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

namespace {

thread_local Block* running = nullptr;

// In its scope a fiber runs the emulator's code.
class EmulatorsOwn {
 public:
  EmulatorsOwn() { running_on = -1; }
  ~EmulatorsOwn() { running_on = device_; }

 private:
  const int device_ = running_on;
};

std::vector<uint3> shuffled_blocks(dim3 grid, Random& random) {
  std::vector<uint3> blocks;
  blocks.reserve(static_cast<size_t>(grid.x) * grid.y * grid.z);
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) blocks.push_back({x, y, z});
    }
  }
  for (size_t i = blocks.size(); i > 1; --i) {
    std::swap(blocks[i - 1], blocks[static_cast<size_t>(random.below(static_cast<int64_t>(i)))]);
  }
  return blocks;
}

}  // namespace

int block_barrier(Barrier barrier, int predicate, Site site) {
  const EmulatorsOwn own;
  if (!barrier_is_kept(site)) return predicate != 0;
  return running->meet_block(barrier, predicate, site);
}

uint64_t warp_operation(Warp operation, unsigned mask, uint64_t value, int source, Site site) {
  const EmulatorsOwn own;
  if (!barrier_is_kept(site)) mask = running->own_lane();
  return running->meet_warp(operation, mask, value, source, site);
}

void fail_access(uintptr_t address, size_t bytes) {
  Failure failure{Failure::kAccess, running->self()};
  failure.address = address;
  failure.bytes = bytes;
  running->stop(failure);
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
  std::string failure;
  for (const uint3 index : order) {
    failure = block->run(launch, index, random);
    if (!failure.empty()) break;
  }
  running = nullptr;
  return failure;
}

}  // namespace emulation
