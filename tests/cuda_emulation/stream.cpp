// SPDX-License-Identifier: Apache-2.0
#include "stream.h"

#include <fenv.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "sanitizers.h"

namespace emulation {
namespace {

int64_t number_from(const char* variable, int64_t otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr ? std::atoll(text) : otherwise;
}

// What all streams share.
struct Machine {
  std::mutex mutex;
  std::condition_variable done;  // a record is
  std::vector<Stream*> streams;
  std::set<std::string> held;
  std::atomic<uint64_t> seed = static_cast<uint64_t>(number_from("ZENFLOW_EMULATION_SEED", 1));
  std::atomic<int64_t> delay_us = number_from("ZENFLOW_EMULATION_DELAY_US", 50);
};

// Never destroyed: threads of streams may outlive main.
Machine& machine() {
  static auto* all = new Machine;
  return *all;
}

using Lock = std::unique_lock<std::mutex>;

}  // namespace

Stream::Stream(int device, const std::string& label)
    : device_(device), label_(label), random_(seed() + std::hash<std::string>()(label)) {}

std::shared_ptr<Stream> Stream::make(int device, const std::string& label) {
  auto stream = std::make_shared<Stream>(device, label);
  {
    const Lock lock(machine().mutex);
    machine().streams.push_back(stream.get());
    stream->held_ = machine().held.count(label) > 0;
  }
  std::thread([own = stream]() mutable {
    const Invisible invisible;
    own->run();
    own.reset();
  }).detach();
  return stream;
}

uint64_t Stream::push(Work work, std::vector<Span> touches, bool sleeps, const Cost& cost) {
  const Instant now = std::chrono::steady_clock::now();
  auto operation = std::make_unique<Operation>(Operation{std::move(work), std::move(touches), sleeps, cost, now, 0});
  release(operation.get());
  const Lock lock(machine().mutex);
  operation->sequence = ++queued_;
  queue_.push_back(std::move(operation));
  wake_.notify_one();
  return queued_;
}

void Stream::queue(Work work, std::vector<Span> touches, const Cost& cost) {
  push(std::move(work), std::move(touches), true, cost);
}

std::shared_ptr<Record> Stream::record() {
  auto record = std::make_shared<Record>();
  record->stream = shared_from_this();
  const auto complete = [this, record](Random&) {
    release(record.get());
    const Lock lock(machine().mutex);
    record->time = is_paced() ? free_at_ : std::chrono::steady_clock::now();
    record->done = true;
    machine().done.notify_all();
  };
  // The worker may complete it before this returns, but nobody asks for its sequence before that.
  record->sequence = push(complete, {}, false);
  return record;
}

void Stream::wait(std::shared_ptr<Record> record) {
  push(
      [this, record](Random&) {
        {
          Lock lock(machine().mutex);
          blocked_ = true;
          if (!record->done) record->stream->demand(record->sequence);
          wake_held();
          machine().done.wait(lock, [&] { return record->done; });
          blocked_ = false;
          if (is_paced()) free_at_ = std::max(free_at_, record->time);
        }
        acquire(record.get());
      },
      {}, false);
}

bool Stream::query() {
  {
    const Lock lock(machine().mutex);
    demand(queued_);
    if (!queue_.empty()) return false;
  }
  acquire(this);
  return true;
}

void Stream::close() {
  const Lock lock(machine().mutex);
  closed_ = true;
  demand(queued_);
  wake_.notify_one();
}

void Stream::demand(uint64_t sequence) {
  if (sequence <= demanded_) return;
  demanded_ = sequence;
  wake_.notify_one();
}

// Whether a held stream may run depends on all others.
void Stream::wake_held() {
  for (Stream* stream : machine().streams) {
    if (stream->held_) stream->wake_.notify_one();
  }
}

bool Stream::may_run() const {
  if (queue_.empty()) return closed_;
  if (!held_) return true;
  if (queue_.front()->sequence > demanded_) return false;
  const auto& streams = machine().streams;
  return std::all_of(streams.begin(), streams.end(), [](const Stream* s) { return s->held_ || s->is_resting(); });
}

void Stream::sleep_a_while() {
  const int64_t most = machine().delay_us;
  if (most <= 0) return;
  const int64_t choice = random_.below(4);
  if (choice == 0) std::this_thread::sleep_for(std::chrono::microseconds(random_.below(most) + 1));
  if (choice == 1) std::this_thread::yield();
}

void Stream::keep_pace(const Operation& operation) {
  free_at_ = std::max(free_at_, operation.queued_at);
  if (operation.cost.activity != Activity::kNone) free_at_ = occupy(operation.cost, free_at_, label_);
}

void Stream::run(const Operation& operation) {
  const bool paced = is_paced();
  if (paced) {
    keep_pace(operation);
  } else if (operation.sleeps) {
    sleep_a_while();
  }
  acquire(&operation);
  operation.work(random_);
  if (paced && operation.cost.activity != Activity::kNone) std::this_thread::sleep_until(free_at_);
  release(this);
}

void Stream::run() {
  fesetenv(FE_DFL_ENV);  // a device knows nothing of the host's rounding or flush-to-zero
  for (;;) {
    const Operation* operation = nullptr;
    {
      Lock lock(machine().mutex);
      wake_.wait(lock, [&] { return may_run(); });
      if (queue_.empty()) {
        auto& streams = machine().streams;
        streams.erase(std::find(streams.begin(), streams.end(), this));
        wake_held();
        return;
      }
      operation = queue_.front().get();
    }
    run(*operation);
    const Lock lock(machine().mutex);
    queue_.pop_front();
    wake_held();
  }
}

void await(const std::shared_ptr<Record>& record) {
  Lock lock(machine().mutex);
  if (!record->done) record->stream->demand(record->sequence);
  machine().done.wait(lock, [&] { return record->done; });
}

void wait_for(const std::shared_ptr<Record>& record) {
  await(record);
  acquire(record.get());
}

bool is_done(const std::shared_ptr<Record>& record) {
  {
    const Lock lock(machine().mutex);
    if (!record->done) record->stream->demand(record->sequence);
    if (!record->done) return false;
  }
  acquire(record.get());
  return true;
}

bool queued_work_touches(Span bytes) {
  const Invisible invisible;
  const Lock lock(machine().mutex);
  for (const Stream* stream : machine().streams) {
    for (const auto& operation : stream->queue_) {
      for (const Span& touched : operation->touches) {
        if (touched.begin < bytes.begin + bytes.bytes && bytes.begin < touched.begin + touched.bytes) return true;
      }
    }
  }
  return false;
}

void set_seed(uint64_t seed) {
  machine().seed = seed;
}

uint64_t seed() {
  return machine().seed;
}

void set_delay(int64_t microseconds) {
  machine().delay_us = microseconds;
}

void hold(const std::vector<std::string>& labels) {
  const Invisible invisible;
  const Lock lock(machine().mutex);
  machine().held = {labels.begin(), labels.end()};
  for (Stream* stream : machine().streams) {
    stream->held_ = machine().held.count(stream->label_) > 0;
    stream->wake_.notify_one();
  }
}

}  // namespace emulation
