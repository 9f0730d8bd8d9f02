#include "io/device_queue.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <system_error>

#include "io/file.hpp"

namespace ssdkv {
namespace {

constexpr size_t kReads = static_cast<size_t>(Op::kRead);
constexpr size_t kWrites = static_cast<size_t>(Op::kWrite);

// Reads go first because somebody waits for them; but writes must not wait for ever.
constexpr unsigned kReadsPerWrite = 32;

int duplicate(int fd) {
  const int copy = fcntl(fd, F_DUPFD_CLOEXEC, 3);
  if (copy < 0) throw std::system_error(errno, std::generic_category(), "duplicating a descriptor");
  return copy;
}

}  // namespace

DeviceQueue::DeviceQueue(int fd, std::byte* arena) : fd_(duplicate(fd)), arena_(arena) {}

DeviceQueue::~DeviceQueue() { release(); }

void DeviceQueue::release() noexcept {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

void DeviceQueue::push(std::list<Share>& share) noexcept {
  const Op op = share.front().batch->op();
  const size_t count = share.front().indices.size();
  totals_[static_cast<size_t>(op)].submitted.fetch_add(count, std::memory_order_relaxed);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& queue = waiting_[static_cast<size_t>(op)];
    queue.splice(queue.end(), share);
  }
  if (count == 1) {
    work_.notify_one();
  } else {
    work_.notify_all();
  }
}

bool DeviceQueue::idle() const {
  return running_ == 0 && waiting_[kReads].empty() && waiting_[kWrites].empty();
}

bool DeviceQueue::take(Taken& taken, bool first) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!first && --running_ == 0 && idle()) became_idle_.notify_all();
  work_.wait(lock, [this] {
    return stopping_ || !waiting_[kReads].empty() || !waiting_[kWrites].empty();
  });
  const bool reads = !waiting_[kReads].empty();
  const bool writes = !waiting_[kWrites].empty();
  if (!reads && !writes) return false;
  const bool write = writes && (!reads || reads_in_row_ >= kReadsPerWrite);
  reads_in_row_ = write || !writes ? 0 : reads_in_row_ + 1;
  auto& queue = waiting_[write ? kWrites : kReads];
  Share& share = queue.front();
  taken = {share.batch, share.indices[share.next]};
  if (++share.next == share.indices.size()) queue.pop_front();
  ++running_;
  return true;
}

void DeviceQueue::run(const Taken& taken) noexcept {
  const auto& [batch, index] = taken;
  const Request& request = batch->request(index);
  const auto begin = Clock::now();
  const int32_t result =
      transfer(fd_, batch->op(), arena_ + request.buffer, request.offset, request.length);
  const auto spent = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin);
  end(*batch, index, result, static_cast<uint64_t>(spent.count()));
}

void DeviceQueue::end(Batch& batch, uint32_t index, int32_t result, uint64_t nanoseconds) noexcept {
  // Counted first, so that whoever sees the batch done sees it in the statistics too.
  Totals& totals = totals_[static_cast<size_t>(batch.op())];
  totals.requests.fetch_add(1, std::memory_order_relaxed);
  totals.nanoseconds.fetch_add(nanoseconds, std::memory_order_relaxed);
  if (result < 0) {
    totals.errors.fetch_add(1, std::memory_order_relaxed);
  } else {
    totals.bytes.fetch_add(static_cast<uint64_t>(result), std::memory_order_relaxed);
  }
  batch.complete(index, result);
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
  std::array<std::list<Share>, 2> cancelled;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    cancelled.swap(waiting_);
  }
  for (auto& queue : cancelled) {
    for (Share& share : queue) {
      for (; share.next < share.indices.size(); ++share.next) {
        end(*share.batch, share.indices[share.next], -ECANCELED, 0);
      }
    }
  }
}

bool DeviceQueue::wait_idle(Clock::time_point deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  return became_idle_.wait_until(lock, deadline, [this] { return idle(); });
}

}  // namespace ssdkv
