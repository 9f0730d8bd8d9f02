// The portable engine: blocking calls on a pool of threads per device.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "io/engine/batch.hpp"
#include "io/engine/threads/device_queue.hpp"

namespace ssdkv {

class ThreadsEngine {
 public:
  // Starts queue_depth threads per descriptor. The arena must outlive every thread: see close().
  // Throws std::invalid_argument and std::system_error.
  ThreadsEngine(const std::vector<int>& fds, uint64_t arena_address, uint64_t arena_bytes,
                unsigned queue_depth);
  ~ThreadsEngine();  // as close(0)
  ThreadsEngine(const ThreadsEngine&) = delete;
  ThreadsEngine& operator=(const ThreadsEngine&) = delete;

  // Does not block on I/O. `joined`: neighbours on a device go to it as one, wherever they are in
  // memory. Throws std::invalid_argument, also in a forked child.
  std::shared_ptr<Batch> submit(Op op, const RequestArrays& arrays, bool joined = false);

  // Name and value, e.g. {"read_bytes.0", 4096}.
  Statistics statistics() const;

  // Serve what is queued until the deadline, cancel the rest, and give up on threads that still
  // hang in a call: then the result is false and the arena must stay mapped for ever. May be called
  // again, and is then true once the last of them came back.
  bool close(double timeout_s);

 private:
  bool forked() const noexcept;  // in a child process, which has none of our threads

  const pid_t owner_;
  const uint64_t arena_bytes_;
  std::vector<std::shared_ptr<DeviceQueue>> queues_;
  std::mutex submit_mutex_;  // nothing is queued after closed_ is set
  bool closed_ = false;
  std::mutex close_mutex_;
  std::vector<std::vector<std::thread>> threads_;  // by device
};

}  // namespace ssdkv
