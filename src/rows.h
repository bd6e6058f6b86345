// SPDX-License-Identifier: Apache-2.0
// Small helpers for loops over the rows of a matrix.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "dtype.h"
#include "kernels.h"
#include "scratch.h"
#include "tensor_view.h"
#include "thread_pool.h"

namespace zenflow {

constexpr int64_t kElementsPerTask = 16384;  // less work than this is not worth waking a thread
constexpr int64_t kRun = 4096;               // elements whose working set stays in the first-level cache

// body(r) for every row, rows spread over the pool.
template <class Body>
void for_rows(ThreadPool& pool, const Matrix& shape, Body&& body) {
  if (shape.count() == 0) return;
  const int64_t grain = std::max<int64_t>(1, kElementsPerTask / shape.columns);
  pool.parallel_for(shape.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) body(r);
  });
}

// Working memory on every thread of the pool for up to five runs of `bytes`, so that no later loop over rows runs out
// of it half-way.
inline void reserve_scratch(ThreadPool& pool, int64_t bytes) {
  pool.parallel_for(pool.threads(), 1,
                    [&](int64_t, int64_t) { Scratch a(bytes), b(bytes), c(bytes), d(bytes), e(bytes); });
}

// Calls f with the unsigned integer of the dtype's size: `with_bits(d, [&]<class Bits>() { ... })`.
template <class Function>
void with_bits(DType dtype, Function&& f) {
  item_size(dtype) == 4 ? f.template operator()<uint32_t>() : f.template operator()<uint16_t>();
}

// Row r of a [rows, width] array to and from its columns' places in a full row.
template <class T>
void scatter_row(const T* array, int64_t width, int64_t r, const std::vector<int32_t>& columns, T* full) {
  for (int64_t i = 0; i < width; ++i) full[columns[static_cast<size_t>(i)]] = array[r * width + i];
}

template <class T>
void gather_row(const T* full, const std::vector<int32_t>& columns, int64_t r, T* array, int64_t width) {
  for (int64_t i = 0; i < width; ++i) array[r * width + i] = full[columns[static_cast<size_t>(i)]];
}

// The same for one row whose type is known at run time only.
inline void gather_run(DType dtype, const void* row, const std::vector<int32_t>& columns, void* run) {
  with_bits(dtype, [&]<class Bits>() {
    gather_row(static_cast<const Bits*>(row), columns, 0, static_cast<Bits*>(run),
               static_cast<int64_t>(columns.size()));
  });
}

// Calls edited(i) for each element whose bits differ; any NaN equals any NaN. Equal runs cost one memcmp.
template <class Edited>
void for_differences(DType dtype, const void* a, const void* b, int64_t count, Edited&& edited) {
  if (std::memcmp(a, b, static_cast<size_t>(count * item_size(dtype))) == 0) return;
  with_bits(dtype, [&]<class Bits>() {
    const Bits* x = static_cast<const Bits*>(a);
    const Bits* y = static_cast<const Bits*>(b);
    for (int64_t i = 0; i < count; ++i) {
      if (x[i] != y[i] && !(is_nan_bits(dtype, x[i]) && is_nan_bits(dtype, y[i]))) edited(i);
    }
  });
}

inline float widen_element(DType dtype, const void* array, int64_t i) {
  return with_dtype(dtype, [&]<DType D>() { return widen<D>(static_cast<const typename BitsOf<D>::type*>(array)[i]); });
}

// Where a selected weight is not what its master rounds to, somebody edited it: the live value becomes the master.
inline void adopt_run(const Kernels& kernels, DType dtype, const void* live, int64_t count, float* master) {
  Scratch expected(std::min(count, kRun) * item_size(dtype));
  for (int64_t first = 0; first < count; first += kRun) {
    const int64_t run = std::min(kRun, count - first);
    const char* found = static_cast<const char*>(live) + first * item_size(dtype);
    kernels.round_to(master + first, dtype, run, expected.data());
    for_differences(dtype, found, expected.data(), run,
                    [&](int64_t i) { master[first + i] = widen_element(dtype, found, i); });
  }
}

}  // namespace zenflow
