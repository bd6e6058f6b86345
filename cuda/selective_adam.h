// SPDX-License-Identifier: Apache-2.0
// AdamW on the device (src/adam.h), with the bits of the host path: for the selected columns of a split parameter, in
// the one pass over its gradient that also packs the deferred columns; and for whole parameters.
//
// Everything is contiguous, in device memory and not overlapping; work is queued on `stream` without waiting; what has
// no elements is skipped. Where a weight's bits are not those that its master rounds to (any NaN equals any NaN),
// somebody edited it: the live value becomes the master before the update. What the device updates is never shown
// ahead: move.ahead is not read. Throws if a launch fails.
#pragma once

#include <cstdint>
#include <vector>

#include "adam.h"
#include "cuda/stream.h"
#include "dtype.h"

namespace zenflow {

// Some rows of one split parameter.
struct SelectivePass {
  const void* gradient;  // [rows, columns]
  DType gradient_dtype;
  int64_t rows, columns;
  const int32_t* place;  // [columns], see slot_map.h
  void* packed;          // [rows, slots]: the deferred columns; may be null if slots == 0
  DType packed_dtype;    // the gradient's, or fp32
  int64_t slots;
  void* weight;  // [rows, columns]
  DType weight_dtype;
  float *master, *exp_avg, *exp_avg_sq;  // [rows, width]: the selected columns
  int64_t width;
  Fold fold;
  AdamStep move;
  const float* coefficient;  // a device scalar multiplied into fold.scale; null: 1
  const float *column_step,
      *column_root;  // [width]: replace move.step and move.root column by column; null: move's own
  void* kept;  // if set: the selected columns of the gradient are copied here, [rows, width] in the gradient's dtype,
               // and nothing is updated: weight, state, fold and move are not used
};
void selective_adam(const SelectivePass& pass, Stream stream);

// The inverse of a pass with `kept`: writes gradient [rows, columns] from packed and kept, bit for bit (a NaN that was
// packed in another dtype is a NaN again). pass.gradient is not used.
void unpack(const SelectivePass& pass, void* gradient, Stream stream);

// A whole parameter, or the kept gradient of a split one's selected columns.
struct AdamTask {
  const void* gradient;  // [rows, width]
  DType gradient_dtype;
  void* weight;  // [rows, columns]
  DType weight_dtype;
  int64_t rows, width, columns;
  const int32_t* device_columns;         // [width]: the column of each position; null: width == columns
  float *master, *exp_avg, *exp_avg_sq;  // [rows, width]
  Fold fold;
  AdamStep move;
  const float *column_step, *column_root;  // as above
};
// `coefficient` is a device scalar multiplied into every task's fold.scale; null: 1.
void adam(const std::vector<AdamTask>& tasks, const float* coefficient, Stream stream);

}  // namespace zenflow
