// SPDX-License-Identifier: Apache-2.0
// A Training (tests/cpp/training.h) whose parameters live on the emulated device.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "cuda/device.h"
#include "emulation.h"
#include "training.h"

namespace zenflow_test {

// As torch's allocator at its most eager: what is released is overwritten as soon as the caller's stream and the one
// that it was used on may have gone on.
class EmulatedMemory : public zenflow::DeviceMemory {
 public:
  explicit EmulatedMemory(cudaStream_t compute);
  ~EmulatedMemory() override;
  void* allocate(int64_t bytes) override;
  void* try_allocate(int64_t bytes) override { return allocate(bytes); }
  void release(void* memory, uintptr_t stream) noexcept override;

 private:
  cudaStream_t compute_, reuse_ = nullptr;
  std::map<void*, size_t> bytes_;
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
