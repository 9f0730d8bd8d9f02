// Handle of a caller on its requests on their way. Every engine of this module uses it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "io/engine/descriptor.hpp"
#include "io/engine/request.hpp"

namespace ssdkv {

using Clock = std::chrono::steady_clock;

// The point `seconds` from now; negative and NaN mean now, long times are cut to 10 years.
Clock::time_point deadline_after(double seconds);

class Batch {
 public:
  static constexpr int32_t kPending = std::numeric_limits<int32_t>::min();

  Batch(Op op, std::vector<Request> requests);

  Op op() const { return op_; }
  size_t size() const { return requests_.size(); }
  const Request& request(size_t index) const { return requests_[index]; }

  // Have request `next`, which goes on where `index` ends on the device, move with it in one call,
  // wherever their memory is: a chain, which is known by its first request. Before any is queued.
  void join(uint32_t index, uint32_t next);
  // Have the first request of a chain be alone again; returns the rest, a chain, or kAlone. Only by
  // who is to complete the chain, and then has to complete both.
  uint32_t cut(uint32_t first) noexcept {
    return next_.empty() ? kAlone : std::exchange(next_[first], kAlone);
  }
  // Request that moves behind this one in one call with it; kAlone: none.
  static constexpr uint32_t kAlone = std::numeric_limits<uint32_t>::max();
  uint32_t next(size_t index) const { return next_.empty() ? kAlone : next_[index]; }
  // Bytes of a chain.
  uint32_t length(size_t first) const;

  // Called exactly once per chain, with its bytes, by whichever thread ended it. The bytes of a
  // read are visible to every thread that has seen done() or wait() return true afterwards.
  void complete(size_t first, int32_t result) noexcept { end(set(first, result)); }
  // The same in two steps, for an engine that ends many at once: every set(), then one end() with
  // the sum of what they return, the requests of the chain.
  size_t set(size_t first, int32_t result) noexcept;
  void end(size_t count) noexcept;

  bool done() const noexcept { return left_.load(std::memory_order_acquire) == 0; }
  bool wait_until(Clock::time_point deadline);
  // Blocks until less than `left` requests have not ended, or the deadline; how many have not. One
  // thread at a time.
  size_t wait_for_less(size_t left, Clock::time_point deadline);
  int32_t result(size_t index) const noexcept {
    return results_[index].load(std::memory_order_acquire);
  }
  std::vector<int32_t> results() const;

  // Add 1 to an eventfd when all is done, at once if it is already: for event loops, which cannot
  // block in wait_until(). Called once at most. The thread that ends the last request does it,
  // without the interpreter. Duplicates fd; throws std::system_error and std::invalid_argument.
  void notify(int eventfd);

 private:
  void write_notice() noexcept;

  const Op op_;
  const std::vector<Request> requests_;
  const std::unique_ptr<std::atomic<int32_t>[]> results_;
  std::vector<uint32_t> next_;  // empty where nothing is joined
  std::atomic<size_t> left_;
  std::atomic<size_t> enough_{0};  // somebody is to be woken when less than this are left
  std::mutex mutex_;
  std::condition_variable ended_;
  Descriptor notice_;
  bool noticed_ = false;
};

}  // namespace ssdkv
