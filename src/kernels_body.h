// SPDX-License-Identifier: Apache-2.0
// The loops of kernels.h over the vector type of one instruction set. Included once by each kernels_<isa>.cpp, which
// defines ZENFLOW_ISA and includes simd_<isa>.h first; everything here lives in that namespace, so no code of one
// instruction set can stand in for another's.
#pragma once

#include <cstring>

#include "kernels.h"

namespace zenflow::ZENFLOW_ISA {

constexpr int64_t kLine = 64;  // bytes of a cache line

template <DType D>
using Bits = typename BitsOf<D>::type;

// The last elements of a run go through buffers of one full vector, so that the loop's body stands once.
template <DType D>
ZENFLOW_INLINE Floats load_some(const void* x, int64_t i, int64_t count) {
  if (count == kWidth) return load<D>(x, i);
  Bits<D> buffer[kWidth] = {};
  for (int64_t j = 0; j < count; ++j) buffer[j] = static_cast<const Bits<D>*>(x)[i + j];
  return load<D>(buffer, 0);
}

template <DType D>
ZENFLOW_INLINE void store_some(void* x, int64_t i, int64_t count, Floats value) {
  if (count == kWidth) return store<D>(x, i, value);
  Bits<D> buffer[kWidth];
  store<D>(buffer, 0, value);
  for (int64_t j = 0; j < count; ++j) static_cast<Bits<D>*>(x)[i + j] = buffer[j];
}

// Calls body(first element, how many) for whole vectors, then for the rest.
template <class Body>
ZENFLOW_INLINE void for_each_vector(int64_t begin, int64_t end, Body&& body) {
  int64_t i = begin;
  for (; i + kWidth <= end; i += kWidth) body(i, kWidth);
  if (i < end) body(i, end - i);
}

constexpr DType kF32 = DType::kFloat32;

// The three corrections of a vector of elements: the parameter's, or their columns' own.
struct Corrections {
  Floats step, root, ahead;
};

ZENFLOW_INLINE Corrections corrections_of(const AdamStep& s, const ColumnSteps* columns, int64_t column,
                                          int64_t count) {
  if (columns == nullptr) return {Floats(s.step), Floats(s.root), Floats(s.ahead)};
  return {load_some<kF32>(columns->step, column, count), load_some<kF32>(columns->root, column, count),
          load_some<kF32>(columns->ahead, column, count)};
}

template <DType W, bool kStreams>
ZENFLOW_INLINE void move_weight(const Update& u, const AdamStep& s, const Corrections& c, Floats m, Floats v, int64_t i,
                                int64_t count) {
  Floats w = load_some<kF32>(u.master, i, count);
  const Floats q = direction(c.root, Floats(s.eps), m, v);
  if (s.moves) {
    w = moved_weight(c.step, s.decay, q, w);
    store_some<kF32>(u.master, i, count, w);
  }
  const Floats shown = s.ahead == 0.0f ? w : weight_ahead(c.ahead, q, w);
  if (kStreams && count == kWidth) return stream_store<W>(u.written, i, shown);
  store_some<W>(u.written, i, count, shown);
}

// A hash of 32 bits (lowbias32) for each element: 16 round exp_avg, 16 exp_avg_sq.
template <DType M>
ZENFLOW_INLINE void store_moments(const Update& u, int64_t i, int64_t count, Floats m, Floats v) {
  if constexpr (M == kF32) {
    store_some<kF32>(u.exp_avg, i, count, m);
    store_some<kF32>(u.exp_avg_sq, i, count, v);
  } else {
    uint16_t buffer[2][kWidth];
    uint16_t* const to[] = {static_cast<uint16_t*>(u.exp_avg) + i, static_cast<uint16_t*>(u.exp_avg_sq) + i};
    const Integers noise = hashed(u.noise + static_cast<uint32_t>(i));
    store_either_way(count == kWidth ? to[0] : buffer[0], m, low_half(noise));
    store_either_way(count == kWidth ? to[1] : buffer[1], v, high_half(noise));
    if (count == kWidth) return;
    for (int half = 0; half < 2; ++half) std::memcpy(to[half], buffer[half], static_cast<size_t>(count) * 2);
  }
}

// Calls body.operator()<vectors>(first element, elements of each vector) for blocks of several vectors, so that what a
// lane needs is fetched once for all of them; then for single ones, the last of which may be shorter.
template <class Body>
ZENFLOW_INLINE void for_each_block(int64_t begin, int64_t end, Body&& body) {
  int64_t i = begin;
  for (; i + kBlock * kWidth <= end; i += kBlock * kWidth) body.template operator()<kBlock>(i, kWidth);
  for_each_vector(i, end, [&](int64_t at, int64_t count) { body.template operator()<1>(at, count); });
}

template <DType G, DType W, DType M, bool kStreams>
ZENFLOW_INLINE void update_run(const Update& u, int64_t begin, int64_t end, int64_t first_column) {
  const bool moves = u.move != nullptr;
  const AdamStep step = moves ? *u.move : AdamStep{};  // a copy, which no store can change
  for_each_block(begin, end, [&]<int kVectors>(int64_t i, int64_t count) {
    Floats m[kVectors], v[kVectors];
#pragma GCC unroll 4
    for (int k = 0; k < kVectors; ++k) {
      m[k] = load_some<M>(u.exp_avg, i + k * kWidth, count);
      v[k] = load_some<M>(u.exp_avg_sq, i + k * kWidth, count);
    }
    for (int64_t lane = 0; lane < u.lane_count; ++lane) {
      const Fold fold = u.lanes[lane].fold;
      const void* const gradients = u.lanes[lane].gradients;
#pragma GCC unroll 4
      for (int k = 0; k < kVectors; ++k) {
        const Floats g = load_some<G>(gradients, i + k * kWidth, count) * Floats(fold.scale);
        fold_gradient(fold, g, m[k], v[k]);
      }
    }
#pragma GCC unroll 4
    for (int k = 0; k < kVectors; ++k) {
      const int64_t at = i + k * kWidth;
      store_moments<M>(u, at, count, m[k], v[k]);
      if (!moves) continue;
      const Corrections corrections = corrections_of(step, u.columns, first_column + at - begin, count);
      move_weight<W, kStreams>(u, step, corrections, m[k], v[k], at, count);
    }
  });
}

template <DType G, DType W, DType M, bool kStreams>
ZENFLOW_INLINE void update_mean_run(const Update& u, int64_t begin, int64_t end, int64_t first_column) {
  const bool moves = u.move != nullptr;
  const AdamStep step = moves ? *u.move : AdamStep{};
  const Fold mean_fold = moves ? *u.mean_fold : Fold{};
  for_each_block(begin, end, [&]<int kVectors>(int64_t i, int64_t count) {
    Floats sum[kVectors];
#pragma GCC unroll 4
    for (int k = 0; k < kVectors; ++k) {
      sum[k] = u.sum != nullptr ? load_some<kF32>(u.sum, i + k * kWidth, count) : Floats(0.0f);
    }
    for (int64_t lane = 0; lane < u.lane_count; ++lane) {
      const float scale = u.lanes[lane].fold.scale;
      const void* const gradients = u.lanes[lane].gradients;
#pragma GCC unroll 4
      for (int k = 0; k < kVectors; ++k) {
        sum[k] = sum[k] + load_some<G>(gradients, i + k * kWidth, count) * Floats(scale);
      }
    }
#pragma GCC unroll 4
    for (int k = 0; k < kVectors; ++k) {
      const int64_t at = i + k * kWidth;
      if (u.sum != nullptr) store_some<kF32>(u.sum, at, count, moves ? Floats(0.0f) : sum[k]);
      if (!moves) continue;
      Floats m = load_some<M>(u.exp_avg, at, count);
      Floats v = load_some<M>(u.exp_avg_sq, at, count);
      fold_gradient(mean_fold, sum[k] / Floats(u.mean_count), m, v);
      store_moments<M>(u, at, count, m, v);
      const Corrections corrections = corrections_of(step, u.columns, first_column + at - begin, count);
      move_weight<W, kStreams>(u, step, corrections, m, v, at, count);
    }
  });
}

// A run in one piece, or a row at a time where columns have their own corrections.
template <class Run>
ZENFLOW_INLINE void by_rows(const Update& u, int64_t begin, int64_t end, Run&& run) {
  if (u.columns == nullptr) return run(begin, end, 0);
  while (begin < end) {
    const int64_t column = begin % u.row_length;
    const int64_t rest = u.row_length - column;
    const int64_t stop = end - begin < rest ? end : begin + rest;
    run(begin, stop, column);
    begin = stop;
  }
}

template <DType W>
ZENFLOW_INLINE bool streams(const Update& u, int64_t begin) {
  const char* const first = static_cast<const char*>(u.written) + begin * item_size(W);
  return u.streams && u.move != nullptr && reinterpret_cast<uintptr_t>(first) % (kWidth * item_size(W)) == 0;
}

template <DType G, DType W, DType M>
void update(const Update& u, int64_t begin, int64_t end) {
  by_rows(u, begin, end, [&](int64_t a, int64_t b, int64_t column) {
    streams<W>(u, a) ? update_run<G, W, M, true>(u, a, b, column) : update_run<G, W, M, false>(u, a, b, column);
  });
}

template <DType G, DType W, DType M>
void update_mean(const Update& u, int64_t begin, int64_t end) {
  by_rows(u, begin, end, [&](int64_t a, int64_t b, int64_t column) {
    streams<W>(u, a) ? update_mean_run<G, W, M, true>(u, a, b, column)
                     : update_mean_run<G, W, M, false>(u, a, b, column);
  });
}

template <class T>
void gather_one_by_one(const SlotMap& map, const void* row, void* packed) {
  for (int64_t s = 0; s < map.slots; ++s) static_cast<T*>(packed)[s] = static_cast<const T*>(row)[map.columns[s]];
}

template <class T>
void scatter_one_by_one(const SlotMap& map, const void* packed, void* row) {
  for (int64_t s = 0; s < map.slots; ++s) static_cast<T*>(row)[map.columns[s]] = static_cast<const T*>(packed)[s];
}

inline void gather(const SlotMap& map, const void* row, int64_t item, void* packed) {
  item == 4 ? gather_one_by_one<uint32_t>(map, row, packed) : gather_one_by_one<uint16_t>(map, row, packed);
}

inline void scatter(const SlotMap& map, const void* packed, int64_t item, void* row) {
  item == 4 ? scatter_one_by_one<uint32_t>(map, packed, row) : scatter_one_by_one<uint16_t>(map, packed, row);
}

inline void stream(void* to, const void* from, int64_t bytes) {
  char* const out = static_cast<char*>(to);
  const char* const in = static_cast<const char*>(from);
  const int64_t before = (kLine - static_cast<int64_t>(reinterpret_cast<uintptr_t>(out) % kLine)) % kLine;
  int64_t i = before < bytes ? before : bytes;
  std::memcpy(out, in, static_cast<size_t>(i));
  for (; i + kLine <= bytes; i += kLine) stream_line(out + i, in + i);
  std::memcpy(out + i, in + i, static_cast<size_t>(bytes - i));
}

template <DType D>
void add_squares(const void* x, int64_t count, float* sums) {
  for_each_vector(0, count, [&](int64_t i, int64_t n) {
    const Floats value = load_some<D>(x, i, n);
    store_some<kF32>(sums, i, n, fma(value, value, load_some<kF32>(sums, i, n)));
  });
}

// Calls f<G, W, M>() for the dtypes of an update's lanes, output and moments.
template <class Function>
void with_dtypes(const Update& u, DType lanes, DType written, Function&& f) {
  with_dtype(lanes, [&]<DType G>() {
    with_dtype(written, [&]<DType W>() {
      u.moments == kF32 ? f.template operator()<G, W, kF32>() : f.template operator()<G, W, DType::kBFloat16>();
    });
  });
}

inline Kernels make_kernels(const char* name) {
  return {name,
          [](const Update& u, DType lanes, DType written, int64_t begin, int64_t end) {
            with_dtypes(u, lanes, written, [&]<DType G, DType W, DType M>() { update<G, W, M>(u, begin, end); });
          },
          [](const Update& u, DType lanes, DType written, int64_t begin, int64_t end) {
            with_dtypes(u, lanes, written, [&]<DType G, DType W, DType M>() { update_mean<G, W, M>(u, begin, end); });
          },
          [](const void* x, DType dtype, int64_t count, float* sums) {
            with_dtype(dtype, [&]<DType D>() { add_squares<D>(x, count, sums); });
          },
          [](const float* x, DType dtype, int64_t count, void* rounded) {
            with_dtype(dtype, [&]<DType D>() {
              for_each_vector(0, count,
                              [&](int64_t i, int64_t n) { store_some<D>(rounded, i, n, load_some<kF32>(x, i, n)); });
            });
          },
          [](const void* x, DType dtype, int64_t count, float* widened) {
            with_dtype(dtype, [&]<DType D>() {
              for_each_vector(0, count,
                              [&](int64_t i, int64_t n) { store_some<kF32>(widened, i, n, load_some<D>(x, i, n)); });
            });
          },
          gather,
          scatter,
          stream};
}

}  // namespace zenflow::ZENFLOW_ISA
