// SPDX-License-Identifier: Apache-2.0
//
// fork() with work in flight. Not under TSan, whose runtime aborts when a forked child makes threads. ASan's allocator,
// unlike glibc's, knows nothing of fork: a child hangs if it was forked while another thread allocated. So here threads
// that run beside a fork have begun before it, and do not end until it is done.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "fork.h"
#include "host_updater.h"
#include "threads.h"

using zenflow::HostUpdater;
using zenflow::ThreadPool;
using zenflow_test::Event;

#ifdef __SANITIZE_THREAD__

TEST(fork) {
  std::printf("skipped: under TSan a forked child cannot create threads\n");
}

#else

namespace {

constexpr int64_t kCount = 1000;
constexpr unsigned kPatience = 60;  // seconds; a child that hangs is ended by SIGALRM

// Runs `child` in a fork and returns its exit status: 0 if it returned true, 1 if not or it threw,
// -1 if it was killed.
int status_of_fork(const std::function<bool()>& child) {
  const pid_t pid = fork();
  if (pid == 0) {
    alarm(kPatience);
    try {
      _exit(child() ? 0 : 1);
    } catch (...) {
      _exit(1);
    }
  }
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

void add_one(ThreadPool& pool, std::vector<int>& values) {
  pool.parallel_for(kCount, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) ++values[i];
  });
}

bool all_equal(const std::vector<int>& values, int expected) {
  for (const int value : values) {
    if (value != expected) return false;
  }
  return true;
}

// A pool, an updater and what they write.
struct Machine {
  std::vector<int> values = std::vector<int>(kCount);
  ThreadPool pool{3};
  std::unique_ptr<HostUpdater> updater = std::make_unique<HostUpdater>(3, std::vector<int>{});
  HostUpdater::Ticket last = 0;

  void submit(int jobs) {
    for (int i = 0; i < jobs; ++i) {
      last = updater->submit([this](ThreadPool& own) { add_one(own, values); });
    }
  }

  // In the child: all that was submitted is whole and done; everything works, and ends.
  bool works_after(int jobs) {
    bool good = updater->done(last) && all_equal(values, jobs);
    updater->wait(last);
    submit(5);
    updater->wait_all();
    add_one(pool, values);
    good = good && all_equal(values, jobs + 6);
    submit(5);
    zenflow::shutdown_all();
    good = good && all_equal(values, jobs + 11);
    submit(5);
    updater.reset();
    return good && all_equal(values, jobs + 16);
  }
};

}  // namespace

TEST(fork_with_work_in_flight) {
  Machine machine;
  for (int round = 1; round <= 20; ++round) {
    machine.submit(20);
    CHECK_EQ(status_of_fork([&] { return machine.works_after(20 * round); }), 0);
  }
  machine.updater->wait_all();
  CHECK(all_equal(machine.values, 400));
}

TEST(fork_from_another_thread_than_the_user) {
  Machine machine;
  std::atomic<bool> stop{false};
  Event begun;
  std::thread user([&] {
    std::vector<int> own(kCount);
    add_one(machine.pool, own);  // starts its threads
    machine.submit(1);
    machine.updater->wait_all();
    begun.set();
    while (!stop) {
      machine.submit(3);
      add_one(machine.pool, own);
      machine.updater->wait_all();
    }
  });
  std::atomic<int> status{0};
  std::thread forker([&] {
    begun.wait();
    for (int round = 0; round < 20; ++round) {
      status = status | status_of_fork([&] { return machine.works_after(machine.values[0]); });
    }
  });
  forker.join();
  stop = true;
  user.join();
  CHECK_EQ(status.load(), 0);
}

TEST(fork_waits_for_calls_under_way) {
  zenflow::CallMutex calls;
  HostUpdater updater(2, {});
  std::vector<int> values(kCount);
  int begun = 0, ended = 0;
  std::atomic<bool> stop{false};
  Event running;
  std::thread caller([&] {
    running.set();
    while (!stop) {
      const std::lock_guard lock(calls.mutex());
      ++begun;
      updater.wait(updater.submit([&](ThreadPool& pool) { add_one(pool, values); }));
      ++ended;
    }
  });
  running.wait();
  int status = 0;
  for (int round = 0; round < 50; ++round) {
    status |= status_of_fork([&] {
      const std::lock_guard lock(calls.mutex());
      return begun == ended && all_equal(values, ended);
    });
  }
  stop = true;
  caller.join();
  CHECK_EQ(status, 0);
}

TEST(forks_from_two_threads_at_once) {
  Machine machine;
  machine.submit(50);
  std::atomic<int> status{0};
  std::barrier both(2);
  std::vector<std::thread> forkers;
  forkers.reserve(2);
  for (int i = 0; i < 2; ++i) {
    forkers.emplace_back([&] {
      both.arrive_and_wait();
      for (int round = 0; round < 10; ++round) {
        status = status | status_of_fork([&] { return machine.works_after(50); });
      }
      both.arrive_and_wait();
    });
  }
  for (std::thread& forker : forkers) forker.join();
  CHECK_EQ(status.load(), 0);
  machine.updater->wait_all();
  CHECK(all_equal(machine.values, 50));
}

TEST(fork_inside_a_job_and_inside_bodies) {
  HostUpdater updater(3, {});
  std::atomic<int> status{0};
  const auto nothing = [] { return true; };
  updater.wait(updater.submit([](ThreadPool& pool) { pool.parallel_for(3, 1, [](int64_t, int64_t) {}); }));
  updater.submit([&](ThreadPool& pool) {
    status = status | status_of_fork(nothing);
    pool.parallel_for(3, 1, [&](int64_t, int64_t) { status = status | status_of_fork(nothing); });
  });
  Event waiting;
  updater.submit([&](ThreadPool&) {
    waiting.wait();
    status = status | status_of_fork(nothing);
  });
  std::thread forker([&] {  // waits for the job above, which forks meanwhile
    waiting.set();
    status = status | status_of_fork(nothing);
  });
  updater.wait_all();
  forker.join();
  CHECK_EQ(status.load(), 0);
}

TEST(a_child_that_leaves_a_body_by_returning_gets_an_error) {
  ThreadPool pool(3);
  pool.parallel_for(3, 1, [](int64_t, int64_t) {});  // so that no thread is being born at the fork
  pid_t child = -1;
  bool refused = false;
  try {
    pool.parallel_for(3, 1, [&](int64_t begin, int64_t) {
      if (begin == 0) child = fork();
    });
  } catch (const std::runtime_error&) {
    refused = true;
  }
  if (child == 0) {
    alarm(kPatience);
    std::vector<int> values(kCount);
    add_one(pool, values);
    _exit(refused && all_equal(values, 1) ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  CHECK_EQ(status, 0);
  CHECK(!refused);
}

TEST(fork_while_pools_come_and_go) {
#ifdef __SANITIZE_ADDRESS__
  std::printf("skipped: ASan's allocator may hang in a child forked while another thread allocates\n");
#else
  std::atomic<bool> stop{false};
  std::thread user([&] {
    while (!stop) {
      Machine machine;
      std::vector<int> own(kCount);
      machine.submit(2);
      add_one(machine.pool, own);
    }
  });
  int status = 0;
  for (int round = 0; round < 30; ++round) {
    status |= status_of_fork([] {
      Machine fresh;
      return fresh.works_after(0);
    });
  }
  stop = true;
  user.join();
  CHECK_EQ(status, 0);
#endif
}

#endif
