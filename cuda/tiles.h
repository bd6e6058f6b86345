// SPDX-License-Identifier: Apache-2.0
// How kernels that look columns up share a matrix out: a thread keeps to one column, whose place it reads once, and
// walks down kTileRows rows of it. Lanes are neighbours in a row, so their accesses coalesce; a thread's loads of
// several rows are under way at once. Blocks are up to 256 columns wide; where the matrix is narrower, threads share
// the rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/elements.h"
#include "cuda/launch.h"

namespace zenflow {

constexpr int kTileThreads = 256;
constexpr int kTileRows = 64;  // for each thread
constexpr int kRowsInFlight = 8;

// An element of each of a thread's rows. The address of one is a single multiply-add.
template <class T>
struct Walk {
  T* first;
  int stride;  // in bytes

  __device__ __forceinline__ T& operator[](int k) const {
    return *reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(first) + int64_t{k} * stride);
  }
};

// One thread's part of a column: `count` rows from `first`, `step` apart.
struct ColumnPart {
  int64_t column, first;
  int step, count;

  // The part's elements of an array of which `column` points into row 0, and whose rows are `length` elements long.
  template <class T>
  __device__ __forceinline__ Walk<T> walk(T* column, int64_t length) const {
    return {column + first * length, static_cast<int>(step * length * static_cast<int64_t>(sizeof(T)))};
  }
};

struct Tiles {
  int64_t rows, columns;
  int shift;  // a block is 1 << shift columns wide
  unsigned across, down;

  Tiles(int64_t rows, int64_t columns) : rows(rows), columns(columns), shift(5) {
    while (shift < 8 && (int64_t{1} << shift) < columns) ++shift;
    across = static_cast<unsigned>(((columns - 1) >> shift) + 1);
    down = static_cast<unsigned>((rows - 1) / block_rows() + 1);
  }

  Grid grid(const char* file = __builtin_FILE(), int line = __builtin_LINE()) const {
    return Grid(across * down, kTileThreads, file, line);
  }

  __host__ __device__ int row_step() const { return kTileThreads >> shift; }
  __host__ __device__ int64_t block_rows() const { return int64_t{kTileRows} * row_step(); }

  // The block's rows.
  __device__ int64_t first_row() const { return blockIdx.x / across * block_rows(); }
  __device__ int64_t end_row() const {
    const int64_t end = first_row() + block_rows();
    return end < rows ? end : rows;
  }

  // A thread beside the matrix gets a column beyond the last and no rows.
  __device__ ColumnPart mine() const {
    const int64_t column = (static_cast<int64_t>(blockIdx.x % across) << shift) + (threadIdx.x & ((1u << shift) - 1));
    const int step = row_step(), lane = static_cast<int>(threadIdx.x >> shift);
    const int block = static_cast<int>(end_row() - first_row());
    return {column, first_row() + lane, step, column < columns ? (block - lane + step - 1) >> (8 - shift) : 0};
  }
};

// load(k) for kRowsInFlight of the part's rows, from row k = done on; and store(k, what was loaded).
template <class Load>
__device__ __forceinline__ auto load_rows(const ColumnPart& part, int done, Load&& load) {
  Pack<std::decay_t<decltype(load(0))>, kRowsInFlight> rows;
#pragma unroll
  for (int u = 0; u < kRowsInFlight; ++u) {
    if (done + u < part.count) rows.item[u] = load(done + u);
  }
  return rows;
}

template <class T, class Store>
__device__ __forceinline__ void store_rows(const ColumnPart& part, int done, const Pack<T, kRowsInFlight>& rows,
                                           Store&& store) {
#pragma unroll
  for (int u = 0; u < kRowsInFlight; ++u) {
    if (done + u < part.count) store(done + u, rows.item[u]);
  }
}

// store(k, load(k)) for all rows of the part.
template <class Load, class Store>
__device__ __forceinline__ void move_rows(const ColumnPart& part, Load&& load, Store&& store) {
  for (int done = 0; done < part.count; done += kRowsInFlight) {
    store_rows(part, done, load_rows(part, done, load), store);
  }
}

}  // namespace zenflow
