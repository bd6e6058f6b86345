// SPDX-License-Identifier: Apache-2.0
// A Training (tests/cpp/training.h) whose parameters live on the emulated device.
#pragma once

#include <list>
#include <memory>
#include <vector>

#include "cuda/device.h"
#include "emulation.h"
#include "training.h"

namespace zenflow_test {

class EmulatedMemory : public zenflow::DeviceMemory {
 public:
  void* allocate(int64_t bytes) override;
  void* try_allocate(int64_t bytes) override { return allocate(bytes); }
  void release(void* memory, uintptr_t stream) noexcept override;
};

class EmulatedTraining : public Training {
 public:
  EmulatedTraining(const Script& script, const Variant& variant, const zenflow::TransferSizes& sizes);
  ~EmulatedTraining() override;

 protected:
  size_t device_of(zenflow::Engine& engine) override;
  // Everything that the caller's tensors hold is device memory during the call, and nowhere else; afterwards the
  // caller's stream is waited for, as torch's next operation on it would.
  void call(std::vector<zenflow::Operand>& operands,
            zenflow::FunctionRef<void(std::span<const zenflow::Operand>)> engine_call) override;

 private:
  struct Placed;

  zenflow::TransferSizes sizes_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace zenflow_test
