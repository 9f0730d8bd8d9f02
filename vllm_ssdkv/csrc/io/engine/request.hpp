// One piece of work for a device, and the checks that come before any of it is queued.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ssdkv {

enum class Op : uint8_t { kRead = 0, kWrite = 1 };

// Unit of offsets, lengths and buffers: what O_DIRECT needs on every device we know of.
constexpr uint64_t kAlign = 4096;

// Results are int32, and Linux moves at most this much per call.
constexpr uint64_t kMaxLength = 0x7ffff000;

// Limits of neighbours on a device that go to it as one: what is tried again alone, and what a load
// waits for.
constexpr uint32_t kMaxJoinedBytes = 512 << 10;
constexpr uint32_t kMaxJoined = 32;

struct Request {
  uint64_t offset;  // bytes, on the device
  uint64_t buffer;  // bytes, in the arena
  uint32_t length;  // bytes
  uint16_t device;
};

// Requests given as parallel arrays of n entries.
struct RequestArrays {
  const uint16_t* device;
  const uint64_t* offset;
  const uint32_t* length;
  const uint64_t* buffer;
  size_t n;
};

// Throws std::invalid_argument, naming the first bad entry, unless every request is aligned, not
// empty, inside the arena, and for one of `devices` devices.
std::vector<Request> check_requests(const RequestArrays& arrays, size_t devices,
                                    uint64_t arena_bytes);

}  // namespace ssdkv
