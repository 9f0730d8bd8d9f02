// Pins of rows of which each slot has one or none: every step pins what it reads.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace ssdkv {

inline constexpr int32_t kNoRow = -1;

// Row of each slot, or kNoRow: pinned once more, and used `now`. Throws std::out_of_range for
// slots and rows that do not exist.
std::vector<int32_t> pin_rows(std::span<const int64_t> slots, std::span<const int32_t> row_of,
                              std::span<int32_t> pins, std::span<int64_t> used, int64_t now);

// Skips kNoRow.
void unpin_rows(std::span<const int32_t> rows, std::span<int32_t> pins);

}  // namespace ssdkv
