// SPDX-License-Identifier: Apache-2.0
#include "emulated_training.h"

#include <algorithm>
#include <utility>

#include "check.h"
#include "cuda/event.h"

namespace zenflow_test {

using namespace zenflow;

EmulatedMemory::EmulatedMemory(int gpu, cudaStream_t compute) : gpu_(gpu), compute_(compute) {
  ZENFLOW_CUDA_CHECK(cudaStreamCreateWithFlags(&reuse_, cudaStreamNonBlocking));
}

EmulatedMemory::~EmulatedMemory() {
  (void)cudaStreamSynchronize(reuse_);
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
  const DeviceScope scope(gpu_);
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
  Placed(const TensorView& from, TensorView& view, int gpu) : original(from), memory(bytes()) {
    const Matrix shape = from.shape();
    const int64_t row = shape.columns * item_size(from.dtype());
    for (int64_t r = 0; r < shape.rows; ++r) from.gather(r, nullptr, shape.columns, memory.data() + r * row);
    emulation::adopt(memory.data(), memory.size(), gpu);
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

EmulatedTraining::EmulatedTraining(const Script& script, const Variant& variant, const TransferSizes& sizes, int gpus,
                                   bool some_on_cpu)
    : Training(script, variant), sizes_(sizes), some_on_cpu_(some_on_cpu) {
  for (int gpu = 0; gpu < gpus; ++gpu) {
    const DeviceScope scope(gpu);
    ZENFLOW_CUDA_CHECK(cudaStreamCreateWithFlags(&streams_.emplace_back(), cudaStreamNonBlocking));
  }
}

EmulatedTraining::~EmulatedTraining() {
  engine_.reset();
  for (cudaStream_t stream : streams_) (void)cudaStreamDestroy(stream);
}

void EmulatedTraining::prepare(Engine& engine) {
  for (size_t gpu = 0; gpu < streams_.size(); ++gpu) {
    const int ordinal = static_cast<int>(gpu);
    const DeviceScope scope(ordinal);
    auto memory = std::make_unique<EmulatedMemory>(ordinal, streams_[gpu]);
    const size_t device = engine.add_device(make_cuda_device(ordinal, std::move(memory), engine.context(), sizes_));
    engine.use_stream(device, reinterpret_cast<uintptr_t>(streams_[gpu]));
  }
}

size_t EmulatedTraining::device_of(size_t parameter) const {
  if (some_on_cpu_ && parameter % 3 == 2) return 0;
  return 1 + parameter % streams_.size();
}

void EmulatedTraining::call(std::vector<Operand>& operands, FunctionRef<void(std::span<const Operand>)> engine_call) {
  std::list<Placed> weights, gradients;
  const auto each_block = [&](auto&& visit) {
    for (Tensor& t : tensors_) {
      for (auto& block : t.blocks) {
        if (!block.empty() && gpu_of(t) >= 0) visit(block, gpu_of(t));
      }
    }
  };
  for (Operand& o : operands) {
    const auto is_its = [&](const Tensor& t) { return t.index >= 0 && &engine_->parameter(t.index) == o.parameter; };
    const int gpu = gpu_of(*std::find_if(tensors_.begin(), tensors_.end(), is_its));
    if (gpu < 0) continue;
    weights.emplace_back(TensorView(o.weight), o.weight, gpu);
    if (o.gradient) gradients.emplace_back(TensorView(o.gradient), o.gradient, gpu);
  }
  each_block(
      [](std::vector<float>& block, int gpu) { emulation::adopt(block.data(), block.size() * sizeof(float), gpu); });
  engine_call(operands);
  for (cudaStream_t stream : streams_) ZENFLOW_CUDA_CHECK(cudaStreamSynchronize(stream));
  for (Placed& weight : weights) weight.copy_back();
  for (Placed& gradient : gradients) gradient.copy_back();  // unstage() writes them
  each_block([](std::vector<float>& block, int) { emulation::disown(block.data()); });
  emulation::check_freed();
}

}  // namespace zenflow_test
