// SPDX-License-Identifier: Apache-2.0
//
// HostUpdater: one background thread that runs submitted work in order, on a ThreadPool of its own.
//
// The first exception of a job is kept: jobs queued behind it are dropped, and every later submit,
// wait and wait_all rethrows it, as the state behind a half-done job cannot be trusted. Thread-safe.
// Jobs run under FloatingPointMode, touch no Python object, and neither submit nor wait
// (std::logic_error). Survives fork and shutdown_all() (fork.h): tickets issued before a fork are
// done in the child.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "thread_pool.h"

namespace zenflow {

class HostUpdater {
 public:
  using Ticket = uint64_t;  // ascending; 0 is nothing, and always done

  // `threads` and `pin_cpus` as for ThreadPool; the background thread is its thread 0.
  HostUpdater(int threads, std::vector<int> pin_cpus);
  // Finishes what is queued and joins. An error that nobody has seen is lost.
  ~HostUpdater();
  HostUpdater(const HostUpdater&) = delete;
  HostUpdater& operator=(const HostUpdater&) = delete;

  using Work = std::function<void(ThreadPool&)>;

  // Queues work. If the background thread cannot be created, runs it before returning.
  Ticket submit(Work work);
  // Queues them in order, at least one, all or none. Returns the last one's ticket; those of the others are the numbers
  // before it.
  Ticket submit_all(std::vector<Work> works);

  // Whether wait(ticket) would return, or throw, at once. What the job wrote is visible if so.
  bool done(Ticket ticket) const;

  void wait(Ticket ticket);
  // Waits for everything submitted before the call.
  void wait_all();

  // For use while no job is queued or running.
  ThreadPool& pool();

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace zenflow
