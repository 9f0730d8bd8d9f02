#include "io/engine/coalesced.hpp"

#include <algorithm>
#include <stdexcept>

namespace ssdkv {

CoalescedRequests coalesce(const RequestArrays& parts, size_t most) {
  if (most == 0) throw std::invalid_argument("a request has one part at least");
  CoalescedRequests coalesced;
  coalesced.parts.request.reserve(parts.n);
  coalesced.parts.begin.reserve(parts.n);
  for (size_t i = 0; i < parts.n; ++i) {
    const bool follows = i % most != 0 && parts.device[i] == parts.device[i - 1] &&
                         parts.offset[i] == parts.offset[i - 1] + parts.length[i - 1] &&
                         parts.buffer[i] == parts.buffer[i - 1] + parts.length[i - 1];
    if (!follows) {
      coalesced.device.push_back(parts.device[i]);
      coalesced.offset.push_back(parts.offset[i]);
      coalesced.buffer.push_back(parts.buffer[i]);
      coalesced.length.push_back(0);
    }
    coalesced.parts.request.push_back(static_cast<int64_t>(coalesced.length.size()) - 1);
    coalesced.parts.begin.push_back(coalesced.length.back());
    coalesced.length.back() += parts.length[i];
  }
  return coalesced;
}

int32_t part_result(int32_t result, int64_t begin, uint32_t length) {
  if (result < 0) return result;
  return static_cast<int32_t>(std::clamp<int64_t>(result - begin, 0, int64_t{length}));
}

}  // namespace ssdkv
