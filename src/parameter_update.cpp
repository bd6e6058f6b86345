// SPDX-License-Identifier: Apache-2.0
// What happens to a parameter at each step: its gradient, the host's share of it, edits by the user, and publication.
#include <cmath>
#include <optional>
#include <unordered_map>
#include <utility>

#include "parameter.h"
#include "rows.h"

namespace zenflow {

namespace {

Update shifted(Update u, int64_t elements) {
  u.master += elements;
  u.exp_avg = static_cast<float*>(u.exp_avg) + elements;
  u.exp_avg_sq = static_cast<float*>(u.exp_avg_sq) + elements;
  return u;
}

}  // namespace

ColumnCorrections Parameter::column_corrections(const std::vector<int32_t>& columns, const Hyper& h,
                                                double lookahead) const {
  std::unordered_map<int32_t, AdamStep> by_count;  // few distinct counts, many columns
  ColumnCorrections corrections;
  for (int32_t c : columns) {
    const int32_t t = column_steps_[static_cast<size_t>(c)];
    auto [entry, added] = by_count.try_emplace(t);
    if (added) entry->second = make_adam_step(h, h.lr, 1.0 - h.lr * h.weight_decay, t, lookahead);
    corrections.step.push_back(entry->second.step);
    corrections.root.push_back(entry->second.root);
    corrections.ahead.push_back(entry->second.ahead);
  }
  return corrections;
}

GradientStep Parameter::receive(const Hyper& hyper, double scale, const float* late) {
  set_steps(steps_ + 1);
  GradientStep step{make_fold(hyper, scale),
                    make_adam_step(hyper, hyper.lr, 1.0 - hyper.lr * hyper.weight_decay, steps_, 0.0),
                    {},
                    nullptr,
                    late};
  if (!column_steps_.empty()) {
    for (int32_t c : block_columns_) ++column_steps_[static_cast<size_t>(c)];
    step.corrections = column_corrections(block_columns_, hyper, 0.0);
  }
  if (deferred_count() == 0) return step;
  step.lane = lane(next_lane_);
  open_lanes_.push_back({next_lane_, step.fold, late});
  next_lane_ = (next_lane_ + 1) % lane_count_;
  window_.add(hyper);
  return step;
}

// work(the update of all selected columns, still without their gradients)
template <class Work>
void Parameter::with_update(const GradientStep& step, Work&& work) const {
  const Lane gradient_lane{nullptr, step.fold};
  const ColumnSteps column_steps = step.corrections.view();
  work(Update{block_.master, block_.exp_avg, block_.exp_avg_sq, DType::kFloat32, 0, nullptr, &gradient_lane, 1,
              &step.move, nullptr, false, nullptr, 1.0f, step.corrections.empty() ? nullptr : &column_steps,
              block_.width});
}

void Parameter::apply(const TensorView& weight, const TensorView& gradient, const GradientStep& step) {
  if (shape_.count() == 0) return;
  with_update(step, [&](const Update& update) {
    if (!split_ && weight.contiguous() && gradient.contiguous()) return update_flat(weight, gradient, update);
    const DType dtype = gradient.dtype();
    for_rows(context_.pool, shape_, [&](int64_t r) {
      Scratch staging(gradient.staging_bytes()), selected(split_ ? block_.width * item_size(dtype) : 0);
      const void* row = gradient.row(r, staging.data());
      if (step.lane != nullptr)
        pack(row, dtype, r, order_, lane_dtype_, step.lane);  // a vector at a time: into the cache
      if (split_) gather_run(dtype, row, block_columns_, selected.data());
      if (block_.width > 0) update_selected(weight, split_ ? selected.data() : row, dtype, r, update);
    });
  });
}

void Parameter::apply_staged(const TensorView& weight, const GradientStep& step) {
  const int64_t row_bytes = block_.width * item_size(staged_.dtype);
  with_update(step, [&](const Update& update) {
    for_rows(context_.pool, {shape_.rows, block_.width}, [&](int64_t r) {
      update_selected(weight, staged_.selected.data() + r * row_bytes, staged_.dtype, r, update);
    });
  });
  discard_staged();
}

// The selected columns of one row through contiguous runs, so that the kernel is the host update's own.
void Parameter::update_selected(const TensorView& weight, const void* gradients, DType gradient, int64_t r,
                                const Update& all) const {
  const int64_t width = block_.width;
  Scratch weights(width * item_size(dtype_));
  weight.gather(r, block_index(), width, weights.data());
  Update u = shifted(all, r * width);
  adopt_run(context_.kernels, dtype_, weights.data(), width, u.master);

  const Lane lane{gradients, all.lanes->fold};
  u.lanes = &lane;
  u.written = weights.data();
  context_.kernels.update(u, gradient, dtype_, 0, width);
  weight.scatter(r, block_index(), width, weights.data());
}

// A contiguous parameter that is not split, in place.
void Parameter::update_flat(const TensorView& weight, const TensorView& gradient, const Update& all) const {
  const int64_t runs = (shape_.count() + kRun - 1) / kRun;
  context_.pool.parallel_for(runs, kElementsPerTask / kRun, [&](int64_t begin, int64_t end) {
    for (int64_t run = begin; run < end; ++run) {
      const int64_t first = run * kRun, count = std::min(kRun, shape_.count() - first);
      const Lane lane{gradient.at(first), all.lanes->fold};
      Update u = shifted(all, first);
      u.lanes = &lane;
      u.written = weight.at(first);
      adopt_run(context_.kernels, dtype_, u.written, count, u.master);
      context_.kernels.update(u, gradient.dtype(), dtype_, 0, count);
    }
  });
}

void Parameter::pack(const void* row, DType gradient, int64_t r, const SlotOrder& order, DType lane_dtype,
                     char* lane) const {
  const int64_t count = order.slots(), bytes = count * item_size(lane_dtype);
  if (count == 0) return;  // `lane` may be null
  char* const to = lane + r * bytes;
  Scratch packed(count * item_size(gradient) + kOverrun);
  context_.kernels.gather(order.map(), row, item_size(gradient), packed.data());
  if (lane_dtype != gradient) {
    context_.kernels.widen(packed.data(), gradient, count, reinterpret_cast<float*>(to));
  } else if (shape_.rows * count >= kStreamFrom) {
    context_.kernels.stream(to, packed.data(), bytes);
  } else {
    std::memcpy(to, packed.data(), static_cast<size_t>(bytes));
  }
}

void Parameter::gather_deferred(const TensorView& weight, int64_t r, void* packed) const {
  if (!weight.rows_contiguous()) return weight.gather(r, slot_columns().data(), slots(), packed);
  context_.kernels.gather(order_.map(), weight.row(r), item_size(dtype_), packed);
}

void Parameter::scatter_deferred(const TensorView& weight, int64_t r, const void* packed) const {
  if (!weight.rows_contiguous()) return weight.scatter(r, slot_columns().data(), slots(), packed);
  context_.kernels.scatter(order_.map(), packed, item_size(dtype_), weight.row(r));
}

std::vector<LateLane> Parameter::late_lanes() const {
  std::vector<LateLane> lanes;
  lanes.reserve(open_lanes_.size());
  for (const OpenLane& open : open_lanes_) lanes.push_back({{lane(open.index), open.fold}, open.late});
  return lanes;
}

void Parameter::count(const SideNorms& sides) {
  const auto elements = [&](int64_t columns) { return static_cast<double>(shape_.rows * columns); };
  vote_.selected += std::sqrt(sides.selected / elements(block_.width));
  vote_.deferred += std::sqrt(sides.deferred / elements(slots()));
  ++vote_.count;
}

std::optional<HostJob> Parameter::host_job(bool closes_window, double lookahead) {
  closes_window = closes_window && window_.count > 0;
  if (!closes_window && (open_lanes_.empty() || !context_.settings.stream)) return std::nullopt;

  HostJob job{};
  job.master = host_master(0);
  job.exp_avg = arrays_.exp_avg.data();
  job.exp_avg_sq = arrays_.exp_avg_sq.data();
  job.moments = context_.settings.moments;
  job.noise = seed_ * 0x9e3779b9u + static_cast<uint32_t>(steps_) * 0x85ebca6bu;  // spread, for the kernels to hash
  job.sum = static_cast<float*>(arrays_.sum.data());
  job.written = arrays_.pending.data();
  job.lanes = late_lanes();
  job.lane_dtype = lane_dtype_;
  job.written_dtype = dtype_;
  job.rows = shape_.rows;
  job.slots = slots();
  job.mean = context_.settings.mean && has_selection_;  // warm-up is plain AdamW under either rule
  open_lanes_.clear();
  if (!closes_window) return job;

  const Window window = std::exchange(window_, {});
  vote_ = {};
  job.closes_window = true;
  job.gradient_count = window.count;
  if (!context_.settings.mean) {
    job.move = make_adam_step(window.last, window.lr_sum, window.keep, steps_, lookahead);
  } else {
    for (int32_t c : slot_columns()) ++column_steps_[static_cast<size_t>(c)];
    const double decay = window.last.lr * window.last.weight_decay;
    job.move = make_adam_step(window.last, window.last.lr, 1.0 - decay, steps_, lookahead);
    job.mean_fold = make_fold(window.last, 1.0);
    job.corrections = column_corrections(slot_columns(), window.last, lookahead);
  }
  in_flight_ = true;
  return job;
}

void Parameter::adopt_selected_edits(const TensorView& weight) {
  for_rows(context_.pool, {shape_.rows, block_.width}, [&](int64_t r) {
    Scratch staging(live_staging_bytes(weight));
    const void* live = live_selected(weight, r, staging.data());
    adopt_run(context_.kernels, dtype_, live, block_.width, block_.master + r * block_.width);
  });
}

void Parameter::adopt_deferred_row(const TensorView& weight, int64_t r) {
  const int64_t bytes = slots() * item_size(dtype_);
  float* master = host_master(r);
  char* last = host_row(arrays_.last_written, r);
  Scratch live(bytes + kOverrun), settled(bytes);
  gather_deferred(weight, r, live.data());
  if (shows_settled_ || imported_) context_.kernels.round_to(master, dtype_, slots(), settled.data());
  for_differences(dtype_, live.data(), shows_settled_ ? settled.data() : last, slots(), [&](int64_t i) {
    const size_t item = static_cast<size_t>(item_size(dtype_)), at = static_cast<size_t>(i) * item;
    const char* edited = static_cast<const char*>(live.data()) + at;
    std::memcpy(last + at, edited, item);
    // A model saved under settled() beside this state holds rounded masters: no edit, they keep their bits.
    if (imported_ && std::memcmp(edited, static_cast<const char*>(settled.data()) + at, item) == 0) return;
    master[i] = widen_element(dtype_, live.data(), i);
    std::memcpy(host_row(arrays_.pending, r) + at, edited, item);
  });
}

void Parameter::adopt_deferred_edits(const TensorView& weight) {
  for_rows(context_.pool, {shape_.rows, slots()}, [&](int64_t r) { adopt_deferred_row(weight, r); });
  imported_ = false;
}

void Parameter::adopt_edits(const TensorView& weight) {
  adopt_selected_edits(weight);
  adopt_deferred_edits(weight);
}

void Parameter::publish(const TensorView& weight) {
  for_rows(context_.pool, {shape_.rows, slots()}, [&](int64_t r) {
    adopt_deferred_row(weight, r);
    scatter_deferred(weight, r, host_row(arrays_.pending, r));
  });
  published();
}

void Parameter::published() {
  std::swap(arrays_.last_written, arrays_.pending);
  in_flight_ = false;
}

void Parameter::write_settled(const TensorView& weight) {
  for_rows(context_.pool, {shape_.rows, slots()}, [&](int64_t r) {
    adopt_deferred_row(weight, r);
    char* last = host_row(arrays_.last_written, r);
    context_.kernels.round_to(host_master(r), dtype_, slots(), last);
    scatter_deferred(weight, r, last);
  });
  in_flight_ = false;
}

void Parameter::show_settled(const TensorView& weight) {
  for_rows(context_.pool, {shape_.rows, slots()}, [&](int64_t r) {
    adopt_deferred_row(weight, r);
    Scratch settled(slots() * item_size(dtype_));
    context_.kernels.round_to(host_master(r), dtype_, slots(), settled.data());
    scatter_deferred(weight, r, settled.data());
  });
  shows_settled_ = true;
}

void Parameter::show_training(const TensorView& weight) {
  for_rows(context_.pool, {shape_.rows, slots()}, [&](int64_t r) {
    adopt_deferred_row(weight, r);
    scatter_deferred(weight, r, host_row(arrays_.last_written, r));
  });
  shows_settled_ = false;
}

}  // namespace zenflow
