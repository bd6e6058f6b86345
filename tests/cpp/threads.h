// SPDX-License-Identifier: Apache-2.0
//
// What the thread tests share: an event to order threads by, the number of live threads, and a
// scope in which the system creates no thread.
#pragma once

#include <dirent.h>
#include <pthread.h>

#include <chrono>
#include <cstddef>
#include <future>
#include <thread>

namespace zenflow_test {

// Set once, awaited by any number of threads.
class Event {
 public:
  void set() { promise_.set_value(); }
  void wait() const { future_.wait(); }
  bool is_set() const { return future_.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }

 private:
  std::promise<void> promise_;
  std::shared_future<void> future_ = promise_.get_future().share();
};

inline int live_threads() {
  int count = 0;
  DIR* directory = opendir("/proc/self/task");
  while (const dirent* entry = readdir(directory)) count += entry->d_name[0] != '.';
  closedir(directory);
  return count;
}

// A joined thread may be listed a moment longer, so this asks again for a while.
inline bool live_threads_become(int count) {
  for (int attempt = 0; attempt < 100000; ++attempt) {
    if (live_threads() == count) return true;
    std::this_thread::yield();
  }
  return false;
}

// New threads ask for a stack larger than the address space, so pthread_create fails.
class NoNewThreads {
 public:
  NoNewThreads() {
    pthread_getattr_default_np(&before_);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, size_t{1} << 50);
    pthread_setattr_default_np(&attributes);
    pthread_attr_destroy(&attributes);
  }
  ~NoNewThreads() {
    pthread_setattr_default_np(&before_);
    pthread_attr_destroy(&before_);
  }

 private:
  pthread_attr_t before_;
};

}  // namespace zenflow_test
