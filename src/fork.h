// SPDX-License-Identifier: Apache-2.0
//
// The life of our threads in their process: how they start, and what fork and exit do to them.
//
// fork: one atfork registration serves all pools and updaters. Before a fork the forking thread
// waits until work in flight is finished and holds every member still; the parent then goes on; in
// the child, where the other threads do not exist, each member abandons (leaks, on purpose: a
// condition variable with waiters cannot be destroyed) what they waited on and starts afresh at the
// next use. A fork made inside a job or a body waits for nothing, since it would wait for itself;
// what that child inherits of the work in flight is unspecified. So work must never wait for a
// thread that may fork.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "function_ref.h"

namespace zenflow {

// Something with threads. Held by shared_ptr, as a fork may still hold it while its owner lets go.
class ForkMember {
 public:
  // Members are held still in this order: a call still needs its updater, an updater's last job its
  // pool.
  enum class Rank { kCall, kUpdater, kPool };

  explicit ForkMember(Rank rank) : rank(rank) {}
  virtual ~ForkMember() = default;

  virtual void hold() = 0;               // before the fork: wait until idle, let no work begin
  virtual void release() = 0;            // in the parent, by the thread that called hold()
  virtual void abandon() = 0;            // in the child; no lock may be taken, nothing destroyed
  virtual void shutdown() noexcept = 0;  // finish the work, join the threads; usable afterwards

  const Rank rank;
};

void add_fork_member(std::shared_ptr<ForkMember> member);
void remove_fork_member(const std::shared_ptr<ForkMember>& member);

// Serialises calls that no fork may cut in two. Create it before the pools and updaters that the calls
// use.
class CallMutex {
 public:
  CallMutex();
  ~CallMutex();
  CallMutex(const CallMutex&) = delete;
  CallMutex& operator=(const CallMutex&) = delete;

  std::mutex& mutex() const;

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;
};

// For a thread that is about to fork with a lock that calls need: waits until no call is under way, then runs
// `take_lock`; no call begins before the fork is done. The thread must fork next, and call nothing of ours before.
void hold_calls_for_fork(FunctionRef<void()> take_lock);

// For the interpreter's exit: drains and joins every updater and pool. Later use starts their
// threads again. Throws std::logic_error inside a job or a body, which would join itself.
void shutdown_all();

// What the calling thread is doing. Set by the pool (body) and the updater (job).
struct ThreadRole {
  bool in_job = false;
  bool in_body = false;
};
ThreadRole& thread_role();

// Sets a flag of thread_role() for a scope.
class RoleScope {
 public:
  explicit RoleScope(bool& flag) : flag_(flag) { flag_ = true; }
  ~RoleScope() { flag_ = false; }
  RoleScope(const RoleScope&) = delete;
  RoleScope& operator=(const RoleScope&) = delete;

 private:
  bool& flag_;
};

// Starts a thread that blocks all signals, so that Python's handlers run on the main thread.
// `name` has at most 15 characters. Throws std::system_error if the thread cannot be created.
std::thread start_thread(std::string name, std::function<void()> main);

}  // namespace zenflow
