// SPDX-License-Identifier: Apache-2.0
// What a GPU does rarely: host work on a copy of a parameter, hand-over, and its own housekeeping. These wait.
#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "cuda/cuda_device.h"
#include "cuda/edits.h"
#include "cuda/scatter.h"
#include "cuda/slot_map.h"
#include "rows.h"

namespace zenflow {

CudaDevice::CudaDevice(int ordinal, std::unique_ptr<DeviceMemory> memory, const Context& context,
                       const TransferSizes& sizes)
    : ordinal_(ordinal),
      memory_(std::move(memory)),
      context_(context),
      sizes_(sizes),
      process_(getpid()),
      compute_(Stream::from_handle(0)),
      staging_(*memory_, sizes.chunk_bytes, static_cast<size_t>(sizes.chunks)) {
  ZENFLOW_CUDA_CHECK(cudaStreamCreateWithFlags(&up_, cudaStreamNonBlocking));
  reserve_steps(context.settings.update_interval + context.settings.update_delay);
}

void CudaDevice::reserve_steps(int64_t steps) {
  HostArray clips((steps + 1) * static_cast<int64_t>(sizeof(Clipped)), this);
  clips.page_lock();
  clips_ = std::move(clips);
}

CudaDevice::~CudaDevice() {
  for (Buffer* b : {&norms_, &norm_scratch_, &squared_, &clipped_, &selected_, &corrections_, &upload_, &sides_}) {
    release(*b);
  }
  (void)cudaStreamDestroy(up_);
}

void CudaDevice::use_stream(uintptr_t stream) {
  if (getpid() != process_) {
    throw std::runtime_error(
        "zenflow: this optimizer's parameters are on a GPU, which a forked process cannot use: make the optimizer in "
        "the process that trains, or start that with the \"spawn\" method");
  }
  compute_ = Stream::from_handle(stream);
  memory_->use_stream(stream);
}

void CudaDevice::release(Buffer& buffer) noexcept {
  if (buffer.data != nullptr) memory_->release(buffer.data, reinterpret_cast<uintptr_t>(up_));
  buffer = {};
}

// To host memory that is not page-locked: CUDA returns when the copy is done.
void CudaDevice::download(void* host, const void* device, int64_t bytes) {
  if (bytes == 0) return;
  ZENFLOW_CUDA_CHECK(cudaMemcpyAsync(host, device, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, compute()));
}

// From host memory that is not page-locked: CUDA returns when it has read it.
void CudaDevice::upload(void* device, const void* host, int64_t bytes) {
  if (bytes == 0) return;
  ZENFLOW_CUDA_CHECK(cudaMemcpyAsync(device, host, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, compute()));
}

void CudaDevice::wait() {
  const DeviceScope scope(ordinal_);
  send_after_compute();
  // Host arrays: lanes, what the caller's stream writes, and what publication reads, for which that has waited.
  ZENFLOW_CUDA_CHECK(cudaStreamSynchronize(staging_.stream()));
}

void* CudaDevice::lock(void* data, int64_t bytes) {
  const DeviceScope scope(ordinal_);
  void* address = nullptr;
  const unsigned flags = cudaHostRegisterPortable | cudaHostRegisterMapped;
  if (cudaHostRegister(data, static_cast<size_t>(bytes), flags) == cudaSuccess) {
    if (cudaHostGetDevicePointer(&address, data, 0) == cudaSuccess) return address;
    (void)cudaHostUnregister(data);
  }
  (void)cudaGetLastError();  // an answer here, not an error
  refuses_page_locks_ = true;
  return nullptr;
}

void CudaDevice::unlock(void* data) noexcept {
  if (getpid() == process_) (void)cudaHostUnregister(data);
}

// The host's copy of a block, or nothing for an absent one.
class CudaDevice::HostBlock {
 public:
  HostBlock(const ColumnState& device, int64_t rows)
      : device_(device), count_(rows * device.width), memory_(3 * count_ * 4) {}

  ColumnState host() const {
    float* const first = static_cast<float*>(memory_.data());
    return {first, first + count_, first + 2 * count_, device_.width};
  }
  void download(CudaDevice& device) const {
    const ColumnState host = this->host();
    for (auto array : {&ColumnState::master, &ColumnState::exp_avg, &ColumnState::exp_avg_sq}) {
      device.download(host.*array, device_.*array, count_ * 4);
    }
  }
  ColumnState upload(CudaDevice& device) const {
    const ColumnState host = this->host();
    for (auto array : {&ColumnState::master, &ColumnState::exp_avg, &ColumnState::exp_avg_sq}) {
      device.upload(device_.*array, host.*array, count_ * 4);
    }
    return device_;
  }
  const ColumnState& device() const { return device_; }

 private:
  ColumnState device_;
  int64_t count_;
  HostArray memory_;
};

void CudaDevice::on_host(Parameter& p, const TensorView& weight, FunctionRef<void(const TensorView&)> work) {
  const DeviceScope scope(ordinal_);
  const int64_t rows = p.shape().rows, bytes = p.shape().count() * item_size(p.dtype());
  const std::vector<int64_t> sizes{rows, p.shape().columns};
  const bool lends = p.lent_block().has_value();
  const HostBlock block(p.block(), rows), lent(lends ? *p.lent_block() : ColumnState(), rows);
  HostArray mirror(weight ? bytes : 0);
  const TensorView view = weight ? TensorView(mirror.data(), p.dtype(), sizes, {}) : TensorView();

  reserve(p);
  wait();
  block.download(*this);
  if (weight) download(mirror.data(), weight.at(0), bytes);
  p.block() = block.host();
  if (lends) p.lent_block() = lent.host();
  const auto put_back = [&](const ColumnState& in_use) {
    p.block() = in_use;
    if (p.lent_block()) p.lent_block() = lent.device();
  };
  try {
    work(view);
  } catch (...) {
    put_back(block.device());
    throw;
  }
  const bool took_lent = lends && !p.lent_block();
  put_back((took_lent ? lent : block).upload(*this));
  if (weight) upload(weight.at(0), mirror.data(), bytes);
  update_map(p, weight);
}

void CudaDevice::columns_moved(Parameter& p, const TensorView& weight) {
  const DeviceScope scope(ordinal_);
  update_map(p, weight);
}

// What the parameter will need, before anything is done to it: memory then runs out before a gradient counts.
void CudaDevice::reserve(const Parameter& p) {
  if (!p.split() || p.shape().count() == 0) return;
  reserve(maps_[&p], p.shape().columns);
  staging_.reserve();
  grown<char>(upload_, std::max(sizes_.chunk_bytes, p.shape().columns * item_size(p.dtype())));
}

uint64_t* CudaDevice::reserve(ColumnMap& map, int64_t columns) {
  return grown<uint64_t>(map.memory, 2 * columns + columns);  // both lists of sums, then the indices
}

void CudaDevice::update_map(ColumnMap& map, const std::vector<int32_t>& slot_columns,
                            const std::vector<int32_t>& block_columns) {
  const auto slots = static_cast<int64_t>(slot_columns.size()), width = static_cast<int64_t>(block_columns.size());
  const int64_t columns = slots + width;
  map.checksums = reserve(map, columns);
  map.found = map.checksums + columns;
  map.place = reinterpret_cast<int32_t*>(map.found + columns);
  map.of_slots = map.place + columns;
  map.of_block = map.of_slots + slots;
  upload(map.of_slots, slot_columns.data(), slots * 4);
  upload(map.of_block, block_columns.data(), width * 4);
  build_place(map.of_slots, slots, map.of_block, width, map.place, compute_);
}

void CudaDevice::update_map(const Parameter& p, const TensorView& weight) {
  if (!p.split() || p.shape().count() == 0) return;
  ColumnMap& map = maps_[&p];
  update_map(map, p.slot_columns(), p.block_columns());
  if (!weight) return;  // the checksums follow when the weight is first looked at: parameter.shows_last_written()
  column_checksums(weight.at(0), p.dtype(), p.shape().rows, p.shape().columns, map.place, p.slots(), map.checksums,
                   compute_);
}

double CudaDevice::staged_norm(const Parameter& p) {
  const DeviceScope scope(ordinal_);
  double squared = 0;
  download(&squared, kept_.at(&p).norm.data, sizeof(double));
  return squared;
}

void CudaDevice::unstage(Parameter& p, void* gradient) {
  const DeviceScope scope(ordinal_);
  join();  // the chunk through which weights come
  const StagedPlaces from = p.staged_places();
  const SelectivePass all = staged_pass(p, from);
  const int64_t row_bytes = all.slots * item_size(all.packed_dtype), item = item_size(all.gradient_dtype);
  char* const chunk = grown<char>(upload_, std::max(sizes_.chunk_bytes, row_bytes));
  // The lane, into which the gradient may still be on its way.
  ZENFLOW_CUDA_CHECK(cudaStreamSynchronize(staging_.stream()));
  for_chunks(all.columns > 0 ? all.rows : 0, row_bytes, [&](int64_t first, int64_t rows) {
    SelectivePass pass = all;
    pass.rows = rows;
    pass.kept = static_cast<char*>(all.kept) + first * all.width * item;
    pass.packed = chunk;
    if (row_bytes > 0) {
      ZENFLOW_CUDA_CHECK(cudaMemcpyAsync(chunk, from.lane + first * row_bytes, static_cast<size_t>(rows * row_bytes),
                                         cudaMemcpyHostToDevice, compute()));
    }
    unpack(pass, static_cast<char*>(gradient) + first * all.columns * item, compute_);
  });
  // The lane, which may go.
  ZENFLOW_CUDA_CHECK(cudaStreamSynchronize(compute()));
  p.discard_staged();
}

void CudaDevice::swap_columns(Parameter& p, const TensorView& weight, const ColumnSwap& swap) {
  const DeviceScope scope(ordinal_);
  const int64_t rows = p.shape().rows, columns = p.shape().columns, count = swap.count(), item = item_size(p.dtype());
  const ColumnState block = p.block();
  struct Moving : Buffer {
    explicit Moving(CudaDevice& owner) : owner(owner) {}
    ~Moving() { owner.release(*this); }
    CudaDevice& owner;
  } memory(*this);
  float* const state = grown<float>(memory, 4 * rows * count + 3 * count);
  ColumnState moving{state, state + rows * count, state + 2 * rows * count, count};
  void* const weights = state + 3 * rows * count;
  int32_t* const positions = reinterpret_cast<int32_t*>(state + 4 * rows * count);
  int32_t* const leaving = positions + count;
  int32_t* const joining = leaving + count;
  upload(positions, swap.positions.data(), count * 4);
  upload(leaving, swap.leaving.data(), count * 4);
  upload(joining, swap.joining.data(), count * 4);

  const auto arrays = {&ColumnState::master, &ColumnState::exp_avg, &ColumnState::exp_avg_sq};
  for (auto array : arrays) {
    gather_columns(block.*array, 4, rows, block.width, positions, count, moving.*array, compute_);
  }
  gather_columns(weight.at(0), item, rows, columns, leaving, count, weights, compute_);
  const HostBlock host(moving, rows);
  HostArray left(rows * count * item), joined(rows * count * item);
  host.download(*this);
  download(left.data(), weights, left.bytes());  // behind edits that go into host arrays, too

  for_rows(context_.pool, {rows, count}, [&](int64_t r) {
    const int64_t row = r * count * item;
    p.swap_row(swap, host.host(), true, r, static_cast<char*>(left.data()) + row,
               static_cast<char*>(joined.data()) + row);
  });

  host.upload(*this);
  upload(weights, joined.data(), joined.bytes());
  for (auto array : arrays) {
    scatter_columns(block.*array, 4, rows, block.width, positions, count, moving.*array, compute_);
  }
  scatter_columns(weight.at(0), item, rows, columns, joining, count, weights, compute_);
}

void CudaDevice::forget(const Parameter& p) {
  if (const auto map = maps_.extract(&p)) release(map.mapped().memory);
  if (const auto kept = kept_.extract(&p)) {
    Kept& k = kept.mapped();
    for (Buffer* b : {&k.norm, &k.sides, &k.selected, &k.map.memory}) release(*b);
  }
}

}  // namespace zenflow
