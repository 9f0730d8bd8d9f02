#include "io/engine/file.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <thread>

namespace ssdkv {
namespace {

constexpr int kMaxBusyRetries = 1000;  // of one millisecond each: a second, then the error counts
constexpr std::chrono::milliseconds kBusyPause{1};

}  // namespace

int32_t transfer(int fd, Op op, std::byte* memory, uint64_t offset, uint32_t length) noexcept {
  const auto move = [=](uint32_t from) {
    const auto where = static_cast<off_t>(offset + from);
    return op == Op::kRead ? pread(fd, memory + from, length - from, where)
                           : pwrite(fd, memory + from, length - from, where);
  };
  uint32_t moved = 0;
  int busy = 0;
  while (moved < length) {
    uint32_t from = moved;
    ssize_t n = move(from);
    if (n < 0 && errno == EINVAL && from % kAlign != 0) {
      // O_DIRECT cannot go on inside a block; after a transfer cut there, repeat that block.
      from -= from % static_cast<uint32_t>(kAlign);
      n = move(from);
    }
    if (n < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN && ++busy < kMaxBusyRetries) {
        std::this_thread::sleep_for(kBusyPause);
        continue;
      }
      return -errno;
    }
    const uint32_t reached = from + static_cast<uint32_t>(n);
    if (reached <= moved) break;  // no progress: the end of the file
    moved = reached;
  }
  return static_cast<int32_t>(moved);
}

int preallocate(int fd, uint64_t nbytes) noexcept {
  while (fallocate(fd, 0, 0, static_cast<off_t>(nbytes)) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

}  // namespace ssdkv
