#include "io/engine/batch.hpp"

#include <sys/eventfd.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "io/engine/coalesced.hpp"

namespace ssdkv {

Clock::time_point deadline_after(double seconds) {
  constexpr double kTenYears = 10.0 * 365 * 86400;
  const double bounded = seconds > 0 ? std::min(seconds, kTenYears) : 0.0;
  return Clock::now() +
         std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(bounded));
}

Batch::Batch(Op op, std::vector<Request> requests)
    : op_(op),
      requests_(std::move(requests)),
      results_(std::make_unique<std::atomic<int32_t>[]>(requests_.size())),
      left_(requests_.size()) {
  for (size_t i = 0; i < requests_.size(); ++i) {
    results_[i].store(kPending, std::memory_order_relaxed);
  }
}

void Batch::join(uint32_t index, uint32_t next) {
  if (next_.empty()) next_.assign(requests_.size(), kAlone);
  next_[index] = next;
}

uint32_t Batch::length(size_t first) const {
  uint32_t sum = requests_[first].length;
  for (uint32_t i = next(first); i != kAlone; i = next(i)) sum += requests_[i].length;
  return sum;
}

size_t Batch::set(size_t first, int32_t result) noexcept {
  size_t count = 0;
  int64_t begin = 0;
  for (auto i = static_cast<uint32_t>(first); i != kAlone; i = next(i), ++count) {
    const uint32_t length = requests_[i].length;
    results_[i].store(part_result(result, begin, length), std::memory_order_release);
    begin += length;
  }
  return count;
}

void Batch::end(size_t count) noexcept {
  // Sequentially consistent with wait_for_less(): either it sees what is left, or is seen here.
  const size_t left = left_.fetch_sub(count) - count;
  if (left == 0 || left < enough_.load()) {
    // Under the mutex, or a waiter between its test and its sleep would miss it.
    const std::lock_guard<std::mutex> lock(mutex_);
    ended_.notify_all();
    if (left == 0) write_notice();
  }
}

size_t Batch::wait_for_less(size_t left, Clock::time_point deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  enough_.store(left);
  ended_.wait_until(lock, deadline, [this, left] { return left_.load() < left; });
  enough_.store(0);
  return left_.load();
}

void Batch::notify(int eventfd) {
  Descriptor notice = Descriptor::duplicate(eventfd);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (notice_.get() >= 0) throw std::invalid_argument("the batch has somebody to notify already");
  notice_ = std::move(notice);
  if (done()) write_notice();
}

void Batch::write_notice() noexcept {
  // Once: notify() may see the end before who ends the last request comes to tell of it. A full
  // counter already says that something has ended.
  if (notice_.get() >= 0 && !std::exchange(noticed_, true)) {
    (void)!eventfd_write(notice_.get(), 1);
  }
}

bool Batch::wait_until(Clock::time_point deadline) {
  if (done()) return true;
  std::unique_lock<std::mutex> lock(mutex_);
  return ended_.wait_until(lock, deadline, [this] { return done(); });
}

std::vector<int32_t> Batch::results() const {
  std::vector<int32_t> copy(requests_.size());
  for (size_t i = 0; i < copy.size(); ++i) copy[i] = result(i);
  return copy;
}

}  // namespace ssdkv
