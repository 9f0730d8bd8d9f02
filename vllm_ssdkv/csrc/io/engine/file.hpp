// System calls on the file behind a device.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "io/engine/batch.hpp"

namespace ssdkv {

// Blocking. Moves bytes between `offset` and memory, kMaxJoined stretches at most, continuing short
// transfers and retrying interrupted ones. Returns the bytes moved (fewer only at the end of the
// file), or -errno.
int32_t transfer(int fd, Op op, std::span<const iovec> memory, uint64_t offset) noexcept;

// Memory behind the first `from` bytes of a chain of requests, stretch by stretch; how many.
size_t memory_of(const Batch& batch, uint32_t first, uint32_t from, std::byte* arena,
                 std::span<iovec, kMaxJoined> memory) noexcept;

// Reserve the first nbytes of the file; it grows to that size. Returns 0 or an errno;
// EOPNOTSUPP where the file system cannot, without the slow emulation that glibc would start.
int preallocate(int fd, uint64_t nbytes) noexcept;

}  // namespace ssdkv
