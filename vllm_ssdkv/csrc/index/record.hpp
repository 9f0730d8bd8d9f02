// One record of the journal, as docs/format.md lays it out.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace ssdkv {

using Key = std::array<std::byte, 32>;  // block hash

enum class Kind : uint32_t { kPut = 1, kDel = 2 };

struct Record {
  uint32_t kind;
  uint32_t reserved;
  uint64_t slot;
  uint64_t epoch;
  uint64_t sequence;
  Key key;  // zero in a DEL
  uint64_t checksum;
};
static_assert(sizeof(Record) == 72 && std::endian::native == std::endian::little);

// A record with its checksum.
Record sealed(Kind kind, uint64_t slot, uint64_t epoch, uint64_t sequence, const Key& key);

// Whether it is whole and says something that we write.
bool is_valid(const Record& record);

}  // namespace ssdkv
