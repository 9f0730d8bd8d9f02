// The waiting requests of one device and the threads that serve them.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "io/batch.hpp"

namespace ssdkv {

// Totals since the start, of one direction on one device.
struct Totals {
  std::atomic<uint64_t> submitted{0};    // requests accepted
  std::atomic<uint64_t> requests{0};     // requests ended
  std::atomic<uint64_t> bytes{0};        // moved
  std::atomic<uint64_t> errors{0};       // ended with -errno
  std::atomic<uint64_t> nanoseconds{0};  // spent in the device, summed over requests
};

// The share of one batch that goes to one device.
struct Share {
  std::shared_ptr<Batch> batch;
  std::vector<uint32_t> indices;
  size_t next = 0;
};

// Threads hold this object by shared_ptr, and it owns its descriptor, so one that hangs in a system
// call for ever never sees freed state, nor a descriptor number that now means another file.
class DeviceQueue {
 public:
  // Duplicates fd. Throws std::system_error.
  DeviceQueue(int fd, std::byte* arena);
  ~DeviceQueue();
  DeviceQueue(const DeviceQueue&) = delete;
  DeviceQueue& operator=(const DeviceQueue&) = delete;

  // Takes the one element of `share`; cannot fail, so a batch is queued on all its devices or none.
  void push(std::list<Share>& share) noexcept;

  // Body of a worker thread: serves until stop() was called and nothing waits.
  void serve() noexcept;

  void stop() noexcept;
  void cancel_waiting() noexcept;  // ends what no thread has taken yet with -ECANCELED
  // Whether no request waits or runs; workers of a stopped, idle queue end by themselves.
  bool wait_idle(Clock::time_point deadline);

  // Closes the descriptor, which drops its share of the file's lock; call when no thread serves.
  void release() noexcept;

  const Totals& totals(Op op) const { return totals_[static_cast<size_t>(op)]; }

 private:
  using Taken = std::pair<std::shared_ptr<Batch>, uint32_t>;

  bool take(Taken& taken, bool first);
  bool idle() const;  // call with mutex_ held
  void run(const Taken& taken) noexcept;
  void end(Batch& batch, uint32_t index, int32_t result, uint64_t nanoseconds) noexcept;

  int fd_;
  std::byte* const arena_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable became_idle_;
  std::array<std::list<Share>, 2> waiting_;  // by Op
  unsigned reads_in_row_ = 0;                // while writes waited
  unsigned running_ = 0;                     // taken and not ended
  bool stopping_ = false;
  std::array<Totals, 2> totals_;  // by Op
};

}  // namespace ssdkv
