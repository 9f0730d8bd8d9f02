// Neighbours on the device and in memory as one request of the engine, and each one's own result:
// see vllm_ssdkv/store/io/coalescing.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "io/engine/request.hpp"

namespace ssdkv {

// Request of each part, and the bytes of it before the part; by part.
struct Parts {
  std::vector<int64_t> request;
  std::vector<int64_t> begin;
};

struct CoalescedRequests {
  std::vector<uint16_t> device;
  std::vector<uint64_t> offset;
  std::vector<uint32_t> length;
  std::vector<uint64_t> buffer;
  Parts parts;

  RequestArrays arrays() const {
    return {device.data(), offset.data(), length.data(), buffer.data(), device.size()};
  }
};

// A request that goes on where the one before it ends joins it, `most` at most. Throws
// std::invalid_argument where that is 0.
CoalescedRequests coalesce(const RequestArrays& parts, size_t most);

// Share of a part in a request's result; of one that was cut short, what there is of the part.
int32_t part_result(int32_t result, int64_t begin, uint32_t length);

}  // namespace ssdkv
