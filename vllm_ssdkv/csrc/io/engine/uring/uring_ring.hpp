// One io_uring over the files of some devices and the arena. Only the thread that made it uses it.
#pragma once

#include <liburing.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "io/engine/request.hpp"

namespace ssdkv {

struct ArenaRange {
  std::byte* base;
  uint64_t bytes;
};

// A part of a request that goes to the kernel in one piece.
struct Piece {
  Op op;
  uint16_t file;    // position among the files of this ring
  uint64_t offset;  // bytes, in the file
  uint64_t buffer;  // bytes, in the arena
  uint32_t length;
  // Of a chain, in place of `buffer`; it stays until the piece was submitted. Registered memory is
  // not used then: the kernel takes stretches of it from 6.15 on, and of one part of the arena
  // only.
  std::span<const iovec> memory;
};

class UringRing {
 public:
  // Privileges that the kernel granted. To lack one costs CPU, nothing else.
  struct Setup {
    const char* task_run = "";       // "DEFER_TASKRUN", "COOP_TASKRUN" or "default"
    int register_files_errno = 0;    // 0: registered
    int register_buffers_errno = 0;  // 0: memory can be registered
  };

  static constexpr uint64_t kWakeTag = uint64_t{1} << 62;

  // Room for `depth` pieces in flight, and for the poll of wake_fd. Throws std::system_error:
  // ENOSYS and EPERM where there is no io_uring, ENOSYS also for kernels before 5.13.
  UringRing(const std::vector<int>& files, ArenaRange arena, unsigned depth, int wake_fd);
  ~UringRing();  // gives files and memory back before it returns; nothing may be in flight
  UringRing(const UringRing&) = delete;
  UringRing& operator=(const UringRing&) = delete;

  const Setup& setup() const { return setup_; }
  // Parts of the arena that are registered, and those that the kernel refused to register.
  uint64_t registered() const { return registered_; }
  uint64_t refused() const { return refused_; }

  // Both need room in the submission queue, and say false when there is none.
  bool prepare(const Piece& piece, uint64_t tag) noexcept;
  bool prepare_wake() noexcept;  // kWakeTag completes whenever wake_fd is written to

  // Submit what is prepared; wait for `completions` (0 is legal) or `timeout` (zero: no limit).
  // Returns 0 or -errno; being interrupted or timed out is no error.
  int enter(unsigned completions, std::chrono::nanoseconds timeout) noexcept;

  // Call handle(tag, result, more) for everything that has completed.
  template <class Handle>
  void drain(const Handle& handle) {
    io_uring_cqe* cqe = nullptr;
    unsigned head = 0;
    unsigned count = 0;
    io_uring_for_each_cqe(&ring_, head, cqe) {
      handle(cqe->user_data, cqe->res, (cqe->flags & IORING_CQE_F_MORE) != 0);
      ++count;
    }
    io_uring_cq_advance(&ring_, count);
  }

 private:
  // A part of the arena. It is registered, which makes and pins all of its pages, after as many
  // bytes as it has were moved without: by then its pages exist, and a large arena delays no start.
  struct Chunk {
    iovec memory{};
    uint64_t to_move = 0;  // bytes, until it is tried
    bool registered = false;
  };

  void set_up(unsigned depth);
  bool use_registered(const Piece& piece) noexcept;
  void register_chunk(size_t index) noexcept;

  io_uring ring_{};
  const std::vector<int> files_;
  const ArenaRange arena_;
  const int wake_fd_;
  Setup setup_;
  std::vector<Chunk> chunks_;
  uint64_t registered_ = 0;
  uint64_t refused_ = 0;
};

}  // namespace ssdkv
