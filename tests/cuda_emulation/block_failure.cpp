// SPDX-License-Identifier: Apache-2.0
// What went wrong in a block, in words that name kernel, block and thread.
#include <cstdio>

#include "block_state.h"
#include "memory.h"
#include "symbol.h"

namespace emulation {
namespace {

std::string text(const char* format, auto... values) {
  char buffer[256];
  std::snprintf(buffer, sizeof(buffer), format, values...);
  return buffer;
}

std::string text(uint3 index) {
  return text("(%u, %u, %u)", index.x, index.y, index.z);
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

std::string doing(const Thread& thread) {
  switch (thread.state) {
    case State::kAtBarrier:
      return text("waits at the barrier %s:%d", thread.site.file, thread.site.line);
    case State::kInWarp:
      return text("waits in the %s %s:%d with mask 0x%08x", text(thread.operation), thread.site.file, thread.site.line,
                  thread.mask);
    case State::kExited:
      return "has exited";
    default:
      return "runs";
  }
}

bool is_awaited(const Thread& thread, int by_warp, int warp, int lane) {
  return thread.state == State::kAtBarrier || (by_warp == warp && (thread.mask >> lane & 1) != 0);
}

bool does_the_same(const Thread& a, const Thread& b) {
  return a.state == b.state && a.site == b.site &&
         (a.state == State::kAtBarrier || (a.mask == b.mask && a.operation == b.operation));
}

}  // namespace

// Nobody can run, and somebody waits: one who waits, and one whom it waits for.
Failure Block::find_stuck() const {
  for (int i = 0; i < count_; ++i) {
    const Thread& thread = threads_[i];
    if (thread.state == State::kExited) continue;
    for (int j = 0; j < count_; ++j) {
      const Thread& other = threads_[j];
      if (is_awaited(thread, i / kWarpSize, j / kWarpSize, j % kWarpSize) && !does_the_same(thread, other)) {
        return {Failure::kStuck, &thread, &other};
      }
    }
    for (int lane = 0; thread.state == State::kInWarp && lane < kWarpSize; ++lane) {
      const bool missing = (thread.mask >> lane & 1) != 0 && !exists(warp_of(thread)[lane]);
      if (missing) return {Failure::kNoLane, &thread, nullptr, lane};
    }
  }
  return {};
}

std::string Block::name(const Thread& thread) const {
  return "thread " + text(thread.here.thread) + " of block " + text(thread.here.block) + " of " +
         symbol_name(launch_->function);
}

std::string Block::explain(const Failure& failure) const {
  const Thread& thread = *failure.thread;
  const std::string who = name(thread) + " ", what = doing(thread);
  switch (failure.kind) {
    case Failure::kBarriersDiffer:
    case Failure::kStuck:
      return who + what + ", but " + name(*failure.other) + " " + doing(*failure.other);
    case Failure::kOwnLane:
      return who + what + ", which does not have its own lane";
    case Failure::kNoLane:
      return who + what + text(", but its warp has no lane %d", failure.lane);
    case Failure::kOutsideMask:
      return who + text("reads lane %d, which is not in the mask: it ", failure.lane) + what;
    default:
      return who + text("touches %zu bytes at ", failure.bytes) +
             describe(reinterpret_cast<const void*>(failure.address));
  }
}

}  // namespace emulation
