// SPDX-License-Identifier: Apache-2.0
// The operations of a warp: its lanes meet, and the last one to come gives each its result.
#include <algorithm>

#include "block_state.h"
#include "sanitizers.h"

namespace emulation {
namespace {

bool has(unsigned mask, int lane) {
  return (mask >> (lane % kWarpSize) & 1) != 0;
}

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

uint64_t mask_of_lanes(const Thread& self, const Thread* lanes) {
  uint64_t result = 0;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if (!has(self.mask, lane)) continue;
    const bool set = self.operation == Warp::kMatch ? lanes[lane].value == self.value : lanes[lane].value != 0;
    result |= uint64_t{set} << lane;
  }
  return result;
}

uint64_t reduction(const Thread& self, const Thread* lanes) {
  const int lowest = __builtin_ctz(self.mask);
  uint64_t result = lanes[lowest].value;
  for (int lane = lowest + 1; lane < kWarpSize; ++lane) {
    if (has(self.mask, lane)) result = combine(self.operation, result, lanes[lane].value);
  }
  return result;
}

uint64_t result_of(const Thread& self, const Thread* lanes) {
  switch (self.operation) {
    case Warp::kSync:
      return 0;
    case Warp::kShuffle:
      return lanes[self.source % kWarpSize].value;
    case Warp::kBallot:
    case Warp::kMatch:
      return mask_of_lanes(self, lanes);
    default:
      return reduction(self, lanes);
  }
}

}  // namespace

uint64_t Block::meet_warp(Warp operation, unsigned mask, uint64_t value, int source, Site site) {
  Thread& self = *self_;
  self.state = State::kInWarp;
  self.operation = operation;
  self.mask = mask;
  self.value = value;
  self.source = source;
  self.site = site;
  if (!has(mask, lane_of(self))) stop({Failure::kOwnLane, &self});
  Thread* const lanes = warp_of(self);
  // Lanes meet at an address of the mask's lowest lane, so that disjoint masks do not order each other.
  Thread& meeting = lanes[__builtin_ctz(mask)];
  const char* const order = &meeting.orders[meeting.turn];
  if (operation == Warp::kSync) release(order);
  if (has_met(lanes, self)) complete_warp(lanes, mask);
  suspend();
  if (operation == Warp::kSync) acquire(order);
  return self.result;
}

// Whether all lanes of the mask have come to the same operation.
bool Block::has_met(const Thread* lanes, const Thread& self) const {
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if (!has(self.mask, lane)) continue;
    const Thread& other = lanes[lane];
    if (!exists(other) || other.state != State::kInWarp || other.mask != self.mask ||
        other.operation != self.operation || other.site != self.site) {
      return false;
    }
  }
  return true;
}

void Block::complete_warp(Thread* lanes, unsigned mask) {
  Thread& meeting = lanes[__builtin_ctz(mask)];
  meeting.turn ^= 1;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if (!has(mask, lane)) continue;
    Thread& thread = lanes[lane];
    if (thread.operation == Warp::kShuffle && !has(mask, thread.source)) {
      failure_ = {Failure::kOutsideMask, &thread, nullptr, thread.source};
      return;
    }
    thread.result = result_of(thread, lanes);
  }
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if (has(mask, lane)) make_ready(lanes[lane]);
  }
}

}  // namespace emulation
