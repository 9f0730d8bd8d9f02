#include "io/intake.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "io/memory.hpp"
#include "io/parallel.hpp"

namespace ssdkv {
namespace {

constexpr size_t kParallelBytes = size_t{4} << 20;  // of a backlog; below this, one thread
constexpr size_t kShareBytes = size_t{1} << 20;     // that one thread takes at a time

const std::byte* bytes_at(uint64_t address) { return reinterpret_cast<const std::byte*>(address); }

uint64_t mark(const std::byte* header, const HeaderShape& shape, size_t page) {
  uint64_t sum = 0;
  const std::byte* at = header + shape.fixed_bytes + page * sizeof sum;
  for (size_t i = sizeof sum; i-- > 0;) {  // little-endian
    sum = sum << 8U | std::to_integer<uint64_t>(at[i]);
  }
  return sum;
}

}  // namespace

Intake::Intake(const SlotShape& shape, std::vector<Slot> slots, std::vector<int64_t> slot_of,
               std::vector<uint32_t> lengths, std::span<const uint8_t> missing,
               std::vector<Stretch> stretches, Sample sample)
    : shape_(shape),
      slots_(std::move(slots)),
      slot_of_(std::move(slot_of)),
      lengths_(std::move(lengths)),
      stretches_(std::move(stretches)),
      sample_(sample),
      parts_(slots_.size()),
      awaited_(slot_of_.size()),
      states_(slots_.size(), State::kAwaited),
      page_wrong_(slots_.size() * shape.pages) {
  shape_.header.check();
  const size_t marks = shape_.header.fixed_bytes + shape_.pages * sizeof(uint64_t);
  if (marks > shape_.header.used_bytes || shape_.payload_bytes > shape_.page_bytes ||
      missing.size() != slots_.size() || lengths_.size() != slot_of_.size() || sample_.step == 0) {
    throw std::invalid_argument("what is said of the slots of a batch does not fit together");
  }
  for (const Stretch& stretch : stretches_) {
    const size_t begin = stretch.offset - shape_.header.header_bytes;  // wraps below the pages
    if (stretch.offset < shape_.header.header_bytes || begin / shape_.page_bytes >= shape_.pages ||
        stretch.nbytes >
            shape_.payload_bytes - std::min(begin % shape_.page_bytes, shape_.payload_bytes) ||
        (&stretch != stretches_.data() && stretch.offset < (&stretch - 1)->offset)) {
      throw std::invalid_argument("a stretch is not in one page, or before the last one");
    }
  }
  for (size_t i = 0; i < slots_.size(); ++i) parts_[i] = missing[i] != 0 ? 1 : 0;
  for (const int64_t slot : slot_of_) {
    if (slot < 0 || static_cast<size_t>(slot) >= slots_.size()) {
      throw std::invalid_argument("a request belongs to no slot");
    }
    ++parts_[static_cast<size_t>(slot)];
  }
  std::iota(awaited_.begin(), awaited_.end(), 0U);
  arrived_.reserve(slots_.size());
}

template <class Result>
bool Intake::look(const Result& result) {
  const auto ended = [&](uint32_t index) {
    const int32_t got = result(index);
    if (got == Batch::kPending) return false;
    const auto slot = static_cast<size_t>(slot_of_[index]);
    // A part that failed never arrives.
    if (got >= 0 && static_cast<uint32_t>(got) == lengths_[index] && --parts_[slot] == 0) {
      arrived_.push_back(static_cast<uint32_t>(slot));
    }
    return true;
  };
  awaited_.erase(std::remove_if(awaited_.begin(), awaited_.end(), ended), awaited_.end());
  return !arrived_.empty();
}

bool Intake::follow(Batch& batch, Clock::time_point deadline) {
  if (batch.size() != slot_of_.size()) throw std::invalid_argument("that is another batch");
  for (;;) {
    while (look([&batch](size_t index) { return batch.result(index); })) work_off();
    if (awaited_.empty()) return true;
    const size_t left = awaited_.size();
    if (batch.wait_for_less(left, deadline) >= left) return false;
  }
}

void Intake::take(std::span<const int32_t> results) {
  if (results.size() != slot_of_.size()) throw std::invalid_argument("that is another batch");
  if (look([results](size_t index) { return results[index]; })) work_off();
}

void Intake::work_off() {
  const size_t slot_bytes = shape_.header.header_bytes + shape_.pages * shape_.page_bytes;
  const size_t share = std::max<size_t>(1, kShareBytes / std::max<size_t>(slot_bytes, 1));
  // One thread keeps up with most drives. What has piled up is too much for it.
  parallel(arrived_.size(), share, choose_threads(arrived_.size() * slot_bytes, kParallelBytes, 0),
           [this](size_t first, size_t last) noexcept {
             for (size_t i = first; i < last; ++i) check_and_copy(arrived_[i]);
           });
  arrived_.clear();
}

void Intake::check_and_copy(size_t index) noexcept {
  const Slot& slot = slots_[index];
  const std::byte* const header = bytes_at(slot.address);
  if (!right_header(header, slot.fixed, shape_.header)) {
    states_[index] = State::kWrongHeader;
    return;
  }
  State state = State::kRight;
  size_t stretch = 0;
  size_t until_next = (sample_.first + sample_.step - index * shape_.pages % sample_.step) %
                      sample_.step;  // pages before one that is looked at
  for (size_t page = 0; page < shape_.pages; ++page) {
    const size_t begin = shape_.header.header_bytes + page * shape_.page_bytes;
    if (until_next-- == 0) {
      until_next = sample_.step - 1;
      if (checksum(header + begin, shape_.payload_bytes) != mark(header, shape_.header, page)) {
        page_wrong_[index * shape_.pages + page] = 1;
        state = State::kWrongPage;
      }
    }
    if (slot.block == 0 || state != State::kRight) continue;
    // Now, while the page is in the processor's cache. If a later one is wrong, the block is read
    // or computed again before anybody looks at it.
    for (; stretch < stretches_.size() && stretches_[stretch].offset < begin + shape_.page_bytes;
         ++stretch) {
      const Stretch& part = stretches_[stretch];
      copy_past_cache(part.base + slot.block * part.step, slot.address + part.offset, part.nbytes);
    }
  }
  fence_copies();
  states_[index] = state;
}

std::vector<Intake::WrongPage> Intake::wrong_pages() const {
  std::vector<WrongPage> found;
  for (size_t i = 0; i < page_wrong_.size(); ++i) {
    if (page_wrong_[i] == 0) continue;
    found.push_back(
        {static_cast<int64_t>(i / shape_.pages), static_cast<int64_t>(i % shape_.pages)});
  }
  return found;
}

}  // namespace ssdkv
