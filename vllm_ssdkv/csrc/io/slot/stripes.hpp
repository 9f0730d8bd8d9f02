// Places of the bytes of slots: from slot numbers to requests for the devices, in one call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "io/engine/request.hpp"

namespace ssdkv {

// One list of lanes, as vllm_ssdkv.store.placement.stripe_map.StripeMap, which makes the tables and
// says what they mean.
struct StripeTable {
  int64_t lanes;
  int64_t copies;
  int64_t slot_bytes;
  int64_t first_byte;              // of a device that holds slots
  int64_t merge_units;             // merged requests end at multiples of so many units
  std::vector<int64_t> start;      // [units + 1]: of each unit, bytes of the slot before it
  std::vector<int64_t> device;     // [lanes, copies, units]
  std::vector<int64_t> place;      // [lanes, copies, units]: bytes of the row before it
  std::vector<int64_t> row_bytes;  // [devices]

  int64_t units() const { return static_cast<int64_t>(start.size()) - 1; }  // of a slot

  // Throws std::invalid_argument when the sizes do not fit, or an entry names no device.
  void check() const;
};

// A range of slot numbers that is striped by one table.
struct StripedRange {
  int64_t first;
  int64_t slots;
  const StripeTable* table;
  const int64_t* begin;  // [devices]: bytes before its first unit on each device
};

// Requests, one entry each, ordered by slot and position.
struct SlotRequests {
  std::vector<uint16_t> device;
  std::vector<uint64_t> offset;     // bytes, on the device
  std::vector<uint32_t> length;     // bytes
  std::vector<int64_t> slot_index;  // which of the given slots
  std::vector<uint64_t> buffer;     // bytes, where the pieces of all slots lie back to back
};

// Requests for bytes [offset, offset + length) of one copy of each slot. Offsets are one for all
// slots or one each, ranges ascend. A request is one unit, or, where they may be `merged`, as many
// as lie one after the other; none has byte `cut` of a slot but as its first. Throws
// std::invalid_argument for a slot that is in no range, or bytes that are not all in the slot.
SlotRequests find_slots(std::span<const StripedRange> ranges, std::span<const int64_t> slots,
                        std::span<const int64_t> offsets, int64_t length, int64_t copy, bool merged,
                        int64_t cut);

// Ranges of slots with the tables that stripe them. Immutable.
class Stripes {
 public:
  // `begin` has one entry per range and device. Throws std::invalid_argument for what does not fit
  // together.
  Stripes(std::vector<std::shared_ptr<const StripeTable>> tables, std::span<const int64_t> first,
          std::span<const int64_t> slots, std::span<const int64_t> table_of,
          std::vector<int64_t> begin, size_t devices);

  // As find_slots().
  SlotRequests find(std::span<const int64_t> slots, std::span<const int64_t> offsets,
                    int64_t length, int64_t copy, bool merged, int64_t cut) const {
    return find_slots(ranges_, slots, offsets, length, copy, merged, cut);
  }

  size_t devices() const { return devices_; }

 private:
  const std::vector<std::shared_ptr<const StripeTable>> tables_;
  const std::vector<int64_t> begin_;
  const size_t devices_;
  std::vector<StripedRange> ranges_;
};

}  // namespace ssdkv
