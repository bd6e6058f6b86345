// SPDX-License-Identifier: Apache-2.0
#include "host_benchmark.h"

#include <utility>

#include "isa.h"
#include "topology.h"

namespace zenflow {
namespace {

constexpr Hyper kHyper{1e-5, 0.9, 0.999, 1e-8, 0.01};
constexpr double kLookahead = 1;  // the default's

// As the engine pins them.
std::vector<int> pins(int threads) {
  const HostCores cores = host_cores(threads, 0.0);
  return cores.exclusive ? cores.cpus : std::vector<int>();
}

// No step is under way while a window's update runs here, so there are lanes for the window alone.
Settings settings_of(const BenchmarkSettings& b) {
  Settings s;
  s.mean = b.mean;
  s.update_interval = b.interval;
  s.update_delay = 0;
  s.moments = b.moments;
  return s;
}

Streams streams_of(const HostJob& job) {
  Streams streams{{}, {}, {}, job.rows * job.slots};
  const bool moments = !job.mean || job.closes_window;
  if (job.closes_window) streams.updated.push_back({job.master, 4});
  if (moments) streams.updated.push_back({job.exp_avg, item_size(job.moments)});
  if (moments) streams.updated.push_back({job.exp_avg_sq, item_size(job.moments)});
  if (job.sum != nullptr) streams.updated.push_back({job.sum, 4});
  for (const LateLane& l : job.lanes) {
    streams.read.push_back({const_cast<void*>(l.lane.gradients), item_size(job.lane_dtype)});
  }
  if (job.closes_window) streams.written.push_back({job.written, item_size(job.written_dtype)});
  return streams;
}

}  // namespace

HostBenchmark::HostBenchmark(const BenchmarkSettings& settings, void* weight)
    : settings_(settings),
      caller_(settings.threads),
      host_(settings.threads, pins(settings.threads)),
      context_{active_kernels(), caller_, settings_of(settings)},
      device_(context_),
      parameter_(context_, device_, settings_.sizes, settings.dtype, true, nullptr, 0) {
  const int64_t rows = parameter_.shape().rows, width = static_cast<int64_t>(settings.selection.size());
  block_ = HostArray(3 * rows * width * 4);
  float* const state = static_cast<float*>(block_.data());
  parameter_.lend({state, state + rows * width, state + 2 * rows * width, width});
  parameter_.initialise(view(weight, settings.dtype), &settings_.selection);
  parameter_.reserve_lanes(settings.gradient);
  if (settings.mean) {
    sum_ = HostArray(parameter_.deferred_count() * 4);
    sum_.first_touch(host_, 4, kHostGrain);
  }
  for (int64_t i = 0; i < settings.interval; ++i) step_ = parameter_.receive(kHyper, 1.0, nullptr);
  window_ = *parameter_.host_job(true, kLookahead);
}

std::vector<HostJob> HostBenchmark::jobs(bool stream) const {
  if (!stream) return {window_};
  std::vector<HostJob> jobs;
  for (const LateLane& lane : window_.lanes) {
    HostJob& job = jobs.emplace_back(window_);
    job.lanes = {lane};
    job.sum = static_cast<float*>(sum_.data());
    job.closes_window = false;
  }
  jobs.back().closes_window = true;
  return jobs;
}

void HostBenchmark::update(bool stream, const std::string& isa) {
  const Kernels& kernels = kernels_named(isa);
  for (const HostJob& job : jobs(stream)) job.run(kernels, host_);
}

void HostBenchmark::update_ceiling(bool stream, const Pattern& pattern) {
  for (const HostJob& job : jobs(stream)) run_streams(streams_of(job), pattern, host_);
}

int64_t HostBenchmark::update_bytes(bool stream) const {
  int64_t bytes = 0;
  for (const HostJob& job : jobs(stream)) bytes += streams_of(job).bytes();
  return bytes;
}

void HostBenchmark::norms(void* gradient) {
  Operand operand;
  operand.parameter = &parameter_;
  operand.gradient = view(gradient, settings_.gradient);
  const Operand* const operands[] = {&operand};
  device_.measure(operands);
}

void HostBenchmark::pack(void* gradient) {
  parameter_.prepare_staging(settings_.gradient, std::nullopt, false, std::nullopt);
  parameter_.stage(view(gradient, settings_.gradient));
}

void HostBenchmark::apply(void* weight, void* gradient) {
  parameter_.apply(view(weight, settings_.dtype), view(gradient, settings_.gradient), step_);
}

void HostBenchmark::publish(void* weight) {
  parameter_.publish(view(weight, settings_.dtype));
  window_.written = parameter_.arrays().pending.data();  // the two arrays have changed places
}

void HostBenchmark::find_edits(void* weight) {
  parameter_.adopt_deferred_edits(view(weight, settings_.dtype));
}

void HostBenchmark::copy(void* gradient, const Pattern& pattern) {
  const int64_t item = item_size(settings_.gradient), elements = parameter_.shape().count();
  if (copy_.data() == nullptr) {
    copy_ = HostArray(elements * item);
    copy_.first_touch(caller_, item, kHostGrain);
  }
  run_streams({{}, {{gradient, item}}, {{copy_.data(), item}}, elements}, pattern, caller_);
}

}  // namespace zenflow
