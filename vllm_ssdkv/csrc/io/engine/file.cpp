#include "io/engine/file.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <thread>

namespace ssdkv {
namespace {

constexpr int kMaxBusyRetries = 1000;  // of one millisecond each: a second, then the error counts
constexpr std::chrono::milliseconds kBusyPause{1};

}  // namespace

int32_t transfer(int fd, Op op, std::span<const iovec> memory, uint64_t offset) noexcept {
  uint32_t length = 0;
  for (const iovec& stretch : memory) length += static_cast<uint32_t>(stretch.iov_len);
  const auto move = [=](uint32_t from) {
    std::array<iovec, kMaxJoined> left{};
    size_t count = 0;
    size_t skip = from;
    for (const iovec& stretch : memory) {
      const size_t gone = std::min(skip, stretch.iov_len);
      skip -= gone;
      if (gone == stretch.iov_len) continue;
      left[count++] = {static_cast<std::byte*>(stretch.iov_base) + gone, stretch.iov_len - gone};
    }
    const auto where = static_cast<off_t>(offset + from);
    const auto stretches = static_cast<int>(count);
    return op == Op::kRead ? preadv(fd, left.data(), stretches, where)
                           : pwritev(fd, left.data(), stretches, where);
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

size_t memory_of(const Batch& batch, uint32_t first, uint32_t from, std::byte* arena,
                 std::span<iovec, kMaxJoined> memory) noexcept {
  size_t count = 0;
  for (uint32_t i = first; i != Batch::kAlone; i = batch.next(i)) {
    const Request& request = batch.request(i);
    const uint32_t gone = std::min(from, request.length);
    from -= gone;
    if (gone == request.length) continue;
    memory[count++] = {arena + request.buffer + gone, request.length - gone};
  }
  return count;
}

int preallocate(int fd, uint64_t nbytes) noexcept {
  while (fallocate(fd, 0, 0, static_cast<off_t>(nbytes)) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

}  // namespace ssdkv
