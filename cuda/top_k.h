// SPDX-License-Identifier: Apache-2.0
// The columns with the largest norms, on the device and without a host round trip.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/stream.h"

namespace zenflow {

struct TopKTask {
  const float* norms;  // [columns], each >= 0 or not finite
  int64_t columns, k;  // 0 <= k <= columns
  int32_t* selected;   // [k]
};

// selected = the k columns first in the order (finite norm before non-finite, larger norm first, lower index first; all
// non-finite norms are equal), ascending. Arrays in device memory that do not overlap; queued on `stream` without
// waiting. k == 0: nothing is done. Throws if a launch fails.
void top_k(const std::vector<TopKTask>& tasks, Stream stream);

}  // namespace zenflow
