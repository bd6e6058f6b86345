// SPDX-License-Identifier: Apache-2.0
// Kernels::update and update_mean: a window's gradients into the moments, and the weights' move, in one pass over
// memory.
#pragma once

#include <cstring>

#include "vector_loops.h"

namespace zenflow::ZENFLOW_ISA {

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

// Memory is slow where it is read in many places at once: a tile of elements takes few lanes at a time, while what they
// are folded into stays in the first-level cache.
constexpr int64_t kTile = 512;
constexpr int kLanes = 4;
// Beyond so many lanes the processor loses track of them. They are then taken more at a time, since each has to be
// asked for a tile ahead.
constexpr int64_t kTrackedLanes = 8;
constexpr int kUntrackedLanes = 8;

// Calls take.operator()<lanes, whether to prefetch them>(first lane) until all are taken; once, with none, if there are
// none.
template <class Take>
ZENFLOW_INLINE void for_lane_groups(int64_t count, Take&& take) {
  int64_t lane = 0;
  if (count > kTrackedLanes) {
    for (; lane + kUntrackedLanes <= count; lane += kUntrackedLanes) {
      take.template operator()<kUntrackedLanes, true>(lane);
    }
  }
  for (; lane + kLanes <= count; lane += kLanes) take.template operator()<kLanes, false>(lane);
  for (; lane < count; ++lane) take.template operator()<1, false>(lane);
  if (count == 0) take.template operator()<0, false>(0);
}

// body(first, last) for the tiles of a run.
template <class Body>
ZENFLOW_INLINE void for_each_tile(int64_t begin, int64_t end, Body&& body) {
  for (int64_t first = begin; first < end; first += kTile) body(first, end - first < kTile ? end : first + kTile);
}

template <DType D>
ZENFLOW_INLINE const Bits<D>* elements_at(const void* x, int64_t i) {
  return static_cast<const Bits<D>*>(x) + i;
}

template <DType G, int kVectors>
ZENFLOW_INLINE void prefetch_next_tile(const void* gradients, int64_t i) {
  constexpr int64_t kBytes = kVectors * kWidth * item_size(G);
  if constexpr (kBytes >= kLine) {  // less shares its line with the block before
    const char* const next = reinterpret_cast<const char*>(elements_at<G>(gradients, i + kTile));
    for (int64_t line = 0; line < kBytes; line += kLine) __builtin_prefetch(next + line);
  }
}

// Elements [first, last) of some lanes into a tile of moments, which are taken from elsewhere.
template <DType G, DType From, int kCount, bool kAhead>
void fold_lanes(const Lane* lanes, int64_t first, int64_t last, const void* m_from, const void* v_from, float* m_tile,
                float* v_tile) {
  for_each_block(0, last - first, [&]<int kVectors>(int64_t i, int64_t count) {
    Floats m[kVectors], v[kVectors];
#pragma GCC unroll 4
    for (int k = 0; k < kVectors; ++k) {
      m[k] = load_some<From>(m_from, i + k * kWidth, count);
      v[k] = load_some<From>(v_from, i + k * kWidth, count);
    }
#pragma GCC unroll 8
    for (int l = 0; l < kCount; ++l) {
      const Fold fold = lanes[l].fold;
      const void* const gradients = lanes[l].gradients;
      if constexpr (kAhead) prefetch_next_tile<G, kVectors>(gradients, first + i);
#pragma GCC unroll 4
      for (int k = 0; k < kVectors; ++k) {
        const Floats g = load_some<G>(gradients, first + i + k * kWidth, count) * Floats(fold.scale);
        fold_gradient(fold, g, m[k], v[k]);
      }
    }
#pragma GCC unroll 4
    for (int k = 0; k < kVectors; ++k) {
      store_some<kF32>(m_tile, i + k * kWidth, count, m[k]);
      store_some<kF32>(v_tile, i + k * kWidth, count, v[k]);
    }
  });
}

template <DType G, DType W, DType M, bool kStreams>
ZENFLOW_INLINE void update_run(const Update& u, int64_t begin, int64_t end, int64_t first_column) {
  const bool moves = u.move != nullptr;
  const AdamStep step = moves ? *u.move : AdamStep{};  // a copy, which no store can change
  for_each_tile(begin, end, [&](int64_t first, int64_t last) {
    alignas(kLine) float widened[2][M == kF32 ? 1 : kTile];
    float* const m = M == kF32 ? static_cast<float*>(u.exp_avg) + first : widened[0];
    float* const v = M == kF32 ? static_cast<float*>(u.exp_avg_sq) + first : widened[1];
    for_lane_groups(u.lane_count, [&]<int kCount, bool kAhead>(int64_t lane) {
      const Lane* const lanes = u.lanes + lane;
      if (lane > 0) return fold_lanes<G, kF32, kCount, kAhead>(lanes, first, last, m, v, m, v);
      fold_lanes<G, M, kCount, kAhead>(lanes, first, last, elements_at<M>(u.exp_avg, first),
                                       elements_at<M>(u.exp_avg_sq, first), m, v);
    });
    if (M == kF32 && !moves) return;
    for_each_block(first, last, [&]<int kVectors>(int64_t i, int64_t count) {
#pragma GCC unroll 4
      for (int k = 0; k < kVectors; ++k) {
        const int64_t at = i + k * kWidth;
        const Floats exp_avg = load_some<kF32>(m, at - first, count);
        const Floats exp_avg_sq = load_some<kF32>(v, at - first, count);
        if constexpr (M != kF32) store_moments<M>(u, at, count, exp_avg, exp_avg_sq);
        if (!moves) continue;
        const Corrections corrections = corrections_of(step, u.columns, first_column + at - begin, count);
        move_weight<W, kStreams>(u, step, corrections, exp_avg, exp_avg_sq, at, count);
      }
    });
  });
}

// Elements [first, last) of some lanes onto a tile of sums, which are taken from elsewhere; from nowhere: zero.
template <DType G, int kCount, bool kAhead>
void add_lanes(const Lane* lanes, int64_t first, int64_t last, const float* from, float* tile) {
  for_each_block(0, last - first, [&]<int kVectors>(int64_t i, int64_t count) {
    Floats sum[kVectors];
#pragma GCC unroll 4
    for (int k = 0; k < kVectors; ++k) {
      sum[k] = from != nullptr ? load_some<kF32>(from, i + k * kWidth, count) : Floats(0.0f);
    }
#pragma GCC unroll 8
    for (int l = 0; l < kCount; ++l) {
      const float scale = lanes[l].fold.scale;
      const void* const gradients = lanes[l].gradients;
      if constexpr (kAhead) prefetch_next_tile<G, kVectors>(gradients, first + i);
#pragma GCC unroll 4
      for (int k = 0; k < kVectors; ++k) {
        sum[k] = sum[k] + load_some<G>(gradients, first + i + k * kWidth, count) * Floats(scale);
      }
    }
#pragma GCC unroll 4
    for (int k = 0; k < kVectors; ++k) store_some<kF32>(tile, i + k * kWidth, count, sum[k]);
  });
}

template <DType G, DType W, DType M, bool kStreams>
ZENFLOW_INLINE void update_mean_run(const Update& u, int64_t begin, int64_t end, int64_t first_column) {
  const bool moves = u.move != nullptr;
  const AdamStep step = moves ? *u.move : AdamStep{};
  const Fold mean_fold = moves ? *u.mean_fold : Fold{};
  for_each_tile(begin, end, [&](int64_t first, int64_t last) {
    alignas(kLine) float of_this_call[kTile];
    float* const carried = u.sum != nullptr ? u.sum + first : nullptr;
    float* const sum = carried != nullptr ? carried : of_this_call;
    for_lane_groups(u.lane_count, [&]<int kCount, bool kAhead>(int64_t lane) {
      add_lanes<G, kCount, kAhead>(u.lanes + lane, first, last, lane > 0 ? sum : carried, sum);
    });
    if (!moves) return;
    for_each_block(first, last, [&]<int kVectors>(int64_t i, int64_t count) {
#pragma GCC unroll 4
      for (int k = 0; k < kVectors; ++k) {
        const int64_t at = i + k * kWidth;
        const Floats mean = load_some<kF32>(sum, at - first, count) / Floats(u.mean_count);
        if (carried != nullptr) store_some<kF32>(carried, at - first, count, Floats(0.0f));
        Floats m = load_some<M>(u.exp_avg, at, count);
        Floats v = load_some<M>(u.exp_avg_sq, at, count);
        fold_gradient(mean_fold, mean, m, v);
        store_moments<M>(u, at, count, m, v);
        const Corrections corrections = corrections_of(step, u.columns, first_column + at - begin, count);
        move_weight<W, kStreams>(u, step, corrections, m, v, at, count);
      }
    });
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

}  // namespace zenflow::ZENFLOW_ISA
