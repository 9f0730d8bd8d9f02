#include "io/engine/request.hpp"

#include <limits>
#include <stdexcept>
#include <string>

namespace ssdkv {
namespace {

constexpr uint64_t kMaxOffset = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());

[[noreturn]] void refuse(size_t index, const std::string& why) {
  throw std::invalid_argument("request " + std::to_string(index) + ": " + why);
}

}  // namespace

std::vector<Request> check_requests(const RequestArrays& arrays, size_t devices,
                                    uint64_t arena_bytes) {
  std::vector<Request> requests;
  requests.reserve(arrays.n);
  for (size_t i = 0; i < arrays.n; ++i) {
    const Request request{arrays.offset[i], arrays.buffer[i], arrays.length[i], arrays.device[i]};
    if (request.device >= devices) {
      refuse(i, "device " + std::to_string(request.device) + " of " + std::to_string(devices));
    }
    if (request.length == 0 || request.length > kMaxLength) {
      refuse(i, "length " + std::to_string(request.length) + " is not in 1.." +
                    std::to_string(kMaxLength));
    }
    if ((request.offset | request.buffer | request.length) % kAlign != 0) {
      refuse(i, "offset " + std::to_string(request.offset) + ", buffer " +
                    std::to_string(request.buffer) + " and length " +
                    std::to_string(request.length) + " must be multiples of 4096");
    }
    // Subtractions, because sums of hostile values could wrap.
    if (request.buffer > arena_bytes || request.length > arena_bytes - request.buffer) {
      refuse(i, "buffer " + std::to_string(request.buffer) + " + " +
                    std::to_string(request.length) + " is outside the arena of " +
                    std::to_string(arena_bytes) + " bytes");
    }
    if (request.offset > kMaxOffset - request.length) {
      refuse(i, "offset " + std::to_string(request.offset) + " is too large");
    }
    requests.push_back(request);
  }
  return requests;
}

}  // namespace ssdkv
