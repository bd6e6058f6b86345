// SPDX-License-Identifier: Apache-2.0
// Where each column's state lives, as kernels look it up.
#pragma once

#include <cstdint>

#include "cuda/stream.h"

namespace zenflow {

// place[c] = s for the deferred column c = slot_columns[s]; -1 - p for the selected column c = device_columns[p].
// slot_columns is [slots], device_columns [width]; together they name every column once, so place is [slots + width].
// All in device memory, not overlapping; queued on `stream` without waiting. Throws if the launch fails.
void build_place(const int32_t* slot_columns, int64_t slots, const int32_t* device_columns, int64_t width,
                 int32_t* place, Stream stream);

}  // namespace zenflow
