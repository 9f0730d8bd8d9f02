// The first bytes of a slot, as docs/format.md has them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ssdkv {

struct HeaderShape {
  size_t header_bytes;
  size_t fixed_bytes;  // which are known before the header is read
  size_t used_bytes;   // behind them are zeros

  // Throws std::invalid_argument unless the parts fit into each other.
  void check() const;
};

constexpr size_t kHeaderTail = 8;  // xxh3-64 of all before it

// Whether a header begins with the bytes at `fixed`, and is whole.
bool right_header(const std::byte* header, const std::byte* fixed, const HeaderShape& shape);

}  // namespace ssdkv
