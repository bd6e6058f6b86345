// SPDX-License-Identifier: Apache-2.0
// The AdamW rule of docs/arithmetic.md: the one place where it stands, for scalar, SIMD and device code.
//
// F is `float` or a vector of floats with +, -, *, /, fma, sqrt and a constructor from float; each operation is IEEE
// fp32, so every F gives the same bits. Files that include this are compiled with contraction off. Coefficients are
// made in double, once per update.
#pragma once

#include <cmath>
#include <cstdint>

#include "host_device.h"

namespace zenflow {

#ifdef __CUDA_ARCH__
ZENFLOW_INLINE float fma(float a, float b, float c) {
  return __fmaf_rn(a, b, c);
}
ZENFLOW_INLINE float sqrt(float a) {
  return __fsqrt_rn(a);
}
#else
ZENFLOW_INLINE float fma(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}
ZENFLOW_INLINE float sqrt(float a) {
  return __builtin_sqrtf(a);
}
#endif

// What a gradient carries: the settings of its step, by value.
struct Hyper {
  double lr = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0;
};

// How one gradient enters the moments. `scale` is the clipping coefficient with the sign of the optimisation.
struct Fold {
  float scale, keep1, take1, keep2, take2;
};

// How the weight moves once the moments hold every gradient. `moves` is false when neither lr nor decay can change a
// weight.
struct AdamStep {
  float step, root, eps, decay, ahead;
  bool moves;
};

inline Fold make_fold(const Hyper& h, double scale) {
  return {static_cast<float>(scale), static_cast<float>(h.beta1), static_cast<float>(1.0 - h.beta1),
          static_cast<float>(h.beta2), static_cast<float>(1.0 - h.beta2)};
}

// lr_sum and keep are the window's sum of learning rates and product of (1 - lr * weight_decay); h is the last
// gradient's; t counts the updates of the moments; lookahead is in steps.
inline AdamStep make_adam_step(const Hyper& h, double lr_sum, double keep, int64_t t, double lookahead) {
  const double correction1 = 1.0 - std::pow(h.beta1, static_cast<double>(t));
  const double correction2 = 1.0 - std::pow(h.beta2, static_cast<double>(t));
  AdamStep s{static_cast<float>(lr_sum / correction1),
             static_cast<float>(1.0 / std::sqrt(correction2)),
             static_cast<float>(h.eps),
             static_cast<float>(1.0 - keep),
             static_cast<float>(lookahead * h.lr / correction1),
             false};
  s.moves = s.step != 0.0f || s.decay != 0.0f;
  return s;
}

template <class F>
ZENFLOW_INLINE void fold_gradient(const Fold& c, F g, F& m, F& v) {
  const F d = g - m;
  m = c.take1 < 0.5f ? fma(F(c.take1), d, m) : fma(F(-c.keep1), d, g);
  v = fma(F(c.keep2), v, (F(c.take2) * g) * g);
}

template <class F>
ZENFLOW_INLINE F direction(F root, F eps, F m, F v) {
  return m / fma(root, sqrt(v), eps);
}

template <class F>
ZENFLOW_INLINE F moved_weight(F step, float decay, F q, F w) {
  return w - fma(step, q, decay == 0.0f ? F(0.0f) : F(decay) * w);
}

template <class F>
ZENFLOW_INLINE F weight_ahead(F ahead, F q, F w) {
  return fma(F(0.0f) - ahead, q, w);
}

}  // namespace zenflow
