// The waiting requests of one device and the threads that serve them.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <mutex>

#include "io/engine/counters.hpp"
#include "io/engine/descriptor.hpp"
#include "io/engine/submission_queue.hpp"

namespace ssdkv {

// Threads hold this object by shared_ptr, and it owns its descriptor, so one that hangs in a system
// call for ever never sees freed state, nor a descriptor number that now means another file.
class DeviceQueue {
 public:
  // Duplicates fd. Throws std::system_error.
  DeviceQueue(int fd, std::byte* arena);
  DeviceQueue(const DeviceQueue&) = delete;
  DeviceQueue& operator=(const DeviceQueue&) = delete;

  // Takes the element of `share`.
  void push(std::list<Share>& share) noexcept;

  // Body of a worker thread: serves until stop() was called and nothing waits.
  void serve() noexcept;

  void stop() noexcept;
  void cancel_waiting() noexcept;  // ends what no thread has taken yet with -ECANCELED
  // Whether no request waits or runs; workers of a stopped, idle queue end by themselves.
  bool wait_idle(Clock::time_point deadline);

  // Closes the descriptor, which drops its share of the file's lock; call when no thread serves.
  void release() noexcept { file_.close(); }

  const DeviceCounters& totals() const { return totals_; }

 private:
  bool take(Taken& taken, bool first);
  void run(const Taken& taken) noexcept;
  void end(const Taken& taken, int32_t result, uint64_t nanoseconds) noexcept;

  Descriptor file_;
  std::byte* const arena_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable became_idle_;
  SubmissionQueue waiting_;
  unsigned running_ = 0;  // taken and not ended
  bool stopping_ = false;
  DeviceCounters totals_;
};

}  // namespace ssdkv
