// Checksums and copies of many pieces of memory, given by absolute address.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ssdkv {

// `threads` below is an upper limit: 0 means "choose". Less than 4 MiB in total is always done on
// the calling thread, because starting threads would cost more than it saves.

// xxh3-64 (seed 0) of nbytes.
uint64_t checksum(const std::byte* data, size_t nbytes) noexcept;

// The same at each of n addresses.
void checksum(const uint64_t* addresses, size_t n, size_t nbytes, unsigned threads, uint64_t* out);

// Ascending positions i where the checksum at addresses[i] is not expected[i].
std::vector<int64_t> verify(const uint64_t* addresses, const uint64_t* expected, size_t n,
                            size_t nbytes, unsigned threads);

struct Piece {
  uint64_t src;
  uint64_t dst;
  uint64_t nbytes;
};

// memcpy to where nobody looks soon: does not fetch what is there into the cache first, where the
// processor can do without. Other threads see it after fence_copies() on this one.
void copy_past_cache(uint64_t dst, uint64_t src, size_t nbytes) noexcept;
void fence_copies() noexcept;

// Gives [address, address + nbytes), multiples of 4096, its memory now and not when first touched,
// and leaves what is there. Returns 0 or an errno: EINVAL on Linux before 5.14.
int populate(uint64_t address, size_t nbytes) noexcept;

// memcpy of every piece; pieces must not overlap one another's destinations.
void copy(const std::vector<Piece>& pieces, unsigned threads);

}  // namespace ssdkv
