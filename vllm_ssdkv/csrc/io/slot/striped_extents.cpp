#include "io/slot/striped_extents.hpp"

#include <stdexcept>

namespace ssdkv {
namespace {

struct Places {
  std::span<const uint64_t> first;
  std::span<const uint64_t> tails;  // empty, or from byte `cut` on
  uint64_t cut;
};

CoalescedRequests placed(const SlotRequests& pieces, const Places& places,
                         std::span<const int64_t> offsets, size_t slots, int64_t length,
                         size_t most) {
  const bool cut = !places.tails.empty();
  if (places.first.size() != slots || (cut && places.tails.size() != slots)) {
    throw std::invalid_argument("not one place for each slot");
  }
  std::vector<uint64_t> at(pieces.buffer.size());
  for (size_t i = 0; i < at.size(); ++i) {
    const auto slot = static_cast<size_t>(pieces.slot_index[i]);
    const uint64_t inside = pieces.buffer[i] - slot * static_cast<uint64_t>(length);
    at[i] = places.first[slot] + inside;
    const auto byte = static_cast<uint64_t>(offsets[offsets.size() == 1 ? 0 : slot]) + inside;
    if (cut && byte >= places.cut) at[i] = places.tails[slot] + byte - places.cut;
  }
  return coalesce(
      {pieces.device.data(), pieces.offset.data(), pieces.length.data(), at.data(), at.size()},
      most);
}

}  // namespace

StripedExtents::StripedExtents(const Stripes& stripes, std::span<const int64_t> slots,
                               std::span<const int64_t> offsets, int64_t length,
                               std::span<const uint64_t> places, bool merged, size_t most,
                               std::span<const uint64_t> tails, int64_t cut)
    : pieces_(stripes.find(slots, offsets, length, 0, merged, cut)),
      devices_(stripes.devices()),
      requests_(placed(pieces_, {places, tails, static_cast<uint64_t>(cut)}, offsets, slots.size(),
                       length, most)) {}

std::vector<double> StripedExtents::bytes_per_device() const {
  std::vector<double> sums(devices_);
  for (size_t i = 0; i < pieces_.device.size(); ++i) sums[pieces_.device[i]] += pieces_.length[i];
  return sums;
}

bool StripedExtents::whole(std::span<const int32_t> results) const {
  if (results.size() != requests_.length.size()) {
    throw std::invalid_argument("that is another batch");
  }
  for (size_t i = 0; i < results.size(); ++i) {
    if (results[i] != int64_t{requests_.length[i]}) return false;
  }
  return true;
}

}  // namespace ssdkv
