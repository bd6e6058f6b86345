// SPDX-License-Identifier: Apache-2.0
#include "host_job.h"

namespace zenflow {

std::vector<Lane> known_lanes(const std::vector<LateLane>& lanes) {
  std::vector<Lane> known;
  known.reserve(lanes.size());
  for (const LateLane& l : lanes) {
    known.push_back(l.lane);
    if (l.late != nullptr) known.back().fold.scale *= *l.late;
  }
  return known;
}

void HostJob::run(const Kernels& kernels, ThreadPool& pool) const {
  const std::vector<Lane> lanes = known_lanes(this->lanes);
  const ColumnSteps columns = corrections.view();
  const Update update{master,
                      exp_avg,
                      exp_avg_sq,
                      moments,
                      noise,
                      sum,
                      lanes.data(),
                      static_cast<int64_t>(lanes.size()),
                      closes_window ? &move : nullptr,
                      written,
                      rows * slots >= kStreamFrom,
                      &mean_fold,
                      static_cast<float>(gradient_count),
                      corrections.empty() ? nullptr : &columns,
                      slots};
  const auto kernel = mean ? kernels.update_mean : kernels.update;
  pool.parallel_for(rows * slots, kHostGrain,
                    [&](int64_t begin, int64_t end) { kernel(update, lane_dtype, written_dtype, begin, end); });
}

}  // namespace zenflow
