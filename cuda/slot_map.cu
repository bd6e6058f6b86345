// SPDX-License-Identifier: Apache-2.0
#include "cuda/slot_map.h"

#include "cuda/launch.h"

namespace zenflow {
namespace {

constexpr int kThreads = 256;

// One thread a column. Bound by the launch: a few thousand integers.
__global__ void fill_place(const int32_t* slot_columns, int64_t slots, const int32_t* device_columns, int64_t width,
                           int32_t* place) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < slots) {
    place[slot_columns[i]] = static_cast<int32_t>(i);
  } else if (i < slots + width) {
    place[device_columns[i - slots]] = static_cast<int32_t>(-1 - (i - slots));
  }
}

}  // namespace

void build_place(const int32_t* slot_columns, int64_t slots, const int32_t* device_columns, int64_t width,
                 int32_t* place, Stream stream) {
  const int64_t columns = slots + width;
  if (columns == 0) return;
  launch(fill_place, Grid(static_cast<unsigned>((columns + kThreads - 1) / kThreads), kThreads), stream, slot_columns,
         slots, device_columns, width, place);
}

}  // namespace zenflow
