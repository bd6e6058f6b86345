// SPDX-License-Identifier: Apache-2.0
#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "floating_point_mode.h"

#include "fork.h"
#include "streaming.h"

namespace zenflow {
namespace {

using Body = FunctionRef<void(int64_t, int64_t)>;

// About 50 us of pauses, the order of a sleeping thread's wake-up: calls in a row find it awake.
constexpr int kSpins = 1000;

void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Returns the first value seen that is not `old`.
template <typename T>
T await_change(const std::atomic<T>& value, T old, int spins) {
  for (int spin = 0; spin < spins; ++spin) {
    const T now = value.load(std::memory_order_acquire);
    if (now != old) return now;
    pause_briefly();
  }
  value.wait(old, std::memory_order_acquire);
  return value.load(std::memory_order_acquire);
}

void pin_this_thread(int cpu) {
  if (cpu < 0 || cpu >= CPU_SETSIZE) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof(set), &set);  // a refusal costs speed, nothing else
}

// What the threads share. A fork's child leaves it behind as it is.
struct Crew {
  std::mutex call;  // held for a whole parallel_for
  std::vector<std::thread> workers;
  bool started = false;

  // The call in progress; written before `epoch` moves on, read by workers after.
  const Body* body = nullptr;
  int64_t count = 0;
  int64_t grain = 1;
  int parts = 1;
  bool stop = false;
  std::vector<std::exception_ptr> errors;  // one per part

  alignas(64) std::atomic<uint32_t> epoch{0};
  alignas(64) std::atomic<int> remaining{0};  // workers that have not finished
};

void run_part(Crew& crew, int part) {
  const Range range = static_range(crew.count, crew.grain, crew.parts, part);
  if (range.begin == range.end) return;
  const RoleScope role(thread_role().in_body);
  const FloatingPointMode mode;
  try {
    (*crew.body)(range.begin, range.end);
    finish_streaming();
  } catch (...) {
    crew.errors[part] = std::current_exception();
  }
}

}  // namespace

Range static_range(int64_t count, int64_t grain, int threads, int index) {
  const int64_t blocks = count / grain + (count % grain != 0);
  const int64_t each = blocks / threads, left_over = blocks % threads;
  const auto boundary = [&](int64_t i) {
    const int64_t block = i * each + std::min(i, left_over);
    return block >= blocks ? count : block * grain;
  };
  return {boundary(index), boundary(index + 1)};
}

class ThreadPool::Impl : public ForkMember {
 public:
  Impl(int threads, std::vector<int> pin_cpus)
      : ForkMember(Rank::kPool),
        threads(threads),
        pin_cpus_(std::move(pin_cpus)),
        spins_(pin_cpus_.empty() ? 0 : kSpins) {}
  ~Impl() override { delete crew_; }

  void parallel_for(int64_t count, int64_t grain, Body body);

  void hold() override { crew_->call.lock(); }
  void release() override { crew_->call.unlock(); }
  void abandon() override { crew_ = new Crew; }
  void shutdown() noexcept override;

  const int threads;
  std::atomic<int> shortfall{0};

 private:
  void start(Crew& crew);
  void serve(Crew& crew, int part, uint32_t epoch);
  // Whether this call began before a fork, made inside its own body, in whose child we are now.
  bool left_behind(const Crew& crew) const { return crew_ != &crew; }

  const std::vector<int> pin_cpus_;
  const int spins_;
  Crew* crew_ = new Crew;
};

void ThreadPool::Impl::start(Crew& crew) {
  if (crew.started) return;
  crew.workers.reserve(threads - 1);
  try {
    for (int part = static_cast<int>(crew.workers.size()) + 1; part < threads; ++part) {
      const uint32_t epoch = crew.epoch.load(std::memory_order_relaxed);
      crew.workers.push_back(
          start_thread("zenflow-" + std::to_string(part), [this, &crew, part, epoch] { serve(crew, part, epoch); }));
    }
  } catch (const std::system_error&) {
    // Fewer threads, same results.
  }
  crew.started = true;
  shortfall = threads - 1 - static_cast<int>(crew.workers.size());
}

void ThreadPool::Impl::serve(Crew& crew, int part, uint32_t epoch) {
  if (part < static_cast<int>(pin_cpus_.size())) pin_this_thread(pin_cpus_[part]);
  for (;;) {
    epoch = await_change(crew.epoch, epoch, spins_);
    if (crew.stop) return;
    run_part(crew, part);
    if (left_behind(crew)) return;
    if (crew.remaining.fetch_sub(1, std::memory_order_acq_rel) == 1) crew.remaining.notify_one();
  }
}

void ThreadPool::Impl::parallel_for(int64_t count, int64_t grain, Body body) {
  if (thread_role().in_body) throw std::logic_error("zenflow: parallel_for called inside a parallel_for body");
  if (count < 0 || grain < 1) {
    throw std::invalid_argument("zenflow: parallel_for needs count >= 0 and grain >= 1, got count " +
                                std::to_string(count) + " and grain " + std::to_string(grain));
  }
  if (count == 0) return;

  Crew& crew = *crew_;
  std::unique_lock lock(crew.call);
  const bool alone = count <= grain || threads == 1;
  if (!alone) start(crew);
  const int workers = alone ? 0 : static_cast<int>(crew.workers.size());
  crew.body = &body;
  crew.count = count;
  crew.grain = grain;
  crew.parts = workers + 1;
  crew.errors.assign(crew.parts, nullptr);
  if (workers > 0) {
    crew.remaining.store(workers, std::memory_order_relaxed);
    crew.epoch.fetch_add(1, std::memory_order_release);
    crew.epoch.notify_all();
  }

  run_part(crew, 0);
  if (left_behind(crew)) throw std::runtime_error("zenflow: fork inside a parallel_for body: other ranges are lost");
  // Protects body, and whatever it refers to, which end with this call.
  for (int left = crew.remaining.load(std::memory_order_acquire); workers > 0 && left != 0;) {
    left = await_change(crew.remaining, left, spins_);
  }

  const auto first = std::find_if(crew.errors.begin(), crew.errors.end(), [](const auto& e) { return e != nullptr; });
  if (first == crew.errors.end()) return;
  const std::exception_ptr error = *first;
  crew.errors.clear();
  lock.unlock();
  std::rethrow_exception(error);
}

void ThreadPool::Impl::shutdown() noexcept {
  Crew& crew = *crew_;
  const std::lock_guard lock(crew.call);
  crew.stop = true;
  crew.epoch.fetch_add(1, std::memory_order_release);
  crew.epoch.notify_all();
  for (std::thread& worker : crew.workers) worker.join();
  crew.workers.clear();
  crew.stop = false;
  crew.started = false;
}

ThreadPool::ThreadPool(int threads, std::vector<int> pin_cpus) {
  if (threads < 1)
    throw std::invalid_argument("zenflow: a pool needs at least 1 thread, got " + std::to_string(threads));
  impl_ = std::make_shared<Impl>(threads, std::move(pin_cpus));
  add_fork_member(impl_);
}

ThreadPool::~ThreadPool() {
  impl_->shutdown();
  remove_fork_member(impl_);
}

int ThreadPool::threads() const {
  return impl_->threads;
}

int ThreadPool::shortfall() const {
  return impl_->shortfall;
}

void ThreadPool::parallel_for(int64_t count, int64_t grain, FunctionRef<void(int64_t begin, int64_t end)> body) {
  impl_->parallel_for(count, grain, body);
}

}  // namespace zenflow
