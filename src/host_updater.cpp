// SPDX-License-Identifier: Apache-2.0
#include "host_updater.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <iterator>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "floating_point_mode.h"
#include "fork.h"

namespace zenflow {
namespace {

using Work = HostUpdater::Work;
using Lock = std::unique_lock<std::mutex>;

// Where submitters and the background thread meet. A fork's child leaves it behind as it is.
struct Desk {
  std::mutex mutex;
  std::condition_variable work;  // the background thread waits here
  std::condition_variable idle;  // everybody else
  std::deque<Work> queue;
  std::thread thread;
  bool running = false;   // a job that has left the queue
  bool stopping = false;  // the thread is being joined
  bool refused = false;   // there can be no thread: jobs run in submit()
};

void refuse_inside_work(const char* what) {
  if (!thread_role().in_job && !thread_role().in_body) return;
  throw std::logic_error(std::string("zenflow: HostUpdater::") + what + " called inside a job or a parallel_for body");
}

}  // namespace

class HostUpdater::Impl : public ForkMember {
 public:
  Impl(int threads, std::vector<int> pin_cpus) : ForkMember(Rank::kUpdater), pool(threads, std::move(pin_cpus)) {}
  ~Impl() override { delete desk_; }

  Ticket submit(std::vector<Work> works);
  void wait(Ticket ticket);
  void wait_all();
  bool done(Ticket ticket) const { return completed_.load(std::memory_order_acquire) >= ticket; }

  void hold() override;
  void release() override { desk_->mutex.unlock(); }
  void abandon() override;
  void shutdown() noexcept override;

  ThreadPool pool;

 private:
  // All with the desk's mutex locked.
  bool start(Desk& desk);
  bool run_next(Desk& desk, Lock& lock);
  void wait_until_done(Lock& lock, Ticket ticket);
  void rethrow_error() const {
    if (error_) std::rethrow_exception(error_);
  }
  void serve(Desk& desk);  // these two lock it themselves where they must
  std::exception_ptr run(Work work);

  Ticket issued_ = 0;
  std::atomic<Ticket> completed_{0};
  std::exception_ptr error_;
  Desk* desk_ = new Desk;
};

bool HostUpdater::Impl::start(Desk& desk) {
  if (desk.thread.joinable()) return true;
  if (desk.refused) return false;
  try {
    desk.thread = start_thread("zenflow-host", [this, &desk] { serve(desk); });
  } catch (const std::system_error&) {
    desk.refused = true;
  }
  return !desk.refused;
}

void HostUpdater::Impl::serve(Desk& desk) {
  Lock lock(desk.mutex);
  for (;;) {
    desk.work.wait(lock, [&] { return desk.stopping || !desk.queue.empty(); });
    if (desk.queue.empty()) return;
    if (!run_next(desk, lock)) return;
  }
}

std::exception_ptr HostUpdater::Impl::run(Work work) {
  std::exception_ptr error;
  {
    const RoleScope role(thread_role().in_job);
    const FloatingPointMode mode;
    try {
      work(pool);
    } catch (...) {
      error = std::current_exception();
    }
  }
  return error;
}

// False, and unlocked, in the child of a fork made inside the job: the desk is left behind there.
bool HostUpdater::Impl::run_next(Desk& desk, Lock& lock) {
  Work work = std::move(desk.queue.front());
  desk.queue.pop_front();
  desk.running = true;
  lock.unlock();
  const std::exception_ptr error = run(std::move(work));
  if (desk_ != &desk) return false;
  lock.lock();

  Ticket completed = completed_ + 1;
  if (error) {
    error_ = error;
    completed = issued_;
    std::deque<Work> dropped;
    dropped.swap(desk.queue);
    lock.unlock();  // what the jobs own may take its time to go, and goes before they count as done
    dropped.clear();
    lock.lock();
  }
  desk.running = false;
  completed_.store(completed, std::memory_order_release);
  desk.idle.notify_all();
  return true;
}

HostUpdater::Ticket HostUpdater::Impl::submit(std::vector<Work> works) {
  refuse_inside_work("submit");
  if (works.empty() || std::any_of(works.begin(), works.end(), [](const Work& work) { return !work; })) {
    throw std::invalid_argument("zenflow: HostUpdater::submit needs work, got an empty function");
  }
  Desk& desk = *desk_;
  Lock lock(desk.mutex);
  desk.idle.wait(lock, [&] { return !desk.stopping; });
  rethrow_error();
  const bool background = start(desk);
  desk.queue.insert(desk.queue.end(), std::move_iterator(works.begin()), std::move_iterator(works.end()));
  const Ticket ticket = issued_ += works.size();
  if (background) {
    desk.work.notify_one();
    return ticket;
  }
  while (!done(ticket)) {  // in order, also among several submitters
    if (desk.running) {
      desk.idle.wait(lock);
    } else if (!run_next(desk, lock)) {
      break;
    }
  }
  return ticket;
}

void HostUpdater::Impl::wait_until_done(Lock& lock, Ticket ticket) {
  desk_->idle.wait(lock, [&] { return done(ticket); });
  rethrow_error();
}

void HostUpdater::Impl::wait(Ticket ticket) {
  refuse_inside_work("wait");
  Lock lock(desk_->mutex);
  if (ticket > issued_) {
    throw std::invalid_argument("zenflow: ticket " + std::to_string(ticket) + " was never issued; the last one is " +
                                std::to_string(issued_));
  }
  wait_until_done(lock, ticket);
}

void HostUpdater::Impl::wait_all() {
  refuse_inside_work("wait_all");
  Lock lock(desk_->mutex);
  wait_until_done(lock, issued_);
}

void HostUpdater::Impl::hold() {
  Lock lock(desk_->mutex);
  // Protects what jobs write: the child's copy of it must be whole.
  desk_->idle.wait(lock, [&] { return desk_->queue.empty() && !desk_->running; });
  lock.release();
}

void HostUpdater::Impl::abandon() {
  desk_ = new Desk;
  completed_ = issued_;
}

void HostUpdater::Impl::shutdown() noexcept {
  Desk& desk = *desk_;
  Lock lock(desk.mutex);
  desk.idle.wait(lock, [&] { return !desk.stopping; });
  desk.stopping = true;
  std::thread thread = std::move(desk.thread);
  desk.work.notify_one();
  lock.unlock();
  if (thread.joinable()) thread.join();
  lock.lock();
  desk.stopping = false;
  desk.refused = false;
  desk.idle.notify_all();
}

HostUpdater::HostUpdater(int threads, std::vector<int> pin_cpus)
    : impl_(std::make_shared<Impl>(threads, std::move(pin_cpus))) {
  add_fork_member(impl_);
}

HostUpdater::~HostUpdater() {
  impl_->shutdown();
  remove_fork_member(impl_);
}

HostUpdater::Ticket HostUpdater::submit(Work work) {
  std::vector<Work> works;
  works.push_back(std::move(work));
  return impl_->submit(std::move(works));
}

HostUpdater::Ticket HostUpdater::submit_all(std::vector<Work> works) {
  return impl_->submit(std::move(works));
}

bool HostUpdater::done(Ticket ticket) const {
  return impl_->done(ticket);
}

void HostUpdater::wait(Ticket ticket) {
  impl_->wait(ticket);
}

void HostUpdater::wait_all() {
  impl_->wait_all();
}

ThreadPool& HostUpdater::pool() {
  return impl_->pool;
}

}  // namespace zenflow
