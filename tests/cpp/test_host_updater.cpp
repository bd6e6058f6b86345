// SPDX-License-Identifier: Apache-2.0
#include "host_updater.h"

#include <atomic>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "fork.h"
#include "threads.h"

using zenflow::HostUpdater;
using zenflow::ThreadPool;
using zenflow_test::Event;

namespace {

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "nothing thrown";
}

}  // namespace

TEST(jobs_run_in_order_in_the_background) {
  HostUpdater updater(2, {});
  Event open;
  std::vector<int> order;
  std::vector<HostUpdater::Ticket> tickets;
  for (int i = 0; i < 50; ++i) {
    tickets.push_back(updater.submit([&order, &open, i](ThreadPool& pool) {
      open.wait();
      pool.parallel_for(1, 1, [&](int64_t, int64_t) { order.push_back(i); });
    }));
    CHECK(tickets.back() > (i == 0 ? 0 : tickets[i - 1]));
  }
  CHECK(updater.done(0));
  CHECK(!updater.done(tickets[0]));
  open.set();
  updater.wait(tickets[20]);
  CHECK(updater.done(tickets[20]));
  updater.wait_all();
  CHECK_EQ(order.size(), 50u);
  for (int i = 0; i < 50; ++i) CHECK_EQ(order[i], i);
  updater.wait(0);
  CHECK_THROWS(std::invalid_argument, updater.wait(tickets.back() + 1));
  CHECK_THROWS(std::invalid_argument, updater.submit(nullptr));
}

TEST(what_a_job_owns_is_gone_when_it_is_done) {
  HostUpdater updater(1, {});
  auto owned = std::make_shared<int>(1);
  const std::weak_ptr<int> watched = owned;
  updater.wait(updater.submit([owned = std::move(owned)](ThreadPool&) {}));
  CHECK(watched.expired());
}

TEST(the_first_error_is_kept_and_later_jobs_do_not_run) {
  HostUpdater updater(2, {});
  Event open;
  std::atomic<int> ran{0};
  const auto first = updater.submit([&](ThreadPool&) { ++ran; });
  const auto bad = updater.submit([&](ThreadPool& pool) {
    open.wait();
    pool.parallel_for(2, 1, [](int64_t begin, int64_t) {
      if (begin == 1) throw std::runtime_error("broken");
    });
  });
  const auto later = updater.submit([&](ThreadPool&) { ++ran; });
  updater.wait(first);
  open.set();
  CHECK_EQ(message_of([&] { updater.wait(later); }), "broken");
  CHECK_EQ(message_of([&] { updater.wait(bad); }), "broken");
  CHECK_EQ(message_of([&] { updater.wait(first); }), "broken");
  CHECK_EQ(message_of([&] { updater.wait_all(); }), "broken");
  CHECK_EQ(message_of([&] { updater.submit([&](ThreadPool&) { ++ran; }); }), "broken");
  zenflow::shutdown_all();
  CHECK_EQ(message_of([&] { updater.wait_all(); }), "broken");
  CHECK(updater.done(later));
  CHECK_EQ(ran.load(), 1);
}

TEST(jobs_may_not_submit_or_wait) {
  for (const int which : {0, 1, 2}) {
    HostUpdater updater(1, {});
    updater.submit([&](ThreadPool&) {
      if (which == 0) updater.submit([](ThreadPool&) {});
      if (which == 1) updater.wait(1);
      if (which == 2) zenflow::shutdown_all();
    });
    CHECK_THROWS(std::logic_error, updater.wait_all());
  }
}

TEST(the_destructor_finishes_a_full_queue) {
  const int before = zenflow_test::live_threads();
  std::atomic<int> ran{0};
  Event open;
  std::thread opener;
  {
    HostUpdater updater(2, {});
    for (int i = 0; i < 100; ++i) {
      updater.submit([&](ThreadPool& pool) {
        open.wait();
        pool.parallel_for(2, 1, [&](int64_t, int64_t) { ++ran; });
      });
    }
    opener = std::thread([&] { open.set(); });
  }
  CHECK_EQ(ran.load(), 200);
  opener.join();
  CHECK(zenflow_test::live_threads_become(before));
}

TEST(the_destructor_swallows_an_error_with_a_full_queue) {
  std::atomic<int> ran{0};
  Event open;
  {
    HostUpdater updater(2, {});
    updater.submit([&](ThreadPool&) {
      open.wait();
      throw std::runtime_error("unseen");
    });
    for (int i = 0; i < 100; ++i) updater.submit([&](ThreadPool&) { ++ran; });
    open.set();
  }
  CHECK_EQ(ran.load(), 0);
}

TEST(without_a_background_thread_jobs_run_in_submit) {
  HostUpdater updater(3, {});
  std::vector<int> order;
  std::thread::id ran_on;
  {
    const zenflow_test::NoNewThreads scope;
    for (int i = 0; i < 10; ++i) {
      const auto ticket = updater.submit([&, i](ThreadPool& pool) {
        ran_on = std::this_thread::get_id();
        std::atomic<int> sum{0};
        pool.parallel_for(3, 1, [&](int64_t begin, int64_t end) { sum += static_cast<int>(end - begin); });
        order.push_back(i * sum);
      });
      CHECK(updater.done(ticket));
    }
  }
  CHECK(ran_on == std::this_thread::get_id());
  for (int i = 0; i < 10; ++i) CHECK_EQ(order[i], 3 * i);
  zenflow::shutdown_all();  // after which it tries again
  updater.wait(updater.submit([&](ThreadPool&) { ran_on = std::this_thread::get_id(); }));
  CHECK(ran_on != std::this_thread::get_id());
}

TEST(shutdown_finishes_the_work_and_later_use_starts_again) {
  const int before = zenflow_test::live_threads();
  HostUpdater updater(3, {});
  ThreadPool pool(3);
  std::atomic<int> ran{0};
  for (int round = 1; round <= 3; ++round) {
    for (int i = 0; i < 20; ++i) {
      updater.submit([&](ThreadPool& own) { own.parallel_for(3, 1, [&](int64_t, int64_t) { ++ran; }); });
    }
    pool.parallel_for(3, 1, [&](int64_t, int64_t) { ++ran; });
    zenflow::shutdown_all();
    CHECK_EQ(ran.load(), round * 63);
    CHECK(zenflow_test::live_threads_become(before));
  }
}

TEST(submitters_on_several_threads_and_a_shutdown_between_them) {
  HostUpdater updater(2, {});
  int64_t ran = 0;  // not atomic: two jobs at once would race
  std::vector<std::thread> submitters;
  for (int i = 0; i < 3; ++i) {
    submitters.emplace_back([&] {
      for (int round = 0; round < 200; ++round) {
        const auto ticket = updater.submit([&](ThreadPool&) { ++ran; });
        if (round % 10 == 0) updater.wait(ticket);
        if (round % 50 == 0) zenflow::shutdown_all();
      }
    });
  }
  for (std::thread& submitter : submitters) submitter.join();
  updater.wait_all();
  CHECK_EQ(ran, 600);
}
