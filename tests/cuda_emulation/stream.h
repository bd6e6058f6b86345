// SPDX-License-Identifier: Apache-2.0
// Streams and their records. A stream is a thread that runs its operations in order, each piece of work after a random
// delay. Nothing orders two threads but what CUDA says: an operation comes after the call that queued it, after the
// records that it waits for, and before what waits for it.
//
// A held stream is as slow as CUDA allows: it runs an operation only once somebody waits for it, and then only when all
// other streams have nothing left to do or wait themselves.
//
// Stream's members and waits are called out of TSan's sight (Invisible); the functions at the end hide themselves.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "pace.h"
#include "random.h"

namespace emulation {

struct Span {
  uintptr_t begin;
  size_t bytes;
};

class Stream;

// A point in a stream's work: one cudaEventRecord, or the end of what a call waits for.
struct Record {
  std::shared_ptr<Stream> stream;
  uint64_t sequence = 0;  // of the operation that completes it
  bool done = false;
  Instant time;
};

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  using Work = std::function<void(Random&)>;

  static std::shared_ptr<Stream> make(int device, const std::string& label);
  Stream(int device, const std::string& label);

  int device() const { return device_; }
  const std::string& label() const { return label_; }

  // Queues work that touches these bytes. It is called with the stream's random numbers. On a paced device it has a
  // cost.
  void queue(Work work, std::vector<Span> touches = {}, const Cost& cost = {});
  std::shared_ptr<Record> record();
  void wait(std::shared_ptr<Record> record);
  // Whether all that was queued is done; if so, it comes before what the caller does next.
  bool query();
  // Its thread ends once all is done.
  void close();

  bool capturing = false;

 private:
  struct Operation {
    Work work;
    std::vector<Span> touches;
    bool sleeps;
    Cost cost;
    Instant queued_at;
    uint64_t sequence;
  };

  friend void await(const std::shared_ptr<Record>& record);
  friend bool is_done(const std::shared_ptr<Record>& record);
  friend bool queued_work_touches(Span bytes);
  friend void hold(const std::vector<std::string>& labels);
  void run();
  void run(const Operation& operation);
  uint64_t push(Work work, std::vector<Span> touches, bool sleeps, const Cost& cost = {});
  void demand(uint64_t sequence);
  bool may_run() const;
  static void wake_held();
  bool is_resting() const { return queue_.empty() || blocked_; }
  void sleep_a_while();
  void keep_pace(const Operation& operation);

  const int device_;
  const std::string label_;
  Random random_;
  Instant free_at_;  // paced: when its last operation ends; of its own thread
  std::condition_variable wake_;
  // Guarded by the machine's mutex.
  std::deque<std::unique_ptr<Operation>> queue_;  // the first one may be running
  uint64_t queued_ = 0, demanded_ = 0;
  bool held_ = false, blocked_ = false, closed_ = false;
};

// The host waits for a record; what came before it on its stream comes before what the caller does next.
void wait_for(const std::shared_ptr<Record>& record);
// The same, but nothing comes before what the caller does next.
void await(const std::shared_ptr<Record>& record);
// Whether the record is done; if so, the same.
bool is_done(const std::shared_ptr<Record>& record);

// Whether work that is queued on any stream touches these bytes.
bool queued_work_touches(Span bytes);

// Settings: the seed of streams to come, the longest delay before an operation, and the labels of the streams, present
// and future, that are held.
void set_seed(uint64_t seed);
uint64_t seed();
void set_delay(int64_t microseconds);
void hold(const std::vector<std::string>& labels);

}  // namespace emulation
