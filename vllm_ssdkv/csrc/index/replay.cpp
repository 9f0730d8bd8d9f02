#include "index/replay.hpp"

#include <algorithm>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <utility>

#include "index/key_map.hpp"
#include "index/slot_table.hpp"

namespace ssdkv {

namespace {

uint64_t checked(uint64_t num_slots) {
  if (num_slots > kMaxSlots) throw std::invalid_argument("a journal of too many slots");
  return num_slots;
}

}  // namespace

Replay::Replay(uint64_t num_slots) : num_slots_(checked(num_slots)), slots_(num_slots) {}

void Replay::feed(const std::byte* data, size_t nbytes) {
  if (ended_) throw std::invalid_argument("the journal has ended");
  while (nbytes != 0) {
    const size_t some = std::min(sizeof(Record) - part_, nbytes);
    std::memcpy(reinterpret_cast<std::byte*>(&partial_) + part_, data, some);
    data += some;
    nbytes -= some;
    part_ += some;
    if (part_ == sizeof(Record)) {
      part_ = 0;
      take(partial_);
    }
  }
}

void Replay::take(const Record& record) {
  if (!is_valid(record)) {
    ++at_end_;
    return;
  }
  ++records_;
  damaged_ += std::exchange(at_end_, 0);
  newest_epoch_ = std::max(newest_epoch_, record.epoch);
  newest_sequence_ = std::max(newest_sequence_, record.sequence);
  const bool put = static_cast<Kind>(record.kind) == Kind::kPut;
  if (record.slot >= num_slots_) {
    out_of_range_ += put ? 1 : 0;
    return;
  }
  Newest& slot = slots_[record.slot];
  if (record.sequence < slot.stamp / 2) return;
  slot = {record.key, record.epoch, 2 * record.sequence + (put ? 1 : 0)};
}

const std::vector<uint32_t>& Replay::live() {
  if (std::exchange(ended_, true)) return live_;
  size_t puts = 0;
  for (uint64_t slot = 0; slot < num_slots_; ++slot) puts += slots_[slot].stamp % 2;
  std::vector<std::pair<uint64_t, uint32_t>> order;
  order.reserve(puts);
  for (uint64_t slot = 0; slot < num_slots_; ++slot) {
    if (slots_[slot].stamp % 2 != 0) order.emplace_back(slots_[slot].stamp, slot);
  }
  std::sort(order.begin(), order.end(), std::greater<>());
  KeyMap seen(reinterpret_cast<const std::byte*>(slots_.data()), sizeof(Newest), order.size());
  live_.reserve(order.size());
  for (const auto& [stamp, slot] : order) {
    if (seen.find(slots_[slot].key)) {
      ++superseded_;
      continue;
    }
    seen.insert(slot);
    live_.push_back(slot);
  }
  std::reverse(live_.begin(), live_.end());
  return live_;
}

}  // namespace ssdkv
