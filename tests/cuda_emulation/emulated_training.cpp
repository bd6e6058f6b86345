// SPDX-License-Identifier: Apache-2.0
#include "emulated_training.h"

#include <cstring>
#include <stdexcept>

#include "check.h"
#include "cuda/check.h"

namespace zenflow_test {

using namespace zenflow;

EmulatedMemory::EmulatedMemory(cudaStream_t compute) : compute_(compute) {
  ZENFLOW_CUDA_CHECK(cudaStreamCreateWithFlags(&reuse_, cudaStreamNonBlocking));
}

EmulatedMemory::~EmulatedMemory() {
  (void)cudaDeviceSynchronize();
  for (const auto& [memory, bytes] : bytes_) (void)cudaFree(memory);
  (void)cudaStreamDestroy(reuse_);
}

void* EmulatedMemory::allocate(int64_t bytes) {
  void* memory = nullptr;
  ZENFLOW_CUDA_CHECK(cudaMalloc(&memory, static_cast<size_t>(bytes)));
  bytes_[memory] = static_cast<size_t>(bytes);
  return memory;
}

void EmulatedMemory::release(void* memory, uintptr_t stream) noexcept {
  for (cudaStream_t user : {compute_, reinterpret_cast<cudaStream_t>(stream)}) {
    cudaEvent_t used = nullptr;
    (void)cudaEventCreateWithFlags(&used, cudaEventDisableTiming);
    (void)cudaEventRecord(used, user);
    (void)cudaStreamWaitEvent(reuse_, used, 0);
    (void)cudaEventDestroy(used);
  }
  (void)cudaMemsetAsync(memory, 0xff, bytes_.at(memory), reuse_);
}

// A contiguous copy of a tensor, as device memory.
struct EmulatedTraining::Placed {
  Placed(const TensorView& from, TensorView& view) : original(from), memory(bytes()) {
    const Matrix shape = from.shape();
    const int64_t row = shape.columns * item_size(from.dtype());
    for (int64_t r = 0; r < shape.rows; ++r) from.gather(r, nullptr, shape.columns, memory.data() + r * row);
    emulation::adopt(memory.data(), memory.size(), 0);
    const int64_t sizes[] = {shape.rows, shape.columns};
    view = TensorView(memory.data(), from.dtype(), sizes, {});
  }
  ~Placed() {
    if (placed) emulation::disown(memory.data());
  }
  void copy_back() {
    emulation::disown(memory.data());
    placed = false;
    const Matrix shape = original.shape();
    const int64_t row = shape.columns * item_size(original.dtype());
    for (int64_t r = 0; r < shape.rows; ++r) original.scatter(r, nullptr, shape.columns, memory.data() + r * row);
  }
  size_t bytes() const { return static_cast<size_t>(original.shape().count() * item_size(original.dtype())); }

  TensorView original;
  std::vector<char> memory;
  bool placed = true;
};

EmulatedTraining::EmulatedTraining(const Script& script, const Variant& variant, const TransferSizes& sizes)
    : Training(script, variant), sizes_(sizes) {
  ZENFLOW_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
}

EmulatedTraining::~EmulatedTraining() {
  engine_.reset();
  (void)cudaStreamDestroy(stream_);
}

size_t EmulatedTraining::device_of(Engine& engine) {
  const size_t device =
      engine.add_device(make_cuda_device(0, std::make_unique<EmulatedMemory>(stream_), engine.context(), sizes_));
  engine.use_stream(device, reinterpret_cast<uintptr_t>(stream_));
  return device;
}

void EmulatedTraining::call(std::vector<Operand>& operands, FunctionRef<void(std::span<const Operand>)> engine_call) {
  std::list<Placed> weights, gradients;
  for (Operand& o : operands) {
    weights.emplace_back(TensorView(o.weight), o.weight);
    if (o.gradient) gradients.emplace_back(TensorView(o.gradient), o.gradient);
  }
  for (Tensor& t : tensors_) {
    for (auto& block : t.blocks) {
      if (!block.empty()) emulation::adopt(block.data(), block.size() * sizeof(float), 0);
    }
  }
  engine_call(operands);
  ZENFLOW_CUDA_CHECK(cudaStreamSynchronize(stream_));
  for (Placed& weight : weights) weight.copy_back();
  for (Placed& gradient : gradients) gradient.copy_back();  // unstage() writes them
  for (Tensor& t : tensors_) {
    for (auto& block : t.blocks) {
      if (!block.empty()) emulation::disown(block.data());
    }
  }
  emulation::check_freed();
}

}  // namespace zenflow_test
