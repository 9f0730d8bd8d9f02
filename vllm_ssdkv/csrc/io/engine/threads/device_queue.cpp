#include "io/engine/threads/device_queue.hpp"

#include <array>
#include <cerrno>
#include <chrono>
#include <span>

#include "io/engine/file.hpp"

namespace ssdkv {

DeviceQueue::DeviceQueue(int fd, std::byte* arena)
    : file_(Descriptor::duplicate(fd)), arena_(arena) {}

void DeviceQueue::push(std::list<Share>& share) noexcept {
  const Op op = share.front().batch->op();
  const size_t count = share.front().indices.size();
  totals_.of(op).submitted.fetch_add(count, std::memory_order_relaxed);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_.push(share);
  }
  if (count == 1) {
    work_.notify_one();
  } else {
    work_.notify_all();
  }
}

bool DeviceQueue::take(Taken& taken, bool first) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!first && --running_ == 0 && waiting_.empty()) became_idle_.notify_all();
  work_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
  if (!waiting_.pop(taken)) return false;
  totals_.add_started(++running_);
  return true;
}

void DeviceQueue::run(const Taken& taken) noexcept {
  const Op op = taken.batch->op();
  const Request& request = taken.batch->request(taken.index);
  const auto begin = Clock::now();
  std::array<iovec, kMaxJoined> memory{};
  const size_t count = memory_of(*taken.batch, taken.index, 0, arena_, memory);
  const int32_t result = transfer(file_.get(), op, std::span(memory).first(count), request.offset);
  if (result < 0) {
    // What one place on the device has is not the fault of its neighbours.
    const uint32_t rest = taken.batch->cut(taken.index);
    if (rest != Batch::kAlone) {
      run(taken);
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        totals_.of(op).submitted.fetch_add(1, std::memory_order_relaxed);
        totals_.add_started(running_);
      }
      run({taken.batch, rest});
      return;
    }
  }
  const auto spent = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin);
  end(taken, result, static_cast<uint64_t>(spent.count()));
}

void DeviceQueue::end(const Taken& taken, int32_t result, uint64_t nanoseconds) noexcept {
  // Counted first, so that whoever sees the batch done sees it in the statistics too.
  totals_.of(taken.batch->op()).add_ended(result, nanoseconds);
  taken.batch->complete(taken.index, result);
}

void DeviceQueue::serve() noexcept {
  Taken taken;
  for (bool first = true; take(taken, first); first = false) {
    run(taken);
    taken = {};  // not the last owner of a batch while idle
  }
}

void DeviceQueue::stop() noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
}

void DeviceQueue::cancel_waiting() noexcept {
  SubmissionQueue cancelled;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    cancelled.swap(waiting_);
  }
  Taken taken;
  while (cancelled.pop(taken)) end(taken, -ECANCELED, 0);
}

bool DeviceQueue::wait_idle(Clock::time_point deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  return became_idle_.wait_until(lock, deadline,
                                 [this] { return running_ == 0 && waiting_.empty(); });
}

}  // namespace ssdkv
