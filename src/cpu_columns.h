// SPDX-License-Identifier: Apache-2.0
// Column statistics of gradients in host memory: squared norms, the global norm, and the choice of the largest columns.
//
// Sums run in the fixed order of docs/arithmetic.md, so results do not depend on threads, strides or instruction set.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "parameter.h"
#include "tensor_view.h"
#include "thread_pool.h"

namespace zenflow {

constexpr int64_t kNormRows = 128;  // rows that one partial sum covers

// norms[c] = squared norm of column c, fp32; resized to [columns].
void column_norms(const TensorView& gradient, const Kernels& kernels, ThreadPool& pool, std::vector<float>& norms);

// A gradient's squared norm: the sum of its columns' in double, in the order of docs/arithmetic.md.
double squared_norm(const std::vector<float>& norms);

// The same of the columns in `selected` alone, and of all others.
SideNorms side_norms(const std::vector<float>& norms, const std::vector<int32_t>& selected);

// The k columns of the largest norms, ascending. Non-finite norms rank below all finite ones, ties go to the lower
// index. 0 <= k <= norms.size().
std::vector<int32_t> top_k(const std::vector<float>& norms, int64_t k);

}  // namespace zenflow
