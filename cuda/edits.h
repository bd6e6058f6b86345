// SPDX-License-Identifier: Apache-2.0
// Edits of deferred columns' weights by the user: found by a checksum per column of the bits last written, then adopted
// by value. Work is queued on `stream` without waiting; what has no elements is skipped. Throws if a launch fails.
#pragma once

#include <cstdint>

#include "cuda/stream.h"
#include "dtype.h"

namespace zenflow {

// checksums[s] = sum over rows r of bits(r) * key(r) mod 2^64, for the deferred column in slot s. The keys are odd and
// pseudo-random, so one changed element is always seen; any NaN counts as one pattern. Integer sums do not depend on
// their order. `checksums` is overwritten, [slots]; weight [rows, columns] and place [columns] as in scatter.h.
void column_checksums(const void* weight, DType dtype, int64_t rows, int64_t columns, const int32_t* place,
                      int64_t slots, uint64_t* checksums, Stream stream);

struct EditSearch {
  const void* weight;  // [rows, columns]
  DType dtype;
  int64_t rows, columns;
  const int32_t* slot_columns;  // [slots]
  const int32_t* place;         // [columns]
  int64_t slots;
  uint64_t *expected, *found;    // [slots]; found is scratch; expected becomes the live weight's checksums
  void *last_written, *pending;  // [rows, slots] in the weight's dtype, page-locked host memory by its device address
  float* master;                 // [rows, slots], the same
};

// In columns whose checksum is not the expected one: where the live element's bits are not those last written (any NaN
// equals any NaN), the live value goes to last_written, pending and, widened, to master. Other columns cause no access
// to host memory.
void adopt_edits(const EditSearch& search, Stream stream);

}  // namespace zenflow
