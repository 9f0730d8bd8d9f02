#include "cache/row_pins.hpp"

#include <stdexcept>

namespace ssdkv {

namespace {

template <class T>
size_t checked(T number, size_t size) {
  if (number < 0 || static_cast<size_t>(number) >= size) {
    throw std::out_of_range("no such slot or row");
  }
  return static_cast<size_t>(number);
}

}  // namespace

std::vector<int32_t> pin_rows(std::span<const int64_t> slots, std::span<const int32_t> row_of,
                              std::span<int32_t> pins, std::span<int64_t> used, int64_t now) {
  if (pins.size() != used.size()) throw std::out_of_range("pins and uses differ in length");
  std::vector<int32_t> rows;
  rows.reserve(slots.size());
  for (const int64_t slot : slots) {
    const int32_t row = row_of[checked(slot, row_of.size())];
    if (row != kNoRow) checked(row, pins.size());
    rows.push_back(row);
  }
  for (const int32_t row : rows) {
    if (row == kNoRow) continue;
    ++pins[static_cast<size_t>(row)];
    used[static_cast<size_t>(row)] = now;
  }
  return rows;
}

void unpin_rows(std::span<const int32_t> rows, std::span<int32_t> pins) {
  for (const int32_t row : rows) {
    if (row != kNoRow) checked(row, pins.size());
  }
  for (const int32_t row : rows) {
    if (row != kNoRow) --pins[static_cast<size_t>(row)];
  }
}

}  // namespace ssdkv
