// SPDX-License-Identifier: Apache-2.0
// CudaDevice: the class behind make_cuda_device. What a step does is in device.cpp, what is rare in device_rare.cpp.
//
// Three streams. The caller's does everything that reads or writes gradients, blocks and, but for publication, weights;
// Staging's takes packed gradients to the host; `up_` brings finished weights and scatters them. Each wait between them
// stands where the need arises, with the buffer that it protects; one that another implies is left out.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "cuda/column_norms.h"
#include "cuda/device.h"
#include "cuda/event.h"
#include "cuda/selective_adam.h"
#include "cuda/staging.h"
#include "cuda/stream.h"

namespace zenflow {

class CudaDevice : public Device, private PageLocker {
 public:
  CudaDevice(int ordinal, std::unique_ptr<DeviceMemory> memory, const Context& context, const TransferSizes& sizes);
  ~CudaDevice() override;

  void use_stream(uintptr_t stream) override;
  void on_host(Parameter& parameter, const TensorView& weight, FunctionRef<void(const TensorView&)> work) override;
  void measure(std::span<const Operand* const> operands) override;
  std::vector<double> squared_norms() override;
  std::optional<Coefficient> clip(std::span<const Operand* const> operands, double max_norm) override;
  std::optional<double> late_norm() override;
  std::vector<std::vector<int32_t>> top_k(std::span<const size_t> which, std::span<const int64_t> widths) override;
  void sum_sides(std::span<const Operand* const> operands) override;
  std::vector<std::pair<Parameter*, SideNorms>> late_sides() override;
  std::optional<double> norm_to_stage(const Parameter& parameter) override;
  double staged_norm(const Parameter& parameter) override;
  void stage(const Operand& operand) override;
  void sum_staged_sides(Parameter& parameter) override;
  void unstage(Parameter& parameter, void* gradient) override;
  void apply(std::span<const ReceivedGradient> gradients) override;
  void swap_columns(Parameter& parameter, const TensorView& weight, const ColumnSwap& swap) override;
  void columns_moved(Parameter& parameter, const TensorView& weight) override;
  void adopt_deferred_edits(std::span<const Operand* const> operands) override;
  void publish(std::span<const Operand* const> operands) override;
  void publish_ahead(std::span<const Operand* const> operands) override;
  void join() override;
  std::function<void()> arrival() override;
  void wait() override;
  void reserve_steps(int64_t steps) override;
  PageLocker* page_locker() override { return this; }
  bool refuses_page_locks() const override { return refuses_page_locks_; }
  void forget(const Parameter& parameter) override;

 private:
  // Device memory that is kept, and replaced by more when more is needed.
  struct Buffer {
    void* data = nullptr;
    int64_t bytes = 0;
  };
  // Where a split parameter's columns are.
  struct ColumnMap {
    Buffer memory;
    int32_t* of_slots = nullptr;    // [slots]
    int32_t* of_block = nullptr;    // [width]
    int32_t* place = nullptr;       // [columns]
    uint64_t* checksums = nullptr;  // [slots], of the bits last written
    uint64_t* found = nullptr;      // [slots], working memory
  };
  // What the device keeps of a staged gradient.
  struct Kept {
    Buffer norm;      // its squared norm
    Buffer sides;     // [2], the squared norms of its sides
    Buffer selected;  // [rows, width]
    ColumnMap map;    // where the coming step moves columns
  };
  // What a step's clipping leaves for the host, in page-locked memory where that is granted.
  struct Clipped {
    double norm;
    float coefficient;
  };
  // The host's copy of a block, or of columns of it, while the host works on them.
  class HostBlock;

  void* lock(void* data, int64_t bytes) override;
  void unlock(void* data) noexcept override;

  cudaStream_t compute() const { return compute_.handle(); }
  template <class T>
  T* grown(Buffer& buffer, int64_t count);
  void release(Buffer& buffer) noexcept;
  void download(void* host, const void* device, int64_t bytes);
  void upload(void* device, const void* host, int64_t bytes);

  // work(first row, rows) for so many rows at a time as a chunk holds.
  template <class Work>
  void for_chunks(int64_t rows, int64_t row_bytes, Work&& work) const;
  void pack(const SelectivePass& all, char* lane);
  SelectivePass staged_pass(Parameter& parameter, const StagedPlaces& places);
  SelectivePass selective_pass(const ReceivedGradient& received);
  AdamTask adam_task(const ReceivedGradient& received);
  void wait_for_norms();
  const float* coefficient() const { return &static_cast<const Clipped*>(clipped_.data)->coefficient; }
  void upload_corrections(std::span<const ReceivedGradient> gradients);
  void take_corrections(const GradientStep& step, const float*& column_step, const float*& column_root);
  void publish(const Operand& operand);
  void send_after_compute();
  void reserve(const Parameter& parameter);
  uint64_t* reserve(ColumnMap& map, int64_t columns);
  void update_map(ColumnMap& map, const std::vector<int32_t>& slot_columns, const std::vector<int32_t>& block_columns);
  void update_map(const Parameter& parameter, const TensorView& weight);

  const int ordinal_;
  const std::unique_ptr<DeviceMemory> memory_;
  const Context& context_;
  const TransferSizes sizes_;
  const int process_;
  Stream compute_;
  cudaStream_t up_ = nullptr;
  Staging staging_;
  Event queued_, published_, norm_known_;
  std::map<const Parameter*, ColumnMap> maps_;
  std::map<const Parameter*, Kept> kept_;
  bool refuses_page_locks_ = false;
  bool ahead_ = false;        // `published_` was recorded, and the caller's stream has not waited for it
  bool writes_host_ = false;  // the caller's stream has work that uses host arrays, and `down` has not waited for it

  std::vector<NormTask> measured_;
  Buffer norms_, norm_scratch_, squared_, clipped_, selected_, corrections_, upload_, sides_;
  HostArray clips_;  // Clipped of each step whose lanes may still wait for their job
  int64_t clip_count_ = 0;
  const Clipped* last_clip_ = nullptr;  // until its norm was asked for
  HostArray known_sides_;               // SideNorms of `voters_`
  std::vector<Parameter*> voters_;
  float* next_correction_ = nullptr;
};

template <class T>
T* CudaDevice::grown(Buffer& buffer, int64_t count) {
  const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
  if (buffer.bytes < bytes) {
    release(buffer);
    buffer.data = memory_->allocate(bytes);
    buffer.bytes = bytes;
  }
  return static_cast<T*>(buffer.data);
}

template <class Work>
void CudaDevice::for_chunks(int64_t rows, int64_t row_bytes, Work&& work) const {
  const int64_t most = row_bytes == 0 ? rows : std::max<int64_t>(1, sizes_.chunk_bytes / row_bytes);
  for (int64_t first = 0; first < rows; first += most) work(first, std::min(most, rows - first));
}

}  // namespace zenflow
