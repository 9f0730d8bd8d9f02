// The waiting requests of some devices, and the one thread with the ring that serves them.
#pragma once

#include <sys/uio.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <future>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "io/engine/counters.hpp"
#include "io/engine/descriptor.hpp"
#include "io/engine/submission_queue.hpp"
#include "io/engine/uring/uring_ring.hpp"

namespace ssdkv {

// The thread holds this object by shared_ptr, and it owns its descriptors, so requests that a
// device never answers see neither freed state nor a descriptor number that means another file.
class UringWorker {
 public:
  // Duplicates the descriptors. Throws std::system_error.
  UringWorker(const std::vector<int>& fds, ArenaRange arena, unsigned queue_depth);
  UringWorker(const UringWorker&) = delete;
  UringWorker& operator=(const UringWorker&) = delete;

  // Body of the thread: says whether the ring could be made, then serves until stop() was called
  // and every request has ended, then closes the descriptors.
  void serve(std::promise<UringRing::Setup>& started) noexcept;

  // Takes the elements of the lists, one list per device.
  void push(std::span<std::list<Share>> shares) noexcept;

  void stop() noexcept;
  void cancel_waiting() noexcept;  // ends what the kernel does not have yet with -ECANCELED
  // Whether no request waits or is in flight; the thread of a stopped, idle worker ends by itself.
  bool wait_idle(Clock::time_point deadline);

  // Counters of the devices, which have the numbers from `device` on, and of ring number `ring`.
  void append_to(Statistics& all, size_t device, size_t ring) const;

 private:
  // A request that has left the queue and has not ended.
  struct Flight {
    Taken taken;
    uint32_t moved = 0;  // bytes
    uint32_t from = 0;   // where the piece in flight begins, in the request
    uint32_t length = 0;
    uint32_t rest = Batch::kAlone;  // of a chain that failed: what is tried alone after this one
    uint16_t device = 0;
    Clock::time_point began;
    Clock::time_point busy_since;  // when the kernel first said "again"
  };

  struct Device {
    SubmissionQueue waiting;  // under mutex_
    bool room = true;         // under mutex_: whether the thread could start a request at once
    unsigned in_flight = 0;
    std::atomic<uint64_t> in_flight_max{0};
    DeviceCounters totals;
  };

  struct Ended {
    Taken taken;
    int32_t result;
  };

  void run(UringRing& ring) noexcept;
  bool take();  // fills to_issue_; false when it is time to end
  void start(size_t device, Taken&& taken);
  void try_alone(uint32_t slot, uint32_t index);  // a request of a chain that failed
  void report() noexcept;                         // tells the owners of ended_
  bool issue(UringRing& ring) noexcept;           // false when something had no room
  void wait(UringRing& ring, bool all_issued) noexcept;
  void reap(UringRing& ring) noexcept;
  void on_completion(uint32_t slot, int32_t result, Clock::time_point now);
  void end(uint32_t slot, int32_t result, Clock::time_point now);
  void wake() noexcept;

  std::vector<Descriptor> files_;
  const ArenaRange arena_;
  const unsigned queue_depth_;
  const Descriptor wake_;
  std::vector<Device> devices_;

  std::mutex mutex_;
  std::condition_variable became_idle_;
  uint64_t outstanding_ = 0;         // under mutex_: pushed and not ended
  bool stopping_ = false;            // under mutex_
  std::atomic<bool> asleep_{false};  // set under mutex_; the thread waits or is about to

  // The thread's alone.
  std::vector<Flight> flights_;                        // by slot; the slot is the tag in the ring
  std::vector<std::array<iovec, kMaxJoined>> memory_;  // by slot: of a chain's piece
  std::vector<uint32_t> free_;                         // slots
  size_t freed_ = 0;                                   // slots, since outstanding_ was told
  uint64_t bytes_taken_ = 0;                           // of the requests that have a slot
  std::vector<uint32_t> to_issue_;                     // slots with a piece for the kernel
  std::vector<uint32_t> later_;                        // slots that try again at retry_at_
  Clock::time_point retry_at_;
  std::vector<Ended> ended_;
  bool wake_armed_ = false;
  bool full_ = false;  // no device has room

  std::atomic<uint64_t> enters_{0};
  std::atomic<uint64_t> wakes_{0};
  std::atomic<uint64_t> retries_{0};     // pieces issued again: cut short, interrupted or refused
  std::atomic<uint64_t> registered_{0};  // parts of the arena
  std::atomic<uint64_t> refused_{0};     // parts of the arena that the kernel did not register
  std::atomic<uint64_t> errors_{0};      // of the ring itself
};

}  // namespace ssdkv
