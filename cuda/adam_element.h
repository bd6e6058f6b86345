// SPDX-License-Identifier: Apache-2.0
// One element's step on the device: the steps of src/parameter_update.cpp around the formulas of src/adam.h.
#pragma once

#include "adam.h"
#include "cuda/elements.h"

namespace zenflow {

// What all columns of an update share, and where columns have their own.
struct Rule {
  Fold fold;
  AdamStep move;
  const float* coefficient;
  const float *column_step, *column_root;

  __device__ __forceinline__ float scale() const {
    return coefficient != nullptr ? fold.scale * *coefficient : fold.scale;
  }
};

// A live weight that is not what its master rounds to becomes the master; the gradient, times rule.scale(), enters the
// moments; the weight in a column of position p moves. Returns the bits to write.
template <DType G, DType W>
__device__ __forceinline__ Bits<W> update_element(const Rule& rule, float scale, int64_t p, Bits<G> gradient,
                                                  Bits<W> live, float& master, float& exp_avg, float& exp_avg_sq) {
  const AdamStep& s = rule.move;
  const float step = rule.column_step != nullptr ? rule.column_step[p] : s.step;
  const float root = rule.column_root != nullptr ? rule.column_root[p] : s.root;
  if (live != from_float<W>(master)) master = to_float<W>(live);  // one NaN for another changes nothing
  fold_gradient(rule.fold, to_float<G>(gradient) * scale, exp_avg, exp_avg_sq);
  const float q = direction(root, s.eps, exp_avg, exp_avg_sq);
  if (s.moves) master = moved_weight(step, s.decay, q, master);
  return from_float<W>(master);
}

}  // namespace zenflow
