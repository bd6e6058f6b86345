// SPDX-License-Identifier: Apache-2.0
// What happens between steps, in backward: gradients are staged, and a due publication may come early.
#include <cmath>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "engine.h"
#include "floating_point_mode.h"

namespace zenflow {

void Engine::stage(const Operand& o, const StepPlan& plan, bool measures) {
  const std::lock_guard lock(calls_.mutex());
  const FloatingPointMode mode;
  Parameter& p = *o.parameter;
  if (!p.split() || !o.gradient) throw std::invalid_argument("zenflow: only gradients of split parameters are staged");
  wait_for_lanes();
  drop_staged(p);

  Device& device = p.device();
  const Operand* const operand = &o;
  const bool selects = this->selects(o, plan);
  std::optional<double> squared_norm;
  std::optional<std::vector<int32_t>> selection;
  if (measures || selects) device.measure({&operand, 1});
  if (measures) squared_norm = device.norm_to_stage(p);
  if (selects) {
    const size_t which = 0;
    const int64_t width = p.next_width();
    selection = std::move(device.top_k({&which, 1}, {&width, 1})[0]);
  }
  if (p.keeps_lanes(selects)) reserve_lanes(o);
  p.prepare_staging(o.gradient.dtype(), std::move(selection), measures, squared_norm);
  device.stage(o);
  const StagedPlaces places = p.staged_places();
  const bool both_sides = p.shape().rows > 0 && !places.block_columns.empty() && places.order.slots() > 0;
  if (context_.settings.automatic && measures && !plan.warm_up && both_sides) device.sum_staged_sides(p);
}

void Engine::unstage(int64_t index, void* gradient) {
  const std::lock_guard lock(calls_.mutex());
  const FloatingPointMode mode;
  Parameter& p = parameter(index);
  if (!p.staged().present) throw std::logic_error("zenflow: no gradient is staged for this parameter");
  p.device().unstage(p, gradient);
}

void Engine::discard_staged(int64_t index) {
  const std::lock_guard lock(calls_.mutex());
  drop_staged(parameter(index));
}

void Engine::drop_staged(Parameter& p) {
  if (p.staged().lane_count > 0) p.device().wait();  // for its own lanes, into which it may still be on its way
  p.discard_staged();
}

bool Engine::staged_finite(int64_t index) {
  const std::lock_guard lock(calls_.mutex());
  const Parameter& p = parameter(index);
  if (!p.staged().measured) throw std::logic_error("zenflow: this parameter's staged gradient was not measured");
  return std::isfinite(p.device().staged_norm(p));
}

bool Engine::publish_early(const Operand& o) {
  const std::lock_guard lock(calls_.mutex());
  const FloatingPointMode mode;
  if (!o.parameter->in_flight()) return false;
  wait(o.parameter->host_ticket());
  const Operand* const operand = &o;
  report_.total.h2d_bytes += o.parameter->deferred_count() * item_size(o.parameter->dtype());
  o.parameter->device().publish_ahead({&operand, 1});
  return true;
}

void Engine::join_publications() {
  const std::lock_guard lock(calls_.mutex());
  join();
}

void Engine::check_staged(const Operand& o, const StepPlan& plan) const {
  const StagedGradient& staged = o.parameter->staged();
  const bool selects = this->selects(o, plan);
  if (!staged.present || staged.selection.has_value() != selects ||
      ((plan.max_grad_norm > 0 || counts_sides(plan)) && !staged.measured) ||
      (selects && static_cast<int64_t>(staged.selection->size()) != o.parameter->next_width())) {
    throw std::logic_error("zenflow: a gradient was staged for another step than this one, or not at all");
  }
}

}  // namespace zenflow
