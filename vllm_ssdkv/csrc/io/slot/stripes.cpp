#include "io/slot/stripes.hpp"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace ssdkv {
namespace {

const StripedRange& range_of(std::span<const StripedRange> ranges, int64_t slot) {
  const auto behind =
      std::upper_bound(ranges.begin(), ranges.end(), slot,
                       [](int64_t number, const StripedRange& r) { return number < r.first; });
  if (behind == ranges.begin() || slot - (behind - 1)->first >= (behind - 1)->slots) {
    throw std::invalid_argument("there is no slot " + std::to_string(slot));
  }
  return *(behind - 1);
}

void check_bytes(const StripeTable& table, int64_t offset, int64_t length) {
  if (length > 0 && offset >= 0 && offset <= table.slot_bytes - length) return;
  throw std::invalid_argument(std::to_string(length) + " bytes from " + std::to_string(offset) +
                              " on leave the slot of " + std::to_string(table.slot_bytes) +
                              " bytes, or are none");
}

}  // namespace

void StripeTable::check() const {
  const bool ascends =
      start.size() > 1 && start.front() == 0 &&
      std::adjacent_find(start.begin(), start.end(), std::greater_equal<>()) == start.end();
  const bool shape = ascends && lanes > 0 && copies > 0 && merge_units > 0 && slot_bytes > 0 &&
                     slot_bytes <= start.back() && first_byte >= 0 &&
                     device.size() == static_cast<size_t>(lanes * copies * units()) &&
                     place.size() == device.size() && row_bytes.size() <= UINT16_MAX;
  if (!shape) throw std::invalid_argument("the tables of a stripe map do not fit its shape");
  const auto devices = static_cast<int64_t>(row_bytes.size());
  for (const int64_t one : device) {
    if (one < 0 || one >= devices) throw std::invalid_argument("a stripe map names no device");
  }
}

SlotRequests find_slots(std::span<const StripedRange> ranges, std::span<const int64_t> slots,
                        std::span<const int64_t> offsets, int64_t length, int64_t copy, bool merged,
                        int64_t cut) {
  if (offsets.size() != 1 && offsets.size() != slots.size()) {
    throw std::invalid_argument("slots and offsets differ in length");
  }
  if (copy < 0) throw std::invalid_argument("no copy " + std::to_string(copy));
  SlotRequests found;
  for (size_t i = 0; i < slots.size(); ++i) {
    const StripedRange& range = range_of(ranges, slots[i]);
    const StripeTable& table = *range.table;
    const int64_t start = offsets[offsets.size() == 1 ? 0 : i];
    check_bytes(table, start, length);
    const int64_t inside = slots[i] - range.first;
    const int64_t row = inside / table.lanes;
    const int64_t phase = (inside % table.lanes) * table.copies + copy % table.copies;
    const auto behind = std::upper_bound(table.start.begin(), table.start.end(), start);
    int64_t unit = behind - table.start.begin() - 1;
    int64_t end = start;
    while (end < start + length) {
      const int64_t begin = end;
      if (begin == table.start[static_cast<size_t>(unit) + 1]) ++unit;
      end = std::min(start + length, table.start[static_cast<size_t>(unit) + 1]);
      if (begin < cut && cut < end) end = cut;
      const auto entry = static_cast<size_t>(phase * table.units() + unit);
      const int64_t device = table.device[entry];
      // A slot's consecutive units on one device have consecutive places: they are contiguous.
      if (merged && begin > start && begin != cut && device == found.device.back() &&
          unit % table.merge_units != 0) {
        found.length.back() += static_cast<uint32_t>(end - begin);
        continue;
      }
      const auto column = static_cast<size_t>(device);
      const int64_t disk = range.begin[column] + table.first_byte + row * table.row_bytes[column] +
                           table.place[entry] + begin - table.start[static_cast<size_t>(unit)];
      found.device.push_back(static_cast<uint16_t>(device));
      found.offset.push_back(static_cast<uint64_t>(disk));
      found.length.push_back(static_cast<uint32_t>(end - begin));
      found.slot_index.push_back(static_cast<int64_t>(i));
      found.buffer.push_back(
          static_cast<uint64_t>(static_cast<int64_t>(i) * length + begin - start));
    }
  }
  return found;
}

Stripes::Stripes(std::vector<std::shared_ptr<const StripeTable>> tables,
                 std::span<const int64_t> first, std::span<const int64_t> slots,
                 std::span<const int64_t> table_of, std::vector<int64_t> begin, size_t devices)
    : tables_(std::move(tables)), begin_(std::move(begin)), devices_(devices) {
  const size_t n = first.size();
  bool fits = slots.size() == n && table_of.size() == n && begin_.size() == n * devices;
  for (const auto& table : tables_) fits = fits && table->row_bytes.size() == devices;
  int64_t end = 0;
  for (size_t i = 0; fits && i < n; ++i) {
    fits = table_of[i] >= 0 && static_cast<size_t>(table_of[i]) < tables_.size() &&
           first[i] >= end && slots[i] >= 0 &&
           slots[i] <= std::numeric_limits<int64_t>::max() - first[i];
    if (!fits) break;
    end = first[i] + slots[i];
    ranges_.push_back({first[i], slots[i], tables_[static_cast<size_t>(table_of[i])].get(),
                       begin_.data() + i * devices});
  }
  if (!fits) throw std::invalid_argument("the tables of a placement do not fit its devices");
}

}  // namespace ssdkv
