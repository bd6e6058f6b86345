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
  EmulatedMemory(int gpu, cudaStream_t compute);
  ~EmulatedMemory() override;
  void* allocate(int64_t bytes) override;
  void* try_allocate(int64_t bytes) override { return allocate(bytes); }
  void release(void* memory, uintptr_t stream) noexcept override;

 private:
  const int gpu_;
  cudaStream_t compute_, reuse_ = nullptr;
  std::map<void*, size_t> bytes_;
};

class EmulatedTraining : public Training {
 public:
  // Parameters are dealt out to the GPUs in turn; with `some_on_cpu`, every third one stays in the host's memory.
  EmulatedTraining(const Script& script, const Variant& variant, const zenflow::TransferSizes& sizes, int gpus = 1,
                   bool some_on_cpu = false);
  ~EmulatedTraining() override;

 protected:
  void prepare(zenflow::Engine& engine) override;
  size_t device_of(size_t parameter) const override;
  // Everything that the caller's tensors hold is its device's memory during the call, and nobody else's; afterwards the
  // caller's streams are waited for, as torch's next operations on them would.
  void call(std::vector<zenflow::Operand>& operands,
            zenflow::FunctionRef<void(std::span<const zenflow::Operand>)> engine_call) override;

 private:
  struct Placed;

  int gpu_of(const Tensor& t) const {
    return static_cast<int>(device_of(static_cast<size_t>(&t - tensors_.data()))) - 1;
  }

  zenflow::TransferSizes sizes_;
  bool some_on_cpu_;
  std::vector<cudaStream_t> streams_;  // of each GPU
};

}  // namespace zenflow_test
