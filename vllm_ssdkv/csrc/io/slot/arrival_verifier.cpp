#include "io/slot/arrival_verifier.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "base/parallel.hpp"
#include "io/slot/memory.hpp"

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

ArrivalVerifier::ArrivalVerifier(const SlotShape& shape, std::vector<Slot> slots,
                                 std::vector<Part> parts, std::vector<Stretch> stretches,
                                 Sample sample)
    : shape_(shape),
      slots_(std::move(slots)),
      parts_(std::move(parts)),
      stretches_(std::move(stretches)),
      sample_(sample),
      stretch_of_(shape.pages + 1),
      awaited_(parts_.size()),
      header_left_(slots_.size(), shape.header.header_bytes),
      page_left_(slots_.size() * shape.pages, shape.page_bytes),
      pages_(slots_.size() * shape.pages, Page::kAwaited),
      untaken_(slots_.size(), shape.pages),
      states_(slots_.size(), State::kAwaited) {
  shape_.header.check();
  const size_t marks = shape_.header.fixed_bytes + shape_.pages * sizeof(uint64_t);
  if (marks > shape_.header.used_bytes || shape_.pages == 0 || shape_.page_bytes == 0 ||
      shape_.payload_bytes > shape_.page_bytes || sample_.step == 0) {
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
    ++stretch_of_[begin / shape_.page_bytes + 1];
  }
  std::partial_sum(stretch_of_.begin(), stretch_of_.end(), stretch_of_.begin());
  const uint64_t slot_bytes = shape_.header.header_bytes + shape_.pages * shape_.page_bytes;
  const Part* before = nullptr;
  for (const Part& part : parts_) {
    if (part.slot < 0 || static_cast<size_t>(part.slot) >= slots_.size()) {
      throw std::invalid_argument("a request belongs to no slot");
    }
    if (part.length == 0 || part.begin > slot_bytes || part.length > slot_bytes - part.begin) {
      throw std::invalid_argument("a request leaves its slot");
    }
    if (before != nullptr &&
        (part.slot < before->slot ||
         (part.slot == before->slot && part.begin < before->begin + before->length))) {
      throw std::invalid_argument("requests are not in the order of what they bring");
    }
    before = &part;
  }
  std::iota(awaited_.begin(), awaited_.end(), 0U);
}

template <class Result>
bool ArrivalVerifier::look(const Result& result) {
  const auto ended = [&](uint32_t index) {
    const int32_t got = result(index);
    if (got == Batch::kPending) return false;
    // A part that failed never arrives.
    if (got >= 0 && static_cast<uint32_t>(got) == parts_[index].length) arrive(parts_[index]);
    return true;
  };
  awaited_.erase(std::remove_if(awaited_.begin(), awaited_.end(), ended), awaited_.end());
  return !runs_.empty();
}

void ArrivalVerifier::arrive(const Part& part) {
  const auto slot = static_cast<size_t>(part.slot);
  const uint64_t header = shape_.header.header_bytes;
  const uint64_t end = part.begin + part.length;
  const uint64_t of_header = part.begin < header ? std::min(end, header) - part.begin : 0;
  const size_t first = part.begin < header ? 0 : (part.begin - header) / shape_.page_bytes;
  const size_t last = end <= header ? 0 : (end - header - 1) / shape_.page_bytes + 1;
  for (size_t page = first; page < last; ++page) {
    const uint64_t begin = header + page * shape_.page_bytes;
    const uint64_t from = std::max<uint64_t>(part.begin, begin);
    page_left_[slot * shape_.pages + page] -= std::min(end, begin + shape_.page_bytes) - from;
  }
  header_left_[slot] -= of_header;
  if (header_left_[slot] != 0 || states_[slot] != State::kAwaited) return;
  if (of_header == 0) {
    add_runs(slot, first, last);
  } else if (right_header(bytes_at(slots_[slot].address), slots_[slot].fixed, shape_.header)) {
    add_runs(slot, 0, shape_.pages);  // of those some were here before their header
  } else {
    states_[slot] = State::kWrongHeader;
  }
}

void ArrivalVerifier::add_runs(size_t slot, size_t first, size_t last) {
  for (size_t page = first; page < last; ++page) {
    const size_t at = slot * shape_.pages + page;
    if (page_left_[at] != 0 || pages_[at] != Page::kAwaited) continue;
    pages_[at] = Page::kTaken;
    --untaken_[slot];
    const bool follows = !runs_.empty() && runs_.back().slot == slot && runs_.back().last == page;
    if (follows && (page - runs_.back().first + 1) * shape_.page_bytes <= kShareBytes) {
      ++runs_.back().last;
    } else {
      runs_.push_back({slot, page, page + 1});
    }
  }
}

bool ArrivalVerifier::follow(Batch& batch, Clock::time_point deadline) {
  if (batch.size() != parts_.size()) throw std::invalid_argument("that is another batch");
  for (;;) {
    while (look([&batch](size_t index) { return batch.result(index); })) work_off();
    if (awaited_.empty()) return true;
    const size_t left = awaited_.size();
    if (batch.wait_for_less(left, deadline) >= left) return false;
  }
}

void ArrivalVerifier::take(std::span<const int32_t> results) {
  if (results.size() != parts_.size()) throw std::invalid_argument("that is another batch");
  if (look([results](size_t index) { return results[index]; })) work_off();
}

void ArrivalVerifier::work_off() {
  size_t pages = 0;
  for (const Run& run : runs_) pages += run.last - run.first;
  const size_t nbytes = pages * shape_.page_bytes;
  const size_t share =
      std::max<size_t>(1, kShareBytes * runs_.size() / std::max<size_t>(nbytes, 1));
  // One thread keeps up with most drives. What has piled up is too much for it.
  parallel(runs_.size(), share, choose_threads(nbytes, kParallelBytes, 0),
           [this](size_t first, size_t last) noexcept {
             for (size_t i = first; i < last; ++i) check_and_copy(runs_[i]);
           });
  for (const Run& run : runs_) {
    if (untaken_[run.slot] == 0) settle(run.slot);
  }
  runs_.clear();
}

void ArrivalVerifier::check_and_copy(const Run& run) noexcept {
  const Slot& slot = slots_[run.slot];
  const std::byte* const header = bytes_at(slot.address);
  const size_t before = run.slot * shape_.pages;  // pages of the slots before
  for (size_t page = run.first; page < run.last; ++page) {
    const size_t begin = shape_.header.header_bytes + page * shape_.page_bytes;
    const bool checked = (before + page) % sample_.step == sample_.first % sample_.step;
    if (checked &&
        checksum(header + begin, shape_.payload_bytes) != mark(header, shape_.header, page)) {
      pages_[before + page] = Page::kWrong;
      continue;
    }
    if (slot.block == 0) continue;
    // Now, while the page is in the processor's cache. If another one is wrong, or does not arrive,
    // the block is read or computed again before anybody looks at it.
    for (size_t i = stretch_of_[page]; i < stretch_of_[page + 1]; ++i) {
      const Stretch& part = stretches_[i];
      copy_past_cache(part.base + slot.block * part.step, slot.address + part.offset, part.nbytes);
    }
  }
  fence_copies();
}

void ArrivalVerifier::settle(size_t slot) {
  const auto first = pages_.begin() + static_cast<ptrdiff_t>(slot * shape_.pages);
  const auto last = first + static_cast<ptrdiff_t>(shape_.pages);
  const bool wrong = std::find(first, last, Page::kWrong) != last;
  states_[slot] = wrong ? State::kWrongPage : State::kRight;
}

std::vector<ArrivalVerifier::WrongPage> ArrivalVerifier::wrong_pages() const {
  std::vector<WrongPage> found;
  for (size_t i = 0; i < pages_.size(); ++i) {
    const size_t slot = i / shape_.pages;
    if (pages_[i] != Page::kWrong || states_[slot] != State::kWrongPage) continue;
    found.push_back({static_cast<int64_t>(slot), static_cast<int64_t>(i % shape_.pages)});
  }
  return found;
}

}  // namespace ssdkv
