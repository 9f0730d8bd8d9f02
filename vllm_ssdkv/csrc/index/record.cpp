#include "index/record.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace ssdkv {
namespace {

constexpr size_t kSummed = offsetof(Record, checksum);
// All three are signed 64-bit numbers in Python; nothing that we write exceeds that.
constexpr uint64_t kLimit = uint64_t{1} << 63;

}  // namespace

Record sealed(Kind kind, uint64_t slot, uint64_t epoch, uint64_t sequence, const Key& key) {
  Record record{static_cast<uint32_t>(kind), 0, slot, epoch, sequence, key, 0};
  record.checksum = XXH3_64bits(&record, kSummed);
  return record;
}

bool is_valid(const Record& record) {
  const auto kind = static_cast<Kind>(record.kind);
  return record.checksum == XXH3_64bits(&record, kSummed) &&
         (kind == Kind::kPut || kind == Kind::kDel) && record.slot < kLimit &&
         record.epoch < kLimit && record.sequence < kLimit;
}

}  // namespace ssdkv
