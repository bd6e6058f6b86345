// SPDX-License-Identifier: Apache-2.0
//
// ThreadPool: static ranges over a few std::threads, and nothing else.
//
// The caller takes part as thread 0, so T threads are the caller and T - 1 workers, started at the
// first call that needs them. Thread i always gets range i of a given (count, grain): memory stays
// where its user first touched it. Results must not depend on T, so bodies are elementwise or work
// in blocks of `grain`. Bodies run under FloatingPointMode. Thread-safe: one caller at a time, the
// others wait. Survives fork and shutdown_all() (fork.h).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "function_ref.h"

namespace zenflow {

struct Range {
  int64_t begin;
  int64_t end;
};

// Range `index` of `threads`: contiguous, in order, covering [0, count), boundaries on multiples of
// `grain` (but for count itself), as many blocks of `grain` each, give or take one; possibly empty.
Range static_range(int64_t count, int64_t grain, int threads, int index);

class ThreadPool {
 public:
  // `pin_cpus[i]` is the CPU of thread i; threads without an entry float, and so does thread 0, as
  // the caller is not ours. Pinning is best effort. Threads with pins spin for a moment before they
  // sleep, since their cores are theirs. Throws std::invalid_argument if threads < 1.
  explicit ThreadPool(int threads, std::vector<int> pin_cpus = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // As asked for, caller included.
  int threads() const;

  // Threads that the system refused to create at the last start. The pool goes on without them.
  int shortfall() const;

  // Calls body(begin, end) for each non-empty range and returns when all are finished; inline if
  // there is one thread or count <= grain. The first exception (of the lowest range) is rethrown
  // then. Throws std::logic_error inside a body, std::invalid_argument if count < 0 or grain < 1.
  void parallel_for(int64_t count, int64_t grain, FunctionRef<void(int64_t begin, int64_t end)> body);

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace zenflow
