// SPDX-License-Identifier: Apache-2.0
#include "fork.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

namespace zenflow {
namespace {

using Members = std::vector<std::shared_ptr<ForkMember>>;

struct Registry {
  std::mutex list;                       // guards members and held; every fork happens under it
  Members members;                       // by rank
  Members held;                          // by the fork that owns `forking`
  std::mutex* forking = new std::mutex;  // one fork at a time holds members; abandoned in a child
};

thread_local bool holds_calls = false;  // by hold_calls_for_fork(), until this thread has forked

bool working() {
  return thread_role().in_job || thread_role().in_body;
}

bool contains(const Members& members, const std::shared_ptr<ForkMember>& member) {
  return std::find(members.begin(), members.end(), member) != members.end();
}

void before_fork();
void after_fork_in_parent();
void after_fork_in_child();

Registry& registry() {
  // Never destroyed: pools of static lifetime may still come and go at exit.
  static Registry* const only = [] {
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    return new Registry;
  }();
  return *only;
}

// An updater that has just appeared may have a job in flight that needs a pool which we hold.
void release_pools(Registry& r) {
  std::erase_if(r.held, [](const auto& member) {
    if (member->rank != ForkMember::Rank::kPool) return false;
    member->release();
    return true;
  });
}

// Called and left with `list` locked. It is open while we wait, since a job in flight may create and
// drop pools; what appears meanwhile is held in its turn. Members of ranks beyond `last` are left alone.
void hold_members(Registry& r, ForkMember::Rank last) {
  for (;;) {
    const auto next = std::find_if(r.members.begin(), r.members.end(), [&](const auto& member) {
      return member->rank <= last && !contains(r.held, member);
    });
    if (next == r.members.end()) return;
    const std::shared_ptr<ForkMember> member = *next;
    if (member->rank == ForkMember::Rank::kUpdater) release_pools(r);
    r.list.unlock();
    member->hold();
    r.list.lock();
    r.held.push_back(member);
  }
}

void before_fork() {
  Registry& r = registry();
  if (!working() && !holds_calls) r.forking->lock();
  r.list.lock();
  if (!working()) hold_members(r, ForkMember::Rank::kPool);
}

void after_fork_in_parent() {
  Registry& r = registry();
  holds_calls = false;
  if (working()) {
    r.list.unlock();
    return;
  }
  {
    Members released;  // last references may go with it; their pools want `list`
    released.swap(r.held);
    r.list.unlock();
    for (const auto& member : released) member->release();
  }
  r.forking->unlock();
}

void after_fork_in_child() {
  Registry& r = registry();
  Members held;
  held.swap(r.held);
  for (const auto& member : r.members) member->abandon();
  for (const auto& member : held) {
    if (!contains(r.members, member)) member->abandon();
  }
  holds_calls = false;
  r.forking = new std::mutex;  // perhaps locked by a thread that is not here
  r.list.unlock();             // locked by this very thread
}

}  // namespace

void add_fork_member(std::shared_ptr<ForkMember> member) {
  Registry& r = registry();
  const std::lock_guard lock(r.list);
  const auto place = std::upper_bound(r.members.begin(), r.members.end(), member,
                                      [](const auto& a, const auto& b) { return a->rank < b->rank; });
  r.members.insert(place, std::move(member));
}

void remove_fork_member(const std::shared_ptr<ForkMember>& member) {
  Registry& r = registry();
  const std::lock_guard lock(r.list);
  std::erase(r.members, member);
}

class CallMutex::Impl : public ForkMember {
 public:
  Impl() : ForkMember(Rank::kCall) {}
  ~Impl() override { delete mutex; }

  void hold() override { mutex->lock(); }
  void release() override { mutex->unlock(); }
  void abandon() override { mutex = new std::mutex; }
  void shutdown() noexcept override {}

  std::mutex* mutex = new std::mutex;
};

CallMutex::CallMutex() : impl_(std::make_shared<Impl>()) {
  add_fork_member(impl_);
}

CallMutex::~CallMutex() {
  remove_fork_member(impl_);
}

std::mutex& CallMutex::mutex() const {
  return *impl_->mutex;
}

void hold_calls_for_fork(FunctionRef<void()> take_lock) {
  if (!working()) {
    Registry& r = registry();
    r.forking->lock();
    holds_calls = true;
    r.list.lock();
    hold_members(r, ForkMember::Rank::kCall);
    r.list.unlock();
  }
  take_lock();
}

void shutdown_all() {
  if (working()) throw std::logic_error("zenflow: shutdown_all() called inside a job or a parallel_for body");
  Registry& r = registry();
  Members members;
  {
    const std::lock_guard lock(r.list);
    members = r.members;
  }
  for (const auto& member : members) member->shutdown();
}

ThreadRole& thread_role() {
  thread_local ThreadRole role;
  return role;
}

std::thread start_thread(std::string name, std::function<void()> main) {
  // Inherited from here on, so that no moment is left open. Faults stay deliverable: they concern
  // the thread that commits them, and Python's faulthandler wants to see them.
  sigset_t blocked;
  sigfillset(&blocked);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS}) sigdelset(&blocked, fault);
  struct MaskScope {
    explicit MaskScope(const sigset_t& mask) { pthread_sigmask(SIG_SETMASK, &mask, &before); }
    ~MaskScope() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
    sigset_t before;
  } scope(blocked);

  return std::thread([name = std::move(name), main = std::move(main)] {
    pthread_setname_np(pthread_self(), name.c_str());
    main();
  });
}

}  // namespace zenflow
