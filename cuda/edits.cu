// SPDX-License-Identifier: Apache-2.0
#include "cuda/edits.h"

#include <algorithm>

#include "cuda/check.h"
#include "cuda/checksum.h"

namespace zenflow {
namespace {

constexpr unsigned kMaxDown = 32;

// Bound by reading the weight; a thread adds up its rows, so atomics are few.
template <DType D>
__global__ void __launch_bounds__(kTileThreads)
    sum_columns(const Tiles tiles, const Bits<D>* weight, const int32_t* place, uint64_t* checksums) {
  __shared__ RowKeys keys;
  keys.fill(tiles, 0);
  const ColumnPart part = tiles.mine();
  const int64_t slot = part.column < tiles.columns ? place[part.column] : -1;
  if (slot < 0) return;
  const auto elements = part.walk(weight + part.column, tiles.columns);
  const uint64_t* key = keys.key + (part.first - tiles.first_row());
  uint64_t sum = 0;
  move_rows(
      part, [&](int k) { return elements[k]; },
      [&](int k, Bits<D> bits) { sum += key[k * part.step] * checked_bits<D>(bits); });
  add_to(checksums + slot, sum);
}

// Blocks end at once unless a column's checksum differs; so there are few of them, each with many rows. Where one does:
// bound by the link to host memory, lanes side by side.
template <DType D>
__global__ void __launch_bounds__(kTileThreads) adopt_columns(const EditSearch search) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kTileThreads + threadIdx.x;
  const int64_t slot = column < search.columns ? search.place[column] : -1;
  if (slot < 0 || search.found[slot] == search.expected[slot]) return;
  for (int64_t r = blockIdx.y; r < search.rows; r += gridDim.y) {
    const int64_t i = r * search.slots + slot;
    const Bits<D> live = static_cast<const Bits<D>*>(search.weight)[r * search.columns + column];
    Bits<D>& written = static_cast<Bits<D>*>(search.last_written)[i];
    if (same_bits<D>(live, written)) continue;
    written = live;
    static_cast<Bits<D>*>(search.pending)[i] = live;
    search.master[i] = to_float<D>(live);
  }
}

}  // namespace

void column_checksums(const void* weight, DType dtype, int64_t rows, int64_t columns, const int32_t* place,
                      int64_t slots, uint64_t* checksums, Stream stream) {
  if (slots == 0) return;
  const auto bytes = static_cast<size_t>(slots) * sizeof(uint64_t);
  ZENFLOW_CUDA_CHECK(cudaMemsetAsync(checksums, 0, bytes, stream.handle()));
  if (rows == 0) return;
  const Tiles tiles(rows, columns);
  with_dtype_constant(dtype, [&](auto D) {
    launch(sum_columns<D()>, tiles.grid(), stream, tiles, static_cast<const Bits<D()>*>(weight), place, checksums);
  });
}

void adopt_edits(const EditSearch& search, Stream stream) {
  if (search.slots == 0 || search.rows == 0) return;
  column_checksums(search.weight, search.dtype, search.rows, search.columns, search.place, search.slots, search.found,
                   stream);
  const auto across = static_cast<unsigned>((search.columns - 1) / kTileThreads + 1);
  const auto down = static_cast<unsigned>(std::min<int64_t>(kMaxDown, (search.rows - 1) / kTileRows + 1));
  with_dtype_constant(search.dtype, [&](auto D) {
    launch(adopt_columns<D()>, Grid(dim3(across, down), kTileThreads), stream, search);
  });
  const auto bytes = static_cast<size_t>(search.slots) * sizeof(uint64_t);
  ZENFLOW_CUDA_CHECK(cudaMemcpyAsync(search.expected, search.found, bytes, cudaMemcpyDeviceToDevice, stream.handle()));
}

}  // namespace zenflow
