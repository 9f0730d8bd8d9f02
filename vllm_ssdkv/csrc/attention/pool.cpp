#include "attention/pool.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

namespace ssdkv::attention {
namespace {

// Grows, never shrinks: a thread's scratch is at most about 1 MiB (one query tile and one key
// tile).
class Scratch {
 public:
  std::byte* reserve(std::size_t bytes) {
    if (bytes > size_) {
      data_.reset(static_cast<std::byte*>(::operator new[](bytes, std::align_val_t{kAlign})));
      size_ = bytes;
    }
    return data_.get();
  }

 private:
  static constexpr std::size_t kAlign = 64;
  struct Release {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{kAlign}); }
  };
  std::unique_ptr<std::byte, Release> data_;
  std::size_t size_ = 0;
};

struct Job {
  PoolWork work = nullptr;
  void* context = nullptr;
  std::int64_t tasks = 0;
};

class Pool {
 public:
  // False if another call holds the pool.
  bool try_run(const Job& job, std::int64_t threads, std::size_t scratch_bytes,
               std::byte* own_scratch) {
    const std::unique_lock holder(call_, std::try_to_lock);
    if (!holder.owns_lock()) return false;
    const auto helpers = static_cast<std::size_t>(threads - 1);
    {
      const std::lock_guard guard(mutex_);
      prepare(helpers, scratch_bytes);
      job_ = job;
      next_.store(0, std::memory_order_relaxed);
      limit_ = helpers;
      joined_ = 0;
      open_ = true;
      ++generation_;
    }
    // Waking sleepers that may not join costs them a context switch: wake as many as are wanted
    // where few are.
    if (helpers < helpers_.size()) {
      for (std::size_t i = 0; i < helpers; ++i) wake_.notify_one();
    } else {
      wake_.notify_all();
    }
    drain(job, own_scratch);
    std::unique_lock guard(mutex_);
    open_ = false;  // a helper that has not woken yet has nothing left to do: do not wait for it
    idle_.wait(guard, [this] { return active_ == 0; });
    return true;
  }

 private:
  struct Helper {
    Scratch scratch;
    std::byte* buffer = nullptr;
  };

  void prepare(std::size_t helpers, std::size_t scratch_bytes) {
    while (helpers_.size() < helpers) {
      auto helper = std::make_unique<Helper>();
      helpers_.reserve(helpers_.size() + 1);
      start(helper.get());
      helpers_.push_back(std::move(helper));
    }
    // Any helper may be the one that wakes, so every one needs room.
    for (auto& helper : helpers_) helper->buffer = helper->scratch.reserve(scratch_bytes);
  }

  void start(Helper* helper) {
    // Signals are for the host's threads: block them all while the helper inherits the mask.
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      std::thread([this, helper] { loop(helper); }).detach();
    } catch (...) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void loop(Helper* helper) {
    // The host pins its main thread and children inherit that; the kernel cuts this mask to what is
    // allowed.
    cpu_set_t every;
    CPU_ZERO(&every);
    for (std::size_t cpu = 0; cpu < CPU_SETSIZE; ++cpu) CPU_SET(cpu, &every);
    sched_setaffinity(0, sizeof(every), &every);

    std::uint64_t seen = 0;
    std::unique_lock guard(mutex_);
    for (;;) {
      wake_.wait(guard, [&] { return open_ && generation_ != seen; });
      seen = generation_;
      if (joined_ == limit_) continue;
      ++joined_;
      ++active_;
      const Job job = job_;
      std::byte* const buffer = helper->buffer;
      guard.unlock();
      drain(job, buffer);
      guard.lock();
      if (--active_ == 0) idle_.notify_one();
    }
  }

  void drain(const Job& job, std::byte* scratch) {
    for (;;) {
      const std::int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
      if (task >= job.tasks) return;
      job.work(job.context, task, scratch);
    }
  }

  std::mutex call_;  // held for the whole of a call
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  std::vector<std::unique_ptr<Helper>> helpers_;
  Job job_;
  std::atomic<std::int64_t> next_{0};
  std::size_t limit_ = 0;
  std::size_t joined_ = 0;
  std::size_t active_ = 0;
  std::uint64_t generation_ = 0;
  bool open_ = false;
};

// Never destroyed: helpers sleep in it until the process ends. After fork() the child has none of
// the helpers and cannot know the state of the locks, so it forgets the parent's pool.
std::atomic<Pool*> current{nullptr};

Pool& pool() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { current.store(nullptr); });
  static_cast<void>(registered);
  Pool* found = current.load(std::memory_order_acquire);
  if (found == nullptr) {
    auto fresh = std::make_unique<Pool>();
    if (current.compare_exchange_strong(found, fresh.get())) found = fresh.release();
  }
  return *found;
}

}  // namespace

void run_tasks(std::int64_t tasks, std::int64_t threads, std::size_t scratch_bytes, PoolWork work,
               void* context) {
  thread_local Scratch own;
  std::byte* const scratch = own.reserve(scratch_bytes);
  threads = std::min(threads, tasks);
  if (threads > 1 && pool().try_run(Job{work, context, tasks}, threads, scratch_bytes, scratch))
    return;
  for (std::int64_t task = 0; task < tasks; ++task) work(context, task, scratch);
}

}  // namespace ssdkv::attention
