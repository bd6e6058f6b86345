// SPDX-License-Identifier: Apache-2.0
// What a step does on a GPU: norms and selection, the pass over the gradients, edits, publication.
#include "cuda/device.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cuda/cuda_device.h"
#include "cuda/edits.h"
#include "cuda/scatter.h"
#include "cuda/top_k.h"

namespace zenflow {

std::unique_ptr<Device> make_cuda_device(int ordinal, std::unique_ptr<DeviceMemory> memory, const Context& context,
                                         const TransferSizes& sizes) {
  const DeviceScope scope(ordinal);
  return std::make_unique<CudaDevice>(ordinal, std::move(memory), context, sizes);
}

void CudaDevice::measure(std::span<const Operand* const> operands) {
  const DeviceScope scope(ordinal_);
  int64_t columns = 0;
  for (const Operand* o : operands) columns += o->parameter->shape().columns;
  float* norms = grown<float>(norms_, columns);
  measured_.clear();
  for (const Operand* o : operands) {
    const Matrix shape = o->parameter->shape();
    measured_.push_back({o->gradient.at(0), o->gradient.dtype(), shape.rows, shape.columns, norms});
    norms += shape.columns;
  }
  column_norms(measured_, grown<float>(norm_scratch_, column_norms_scratch(measured_)), compute_);
}

std::vector<double> CudaDevice::squared_norms() {
  const DeviceScope scope(ordinal_);
  std::vector<double> squared(measured_.size());
  double* const device = grown<double>(squared_, static_cast<int64_t>(squared.size()));
  zenflow::squared_norms(measured_, device, compute_);
  download(squared.data(), device, static_cast<int64_t>(squared.size() * sizeof(double)));
  return squared;
}

std::optional<Coefficient> CudaDevice::clip(std::span<const Operand* const> operands, double max_norm) {
  const DeviceScope scope(ordinal_);
  const auto count = static_cast<int64_t>(operands.size());
  const int64_t staged = std::count_if(operands.begin(), operands.end(), [](const Operand* o) { return o->staged; });
  double* const squared = grown<double>(squared_, count + measured_.size());
  double* measured = staged > 0 ? squared + count : squared;
  if (staged < count) zenflow::squared_norms(measured_, measured, compute_);
  for (int64_t i = 0; staged > 0 && i < count; ++i) {
    const Operand& o = *operands[i];
    const void* const from = o.staged ? kept_.at(o.parameter).norm.data : measured++;
    ZENFLOW_CUDA_CHECK(cudaMemcpyAsync(squared + i, from, sizeof(double), cudaMemcpyDeviceToDevice, compute()));
  }
  auto* const clipped = grown<Clipped>(clipped_, 1);
  clip_coefficient(squared, count, max_norm, &clipped->norm, &clipped->coefficient, compute_);

  const int64_t kept = clips_.bytes() / static_cast<int64_t>(sizeof(Clipped));
  Clipped* const known = static_cast<Clipped*>(clips_.data()) + clip_count_ % kept;  // apply() counts: steps, not tries
  ZENFLOW_CUDA_CHECK(cudaMemcpyAsync(known, clipped, sizeof(Clipped), cudaMemcpyDeviceToHost, compute()));
  ZENFLOW_CUDA_CHECK(cudaEventRecord(norm_known_.handle(), compute()));
  last_clip_ = known;
  writes_host_ = true;
  return Coefficient{1.0, &known->coefficient};
}

std::optional<double> CudaDevice::late_norm() {
  if (last_clip_ == nullptr) return std::nullopt;
  wait_for_norms();
  return std::exchange(last_clip_, nullptr)->norm;
}

void CudaDevice::wait_for_norms() {
  // The clips and the sides: the last step's copies must be in. A step old, they are.
  ZENFLOW_CUDA_CHECK(cudaEventSynchronize(norm_known_.handle()));
}

void CudaDevice::sum_sides(std::span<const Operand* const> operands) {
  const DeviceScope scope(ordinal_);
  voters_.clear();
  const auto count = static_cast<int64_t>(operands.size()), bytes = count * static_cast<int64_t>(sizeof(SideNorms));
  if (known_sides_.bytes() < bytes) {
    wait_for_norms();  // a step that failed may have left a copy under way
    known_sides_ = HostArray(bytes, this);
    known_sides_.page_lock();
  }
  static_assert(sizeof(SideNorms) == 2 * sizeof(double), "the kernel writes two doubles");
  auto* const sides = grown<SideNorms>(sides_, count);
  std::vector<SideTask> tasks;
  size_t measured = 0;
  for (const Operand* o : operands) {
    const NormTask* const norms = o->staged ? nullptr : &measured_[measured++];
    Parameter& p = *o->parameter;
    if (!p.has_both_sides()) continue;
    SideNorms* const mine = sides + voters_.size();
    voters_.push_back(&p);
    if (norms != nullptr) {
      tasks.push_back({norms->norms, maps_.at(&p).place, norms->columns, &mine->selected});
    } else {
      ZENFLOW_CUDA_CHECK(
          cudaMemcpyAsync(mine, kept_.at(&p).sides.data, sizeof(SideNorms), cudaMemcpyDeviceToDevice, compute()));
    }
  }
  side_norms(tasks, compute_);
  const size_t known = voters_.size() * sizeof(SideNorms);
  if (known == 0) return;
  ZENFLOW_CUDA_CHECK(cudaMemcpyAsync(known_sides_.data(), sides, known, cudaMemcpyDeviceToHost, compute()));
  ZENFLOW_CUDA_CHECK(cudaEventRecord(norm_known_.handle(), compute()));
  writes_host_ = true;
}

std::vector<std::pair<Parameter*, SideNorms>> CudaDevice::late_sides() {
  std::vector<std::pair<Parameter*, SideNorms>> sides;
  if (voters_.empty()) return sides;
  wait_for_norms();
  const auto* known = static_cast<const SideNorms*>(known_sides_.data());
  for (Parameter* voter : voters_) sides.emplace_back(voter, *known++);
  return sides;
}

std::vector<std::vector<int32_t>> CudaDevice::top_k(std::span<const size_t> which, std::span<const int64_t> widths) {
  const DeviceScope scope(ordinal_);
  int64_t total = 0;
  for (int64_t width : widths) total += width;
  int32_t* const selected = grown<int32_t>(selected_, total);
  std::vector<TopKTask> tasks;
  std::vector<std::vector<int32_t>> selections;
  int32_t* next = selected;
  for (size_t i = 0; i < which.size(); ++i) {
    tasks.push_back({measured_[which[i]].norms, measured_[which[i]].columns, widths[i], next});
    next += widths[i];
  }
  zenflow::top_k(tasks, compute_);
  std::vector<int32_t> all(static_cast<size_t>(total));
  download(all.data(), selected, total * 4);
  auto first = all.begin();
  for (int64_t width : widths) selections.emplace_back(first, first + width), first += width;
  return selections;
}

void CudaDevice::apply(std::span<const ReceivedGradient> gradients) {
  const DeviceScope scope(ordinal_);
  int64_t packed = 0;
  for (const auto& [o, step] : gradients) {
    if (!o->staged) packed += o->parameter->deferred_count() * item_size(o->parameter->lane_dtype());
  }
  staging_.begin(compute(), packed);
  upload_corrections(gradients);
  std::vector<AdamTask> tasks;
  const float* coefficient = nullptr;
  for (const ReceivedGradient& g : gradients) {
    if (g.step.late != nullptr) coefficient = this->coefficient();
    const Operand& o = *g.operand;
    if (o.parameter->split() && !o.staged) {
      pack(selective_pass(g), g.step.lane);
    } else {
      tasks.push_back(adam_task(g));
    }
  }
  adam(tasks, coefficient, compute_);
  staging_.end();
  if (coefficient != nullptr) ++clip_count_;
  if (packed > 0) writes_host_ = false;  // the last chunk has left behind all that was queued before
}

AdamTask CudaDevice::adam_task(const ReceivedGradient& g) {
  const Operand& o = *g.operand;
  Parameter& p = *o.parameter;
  const ColumnState& block = p.block();
  AdamTask task{};
  task.gradient = o.staged ? kept_.at(&p).selected.data : o.gradient.at(0);
  task.gradient_dtype = o.gradient_dtype();
  task.weight = o.weight.at(0);
  task.weight_dtype = p.dtype();
  task.rows = p.shape().rows;
  task.width = block.width;
  task.columns = p.shape().columns;
  task.device_columns = p.split() ? maps_.at(&p).of_block : nullptr;
  task.master = block.master;
  task.exp_avg = block.exp_avg;
  task.exp_avg_sq = block.exp_avg_sq;
  task.fold = g.step.fold;
  task.move = g.step.move;
  take_corrections(g.step, task.column_step, task.column_root);
  return task;
}

SelectivePass CudaDevice::selective_pass(const ReceivedGradient& g) {
  const Operand& o = *g.operand;
  Parameter& p = *o.parameter;
  const ColumnState& block = p.block();
  SelectivePass pass{};
  pass.gradient = o.gradient.at(0);
  pass.gradient_dtype = o.gradient.dtype();
  pass.rows = p.shape().rows;
  pass.columns = p.shape().columns;
  pass.place = p.shape().count() > 0 ? maps_.at(&p).place : nullptr;
  pass.packed_dtype = p.lane_dtype();
  pass.slots = p.slots();
  pass.weight = o.weight.at(0);
  pass.weight_dtype = p.dtype();
  pass.master = block.master;
  pass.exp_avg = block.exp_avg;
  pass.exp_avg_sq = block.exp_avg_sq;
  pass.width = block.width;
  pass.fold = g.step.fold;
  pass.move = g.step.move;
  pass.coefficient = g.step.late != nullptr ? coefficient() : nullptr;
  take_corrections(g.step, pass.column_step, pass.column_root);
  return pass;
}

// Of all gradients that have any ("mean"): each one's steps, then its roots.
void CudaDevice::upload_corrections(std::span<const ReceivedGradient> gradients) {
  std::vector<float> all;
  for (const auto& [o, step] : gradients) {
    all.insert(all.end(), step.corrections.step.begin(), step.corrections.step.end());
    all.insert(all.end(), step.corrections.root.begin(), step.corrections.root.end());
  }
  if (all.empty()) return;
  next_correction_ = grown<float>(corrections_, static_cast<int64_t>(all.size()));
  upload(next_correction_, all.data(), static_cast<int64_t>(all.size()) * 4);
}

void CudaDevice::take_corrections(const GradientStep& step, const float*& column_step, const float*& column_root) {
  if (step.corrections.empty()) return;
  const size_t width = step.corrections.step.size();
  column_step = std::exchange(next_correction_, next_correction_ + width);
  column_root = std::exchange(next_correction_, next_correction_ + width);
}

void CudaDevice::pack(const SelectivePass& all, char* lane) {
  const int64_t row_bytes = all.slots * item_size(all.packed_dtype), gradient_item = item_size(all.gradient_dtype);
  if (all.columns == 0) return;
  for_chunks(all.rows, row_bytes, [&](int64_t first, int64_t rows) {
    SelectivePass pass = all;
    pass.rows = rows;
    const int64_t offset = first * all.columns, block_offset = first * all.width;
    pass.gradient = static_cast<const char*>(all.gradient) + offset * gradient_item;
    if (all.kept != nullptr) {
      pass.kept = static_cast<char*>(all.kept) + block_offset * gradient_item;
    } else {
      pass.weight = static_cast<char*>(all.weight) + offset * item_size(all.weight_dtype);
      pass.master += block_offset;
      pass.exp_avg += block_offset;
      pass.exp_avg_sq += block_offset;
    }
    if (row_bytes > 0) pass.packed = staging_.take(lane + first * row_bytes, rows * row_bytes);
    selective_adam(pass, compute_);
  });
}

std::optional<double> CudaDevice::norm_to_stage(const Parameter& p) {
  const DeviceScope scope(ordinal_);
  zenflow::squared_norms(measured_, grown<double>(kept_[&p].norm, 1), compute_);
  return std::nullopt;
}

void CudaDevice::sum_staged_sides(Parameter& p) {
  const DeviceScope scope(ordinal_);
  Kept& kept = kept_[&p];
  const ColumnMap& map = p.staged().moves_columns ? kept.map : maps_.at(&p);
  side_norms({{measured_[0].norms, map.place, measured_[0].columns, grown<double>(kept.sides, 2)}}, compute_);
}

// What packs a staged gradient, and unpacks it, but for the gradient.
SelectivePass CudaDevice::staged_pass(Parameter& p, const StagedPlaces& places) {
  Kept& kept = kept_[&p];
  SelectivePass pass{};
  pass.gradient_dtype = p.staged().dtype;
  pass.rows = p.shape().rows;
  pass.columns = p.shape().columns;
  if (p.shape().count() > 0) pass.place = p.staged().moves_columns ? kept.map.place : maps_.at(&p).place;
  pass.packed_dtype = places.lane_dtype;
  pass.slots = places.order.slots();
  pass.width = static_cast<int64_t>(places.block_columns.size());
  const int64_t bytes = pass.rows * pass.width * item_size(pass.gradient_dtype);
  pass.kept = grown<char>(kept.selected, std::max<int64_t>(1, bytes));
  return pass;
}

void CudaDevice::stage(const Operand& o) {
  const DeviceScope scope(ordinal_);
  Parameter& p = *o.parameter;
  const StagedPlaces to = p.staged_places();
  if (p.staged().moves_columns) update_map(kept_[&p].map, to.order.columns(), to.block_columns);
  SelectivePass pass = staged_pass(p, to);
  pass.gradient = o.gradient.at(0);
  staging_.begin(compute(), 0);
  pack(pass, to.lane);
  staging_.end();
  p.staged_on_device();
}

void CudaDevice::adopt_deferred_edits(std::span<const Operand* const> operands) {
  const DeviceScope scope(ordinal_);
  for (const Operand* o : operands) {
    Parameter& p = *o->parameter;
    if (p.deferred_count() == 0) continue;
    const HostArrays& arrays = p.arrays();
    const bool reachable = arrays.master.device_address() != nullptr && arrays.pending.device_address() != nullptr &&
                           arrays.last_written.device_address() != nullptr;
    if (!reachable || !p.shows_last_written()) {
      on_host(p, o->weight, [&](const TensorView& weight) { p.adopt_deferred_edits(weight); });
      continue;
    }
    const ColumnMap& map = maps_.at(&p);
    adopt_edits({o->weight.at(0), p.dtype(), p.shape().rows, p.shape().columns, map.of_slots, map.place, p.slots(),
                 map.checksums, map.found, arrays.last_written.device_address(), arrays.pending.device_address(),
                 static_cast<float*>(arrays.master.device_address())},
                compute_);
    writes_host_ = true;
  }
}

void CudaDevice::publish(std::span<const Operand* const> operands) {
  publish_ahead(operands);
  join();
}

void CudaDevice::publish_ahead(std::span<const Operand* const> operands) {
  const DeviceScope scope(ordinal_);
  adopt_deferred_edits(operands);
  ZENFLOW_CUDA_CHECK(cudaEventRecord(queued_.handle(), compute()));
  // The weights, whose last use the caller's stream must have behind it, and `pending`, into which edits were written.
  ZENFLOW_CUDA_CHECK(cudaStreamWaitEvent(up_, queued_.handle(), 0));
  for (const Operand* o : operands) publish(*o);
  ZENFLOW_CUDA_CHECK(cudaEventRecord(published_.handle(), up_));
  ahead_ = true;
  writes_host_ = true;  // and reads it: `pending`
}

void CudaDevice::join() {
  if (!std::exchange(ahead_, false)) return;
  const DeviceScope scope(ordinal_);
  // The weights: the caller goes on with what was published.
  ZENFLOW_CUDA_CHECK(cudaStreamWaitEvent(compute(), published_.handle(), 0));
}

// Chunk after chunk on one stream, through one piece of memory: a copy is two orders slower than its scatter.
void CudaDevice::publish(const Operand& o) {
  Parameter& p = *o.parameter;
  const Matrix shape = p.shape();
  const int64_t row_bytes = p.slots() * item_size(p.dtype());
  if (shape.rows * row_bytes > 0) {
    const ColumnMap& map = maps_.at(&p);
    void* const chunk = upload_.data;
    ZENFLOW_CUDA_CHECK(cudaMemsetAsync(map.checksums, 0, static_cast<size_t>(p.slots()) * sizeof(uint64_t), up_));
    for_chunks(shape.rows, row_bytes, [&](int64_t first, int64_t rows) {
      const char* const pending = static_cast<const char*>(p.arrays().pending.data()) + first * row_bytes;
      ZENFLOW_CUDA_CHECK(
          cudaMemcpyAsync(chunk, pending, static_cast<size_t>(rows * row_bytes), cudaMemcpyHostToDevice, up_));
      scatter({chunk, o.weight.at(0), p.dtype(), first, rows, shape.columns, map.place, p.slots(), map.checksums},
              Stream(up_));
    });
  }
  p.published();
}

void CudaDevice::send_after_compute() {
  if (!std::exchange(writes_host_, false)) return;
  join();
  ZENFLOW_CUDA_CHECK(cudaEventRecord(queued_.handle(), compute()));
  // Host memory that the caller's stream writes, edits and the clipping coefficient: who waits for this stream reads
  // it.
  ZENFLOW_CUDA_CHECK(cudaStreamWaitEvent(staging_.stream(), queued_.handle(), 0));
}

std::function<void()> CudaDevice::arrival() {
  const DeviceScope scope(ordinal_);
  send_after_compute();
  const auto arrived = std::make_shared<Event>();
  ZENFLOW_CUDA_CHECK(cudaEventRecord(arrived->handle(), staging_.stream()));
  return [arrived] {
    const RelaxedCapture relaxed;
    // The job's lanes, and what else it reads of what the device writes.
    ZENFLOW_CUDA_CHECK(cudaEventSynchronize(arrived->handle()));
  };
}

}  // namespace zenflow
