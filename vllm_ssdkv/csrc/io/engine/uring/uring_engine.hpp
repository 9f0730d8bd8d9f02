// The fast engine: io_uring, one ring and one thread for up to 8 devices.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "io/engine/batch.hpp"
#include "io/engine/counters.hpp"
#include "io/engine/uring/uring_worker.hpp"

namespace ssdkv {

class UringEngine {
 public:
  // Starts the threads and registers the descriptors with their rings. The arena must outlive
  // every request: see close(). Throws std::invalid_argument, and std::system_error where there is
  // no io_uring (ENOSYS, EPERM).
  UringEngine(const std::vector<int>& fds, uint64_t arena_address, uint64_t arena_bytes,
              unsigned queue_depth);
  ~UringEngine();  // as close(0)
  UringEngine(const UringEngine&) = delete;
  UringEngine& operator=(const UringEngine&) = delete;

  // Does not block on I/O. `joined`: neighbours on a device go to it as one, wherever they are in
  // memory. Throws std::invalid_argument, also in a forked child.
  std::shared_ptr<Batch> submit(Op op, const RequestArrays& arrays, bool joined = false);

  // As of the threads engine, and "in_flight_max.<device>", "ring_enters.<ring>" and so on.
  Statistics statistics() const;

  // Setup of each ring.
  const std::vector<UringRing::Setup>& setups() const { return setups_; }

  // Serve what is queued until the deadline, cancel the rest, and give up on requests that the
  // kernel still has: then the result is false and the arena must stay mapped for ever. May be
  // called again, and is then true once the last of them ended.
  bool close(double timeout_s);

 private:
  bool forked() const noexcept;  // in a child process, which has none of our threads

  const pid_t owner_;
  const size_t devices_;
  const uint64_t arena_bytes_;
  std::vector<std::shared_ptr<UringWorker>> workers_;
  std::vector<UringRing::Setup> setups_;
  std::mutex submit_mutex_;  // nothing is queued after closed_ is set
  bool closed_ = false;
  std::mutex close_mutex_;
  std::vector<std::thread> threads_;  // by ring
};

}  // namespace ssdkv
