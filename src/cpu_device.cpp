// SPDX-License-Identifier: Apache-2.0
#include "cpu_device.h"

#include <algorithm>

#include "cpu_columns.h"
#include "rows.h"

namespace zenflow {

void CpuDevice::on_host(Parameter&, const TensorView& weight, FunctionRef<void(const TensorView&)> work) {
  work(weight);
}

void CpuDevice::measure(std::span<const Operand* const> operands) {
  measured_ = operands.size();
  norms_.resize(std::max(norms_.size(), measured_));
  for (size_t i = 0; i < measured_; ++i) {
    column_norms(operands[i]->gradient, context_.kernels, context_.pool, norms_[i]);
  }
}

std::vector<double> CpuDevice::squared_norms() {
  std::vector<double> squared;
  for (size_t i = 0; i < measured_; ++i) squared.push_back(squared_norm(norms_[i]));
  return squared;
}

std::vector<std::vector<int32_t>> CpuDevice::top_k(std::span<const size_t> which, std::span<const int64_t> widths) {
  std::vector<std::vector<int32_t>> selections;
  for (size_t i = 0; i < which.size(); ++i) selections.push_back(zenflow::top_k(norms_[which[i]], widths[i]));
  return selections;
}

void CpuDevice::sum_sides(std::span<const Operand* const> operands) {
  sides_.clear();
  size_t measured = 0;
  for (const Operand* o : operands) {
    const std::vector<float>* norms = o->staged ? nullptr : &norms_[measured++];
    Parameter& p = *o->parameter;
    if (!p.has_both_sides()) continue;
    sides_.emplace_back(&p, norms != nullptr ? side_norms(*norms, p.block_columns()) : p.staged().sides);
  }
}

std::vector<std::pair<Parameter*, SideNorms>> CpuDevice::late_sides() {
  return sides_;
}

void CpuDevice::sum_staged_sides(Parameter& p) {
  p.staged_sides(side_norms(norms_[0], p.staged_places().block_columns));
}

void CpuDevice::apply(std::span<const ReceivedGradient> gradients) {
  for (const auto& [o, step] : gradients) {
    o->staged ? o->parameter->apply_staged(o->weight, step) : o->parameter->apply(o->weight, o->gradient, step);
  }
}

void CpuDevice::swap_columns(Parameter& p, const TensorView& weight, const ColumnSwap& swap) {
  const int64_t bytes = swap.count() * item_size(p.dtype());
  for_rows(context_.pool, p.shape(), [&](int64_t r) {
    Scratch left(bytes), joined(bytes);
    weight.gather(r, swap.leaving.data(), swap.count(), left.data());
    p.swap_row(swap, p.block(), false, r, left.data(), joined.data());
    weight.scatter(r, swap.joining.data(), swap.count(), joined.data());
  });
}

void CpuDevice::adopt_deferred_edits(std::span<const Operand* const> operands) {
  for (const Operand* o : operands) o->parameter->adopt_deferred_edits(o->weight);
}

void CpuDevice::publish(std::span<const Operand* const> operands) {
  for (const Operand* o : operands) o->parameter->publish(o->weight);
}

}  // namespace zenflow
