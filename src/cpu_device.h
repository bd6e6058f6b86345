// SPDX-License-Identifier: Apache-2.0
// The host's own memory as a device: parameters on the CPU.
#pragma once

#include <utility>
#include <vector>

#include "device.h"

namespace zenflow {

class CpuDevice : public Device {
 public:
  // The context outlives the device.
  explicit CpuDevice(const Context& context) : context_(context) {}

  void on_host(Parameter& parameter, const TensorView& weight, FunctionRef<void(const TensorView&)> work) override;
  void measure(std::span<const Operand* const> operands) override;
  std::vector<double> squared_norms() override;
  std::vector<std::vector<int32_t>> top_k(std::span<const size_t> which, std::span<const int64_t> widths) override;
  void sum_sides(std::span<const Operand* const> operands) override;
  std::vector<std::pair<Parameter*, SideNorms>> late_sides() override;
  void stage(const Operand& operand) override { operand.parameter->stage(operand.gradient); }
  void unstage(Parameter& parameter, void* gradient) override { parameter.unstage(gradient); }
  void sum_staged_sides(Parameter& parameter) override;
  void apply(std::span<const ReceivedGradient> gradients) override;
  void swap_columns(Parameter& parameter, const TensorView& weight, const ColumnSwap& swap) override;
  void adopt_deferred_edits(std::span<const Operand* const> operands) override;
  void publish(std::span<const Operand* const> operands) override;

 private:
  const Context& context_;
  std::vector<std::vector<float>> norms_;  // of each measured gradient; kept, so that a steady step allocates none
  size_t measured_ = 0;
  std::vector<std::pair<Parameter*, SideNorms>> sides_;
};

}  // namespace zenflow
