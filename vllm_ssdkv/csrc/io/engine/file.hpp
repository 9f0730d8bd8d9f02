// System calls on the file behind a device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "io/engine/request.hpp"

namespace ssdkv {

// Blocking. Moves `length` bytes between `memory` and `offset`, continuing short transfers and
// retrying interrupted ones. Returns the bytes moved (fewer only at the end of the file), or
// -errno.
int32_t transfer(int fd, Op op, std::byte* memory, uint64_t offset, uint32_t length) noexcept;

// Reserve the first nbytes of the file; it grows to that size. Returns 0 or an errno;
// EOPNOTSUPP where the file system cannot, without the slow emulation that glibc would start.
int preallocate(int fd, uint64_t nbytes) noexcept;

}  // namespace ssdkv
