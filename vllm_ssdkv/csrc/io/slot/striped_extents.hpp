// Requests for bytes of slots, worked out in one step: where the pieces lie, where they go, and
// which neighbours the engine gets as one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "io/engine/coalesced.hpp"
#include "io/slot/stripes.hpp"

namespace ssdkv {

class StripedExtents {
 public:
  // Bytes [offset, offset + length) of the first copy of each slot; places are arena offsets, one
  // for each. With `tails`, one for each, too, what is from byte `cut` of a slot on belongs there.
  // Pieces that are neighbours, there and on the device, are one request, `most` at most. Throws as
  // Stripes::find() and coalesce(), and std::invalid_argument for another number of places or
  // tails.
  StripedExtents(const Stripes& stripes, std::span<const int64_t> slots,
                 std::span<const int64_t> offsets, int64_t length, std::span<const uint64_t> places,
                 bool merged, size_t most, std::span<const uint64_t> tails, int64_t cut);

  const SlotRequests& pieces() const { return pieces_; }
  const CoalescedRequests& requests() const { return requests_; }

  // Bytes asked of each device of the stripes.
  std::vector<double> bytes_per_device() const;

  // Whether requests with these results have moved all of their bytes.
  bool whole(std::span<const int32_t> results) const;

 private:
  const SlotRequests pieces_;
  const size_t devices_;
  const CoalescedRequests requests_;
};

}  // namespace ssdkv
