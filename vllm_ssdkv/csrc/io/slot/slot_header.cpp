#include "io/slot/slot_header.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "io/slot/memory.hpp"

namespace ssdkv {

void HeaderShape::check() const {
  if (header_bytes < kHeaderTail || used_bytes > header_bytes - kHeaderTail ||
      fixed_bytes > used_bytes) {
    throw std::invalid_argument("the parts of a header do not fit into it");
  }
}

bool right_header(const std::byte* header, const std::byte* fixed, const HeaderShape& shape) {
  if (std::memcmp(header, fixed, shape.fixed_bytes) != 0) return false;
  const size_t body = shape.header_bytes - kHeaderTail;
  const bool zeros = std::all_of(header + shape.used_bytes, header + body,
                                 [](std::byte one) { return one == std::byte{0}; });
  uint64_t sum = 0;
  for (size_t i = kHeaderTail; i-- > 0;) {  // little-endian
    sum = sum << 8U | std::to_integer<uint64_t>(header[body + i]);
  }
  return zeros && sum == checksum(header, body);
}

}  // namespace ssdkv
