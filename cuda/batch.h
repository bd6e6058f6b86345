// SPDX-License-Identifier: Apache-2.0
// Many tasks in one launch. Their descriptors travel by value as the kernel's argument, so nothing is copied first and
// nothing has to be kept alive. A Task has the members `blocks`, set by the caller, and `first_block`, set here.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "cuda/launch.h"

namespace zenflow {

template <class Task>
struct Batch {
  static constexpr int kCapacity = (4096 - 64) / sizeof(Task);  // 4 KB of arguments, with room for some others

  Task tasks[kCapacity];
  int count;

  // The task that this block works for.
  __device__ __forceinline__ const Task& mine() const {
    int low = 0, high = count;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (blockIdx.x < tasks[middle].first_block ? high : low) = middle;
    }
    return tasks[low];
  }
};

// Launches `kernel` over the blocks of all tasks, in as few launches as their descriptors need. No tasks: no launch.
template <class Task, class... Parameters, class... Arguments>
void launch_batches(void (*kernel)(Batch<Task>, Parameters...), const std::vector<Task>& tasks, int threads,
                    Stream stream, Arguments... arguments) {
  Batch<Task> batch{};
  int64_t blocks = 0;
  const auto flush = [&] {
    if (batch.count == 0) return;
    launch(kernel, Grid(static_cast<unsigned>(blocks), static_cast<unsigned>(threads)), stream, batch, arguments...);
    batch.count = 0;
    blocks = 0;
  };
  for (const Task& task : tasks) {
    if (batch.count == Batch<Task>::kCapacity || blocks + task.blocks > std::numeric_limits<int>::max()) flush();
    batch.tasks[batch.count] = task;
    batch.tasks[batch.count++].first_block = static_cast<unsigned>(blocks);
    blocks += task.blocks;
  }
  flush();
}

}  // namespace zenflow
