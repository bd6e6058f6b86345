// SPDX-License-Identifier: Apache-2.0
#include "thread_pool.h"

#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "floating_point_mode.h"
#include "fork.h"
#include "threads.h"
#include "topology.h"

using zenflow::Range;
using zenflow::static_range;
using zenflow::ThreadPool;
using zenflow_test::live_threads;
using zenflow_test::live_threads_become;

namespace {

constexpr int kThreads = 4;

// Ranges [0, grain), [grain, 2 grain)...: one per thread of a pool of kThreads.
constexpr int64_t kGrain = 64;
constexpr int64_t kCount = kThreads * kGrain;

}  // namespace

TEST(static_ranges_cover_every_index_once) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 2000; ++round) {
    const int64_t count = random() % 5000, grain = 1 + random() % 300;
    const int threads = 1 + random() % 17;
    int64_t covered = 0, fewest = count, most = 0;
    for (int i = 0; i < threads; ++i) {
      const Range range = static_range(count, grain, threads, i);
      CHECK_EQ(range.begin, covered);
      CHECK(range.end >= range.begin && range.end <= count);
      CHECK(range.end % grain == 0 || range.end == count);
      covered = range.end;
      const int64_t blocks = (range.end - range.begin + grain - 1) / grain;
      fewest = std::min(fewest, blocks);
      most = std::max(most, blocks);
    }
    CHECK_EQ(covered, count);
    CHECK(most - fewest <= 1);
  }
  CHECK_EQ(static_range(INT64_MAX, 3, 2, 1).end, INT64_MAX);
}

TEST(parallel_for_runs_the_static_ranges_each_on_its_own_thread) {
  std::mt19937_64 random(2);
  for (const int threads : {1, 2, 3, kThreads}) {
    ThreadPool pool(threads);
    std::vector<std::thread::id> owner(threads);
    owner[0] = std::this_thread::get_id();
    for (int round = 0; round < 200; ++round) {
      const int64_t count = random() % 3000, grain = 1 + random() % 100;
      std::vector<int> hits(count);
      std::vector<std::pair<Range, std::thread::id>> seen;
      std::mutex mutex;
      pool.parallel_for(count, grain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) ++hits[i];
        const std::lock_guard lock(mutex);
        seen.push_back({{begin, end}, std::this_thread::get_id()});
      });
      for (const int hit : hits) CHECK_EQ(hit, 1);
      const int parts = count <= grain ? 1 : threads;
      int expected = 0;
      for (int i = 0; i < parts; ++i) {
        const Range range = static_range(count, grain, parts, i);
        if (range.begin == range.end) continue;
        ++expected;
        for (const auto& [got, thread] : seen) {
          if (got.begin != range.begin) continue;
          CHECK_EQ(got.end, range.end);
          if (owner[i] == std::thread::id()) owner[i] = thread;
          CHECK(owner[i] == thread);
        }
      }
      CHECK_EQ(static_cast<int>(seen.size()), expected);
    }
  }
}

TEST(an_exception_of_any_range_arrives_after_all_ranges) {
  ThreadPool pool(kThreads);
  for (int thrower = 0; thrower < kThreads; ++thrower) {
    std::atomic<int> finished{0};
    std::string message;
    try {
      pool.parallel_for(kCount, kGrain, [&](int64_t begin, int64_t) {
        ++finished;
        if (begin == thrower * kGrain) throw std::runtime_error("range " + std::to_string(thrower));
      });
    } catch (const std::runtime_error& error) {
      message = error.what();
    }
    CHECK_EQ(message, "range " + std::to_string(thrower));
    CHECK_EQ(finished.load(), kThreads);
  }
  // Of several, that of the lowest range.
  try {
    pool.parallel_for(kCount, kGrain, [](int64_t begin, int64_t) { throw begin; });
    CHECK(false);
  } catch (int64_t begin) {
    CHECK_EQ(begin, 0);
  }
  pool.parallel_for(kCount, kGrain, [](int64_t, int64_t) {});
}

TEST(nested_calls_and_bad_arguments_are_refused) {
  ThreadPool pool(kThreads), other(2);
  const auto nothing = [](int64_t, int64_t) {};
  CHECK_THROWS(std::logic_error, pool.parallel_for(kCount, kGrain, [&](int64_t, int64_t) {
    pool.parallel_for(kCount, kGrain, nothing);
  }));
  CHECK_THROWS(std::logic_error,
               pool.parallel_for(1, kGrain, [&](int64_t, int64_t) { other.parallel_for(1, 1, nothing); }));
  CHECK_THROWS(std::logic_error, pool.parallel_for(kCount, kGrain, [](int64_t, int64_t) { zenflow::shutdown_all(); }));
  CHECK_THROWS(std::invalid_argument, pool.parallel_for(-1, 1, nothing));
  CHECK_THROWS(std::invalid_argument, pool.parallel_for(1, 0, nothing));
  CHECK_THROWS(std::invalid_argument, ThreadPool(0));
  pool.parallel_for(kCount, kGrain, nothing);
}

#if defined(__x86_64__)
TEST(bodies_keep_denormals_and_round_to_nearest_whatever_the_caller_does) {
  constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040, kRoundUp = 0x4000;
  const unsigned before = _mm_getcsr();
  const unsigned odd = before | kFlushToZero | kDenormalsAreZero | kRoundUp;
  _mm_setcsr(odd);
  {
    ThreadPool pool(kThreads);  // workers inherit the odd mode
    std::vector<unsigned> modes(kCount);
    std::vector<float> halves(kCount);
    volatile float smallest = 1.17549435e-38f;
    pool.parallel_for(kCount, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        modes[i] = _mm_getcsr() & 0xFFC0;
        halves[i] = smallest * 0.5f;
      }
    });
    const unsigned after = _mm_getcsr() & 0xFFC0;
    _mm_setcsr(before);
    CHECK_EQ(after, odd & 0xFFC0);
    for (int64_t i = 0; i < kCount; ++i) {
      CHECK_EQ(modes[i], 0x1F80u);
      CHECK(halves[i] > 0.0f);
    }
  }
}
#endif

TEST(workers_block_signals_and_have_names) {
  ThreadPool pool(kThreads);
  std::vector<std::string> names(kThreads);
  std::vector<int> blocked(kThreads);
  pool.parallel_for(kCount, kGrain, [&](int64_t begin, int64_t) {
    char name[16] = {};
    pthread_getname_np(pthread_self(), name, sizeof(name));
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, nullptr, &mask);
    names[begin / kGrain] = name;
    blocked[begin / kGrain] = sigismember(&mask, SIGINT) + sigismember(&mask, SIGTERM) + sigismember(&mask, SIGCHLD);
  });
  CHECK_EQ(blocked[0], 0);
  for (int i = 1; i < kThreads; ++i) {
    CHECK_EQ(names[i], "zenflow-" + std::to_string(i));
    CHECK_EQ(blocked[i], 3);
  }
}

TEST(pins_hold_for_workers_only_and_may_fail) {
  const std::vector<int> mask = zenflow::affinity_cpus();
  ThreadPool pool(3, {mask[0], mask.back(), 1 << 20});
  std::vector<std::vector<int>> seen(3);
  pool.parallel_for(3, 1, [&](int64_t begin, int64_t) { seen[begin] = zenflow::affinity_cpus(); });
  CHECK(seen[0] == mask);
  CHECK(seen[1] == std::vector<int>{mask.back()});
  CHECK(seen[2] == mask);
}

TEST(callers_take_turns) {
  ThreadPool pool(2);
  std::vector<int64_t> sums(3);
  int64_t inside = 0;  // not atomic: two calls at once would race
  std::vector<std::thread> callers;
  for (int64_t& sum : sums) {
    callers.emplace_back([&pool, &sum, &inside] {
      for (int round = 0; round < 300; ++round) {
        pool.parallel_for(1, 1, [&](int64_t, int64_t) { ++inside; });
        std::atomic<int64_t> total{0};
        pool.parallel_for(100, 10, [&](int64_t begin, int64_t end) { total += end - begin; });
        sum += total;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const int64_t sum : sums) CHECK_EQ(sum, 300 * 100);
  CHECK_EQ(inside, 900);
}

TEST(threads_start_when_needed_and_end_with_the_pool) {
  const int before = live_threads();
  for (int round = 0; round < 200; ++round) {
    ThreadPool pool(3);
    CHECK_EQ(pool.threads(), 3);
    pool.parallel_for(10, 10, [](int64_t, int64_t) {});
    if (round == 0) CHECK_EQ(live_threads(), before);
    pool.parallel_for(10, 1, [](int64_t, int64_t) {});
    if (round == 0) CHECK_EQ(live_threads(), before + 2);
  }
  CHECK(live_threads_become(before));
}

TEST(the_pool_goes_on_without_threads_that_cannot_be_created) {
  ThreadPool pool(kThreads);
  const auto sum = [&] {
    std::atomic<int64_t> total{0};
    pool.parallel_for(1000, 7, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) total += i;
    });
    return total.load();
  };
  {
    const zenflow_test::NoNewThreads scope;
    CHECK_EQ(sum(), 499500);
    CHECK_EQ(pool.shortfall(), kThreads - 1);
  }
  zenflow::shutdown_all();
  CHECK_EQ(sum(), 499500);
  CHECK_EQ(pool.shortfall(), 0);
}
