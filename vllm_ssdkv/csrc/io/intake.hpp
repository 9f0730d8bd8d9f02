// What becomes of slots that are being read: as they arrive they are checked and copied to where
// they are wanted, beside the reads and without the interpreter.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "io/batch.hpp"
#include "io/slot_header.hpp"

namespace ssdkv {

struct SlotShape {
  HeaderShape header;
  size_t pages;  // behind the header, each with an xxh3-64 there
  size_t page_bytes;
  size_t payload_bytes;  // of a page
};

// Which pages of a read are looked at: first, first + step, ... of those of all slots, one after
// the other.
struct Sample {
  size_t first = 0;
  size_t step = 1;
};

// A part of every slot that goes to a block of vLLM's cache: to base + block * step.
struct Stretch {
  size_t offset;  // in the slot
  size_t nbytes;  // all in one page
  uint64_t base;  // address
  uint64_t step;  // bytes
};

class Intake {
 public:
  enum class State : uint8_t { kAwaited, kRight, kWrongHeader, kWrongPage };

  struct Slot {
    uint64_t address;        // where it is read to
    const std::byte* fixed;  // the first bytes that its header must have
    uint64_t block;          // where it goes; 0: nowhere
  };

  struct WrongPage {
    int64_t slot;  // index among those of the batch
    int64_t page;
  };

  // `slot_of` says for each request of the batch which slot it is a part of, `missing` whether a
  // slot has parts that were not asked for, so that it cannot arrive. What the slots point to
  // outlives this. Stretches ascend. Throws std::invalid_argument for arrays that do not fit.
  Intake(const SlotShape& shape, std::vector<Slot> slots, std::vector<int64_t> slot_of,
         std::vector<uint32_t> lengths, std::span<const uint8_t> missing,
         std::vector<Stretch> stretches, Sample sample);

  // One thread at a time calls these. They look at all that has arrived since the last call: as
  // long as anything has, take more; then wait for the rest until the deadline. True: all requests
  // of the batch have ended, and what they brought was looked at.
  bool follow(Batch& batch, Clock::time_point deadline);
  // The same for an engine of another kind, with what its requests have ended with so far.
  void take(std::span<const int32_t> results);

  // By slot of the batch.
  const std::vector<State>& states() const { return states_; }
  std::vector<WrongPage> wrong_pages() const;

 private:
  template <class Result>
  bool look(const Result& result);  // whether a slot has arrived
  void work_off();
  void check_and_copy(size_t slot) noexcept;

  const SlotShape shape_;
  const std::vector<Slot> slots_;
  const std::vector<int64_t> slot_of_;
  const std::vector<uint32_t> lengths_;
  const std::vector<Stretch> stretches_;
  const Sample sample_;
  std::vector<uint32_t> parts_;    // of each slot that have not arrived
  std::vector<uint32_t> awaited_;  // requests that had not ended when last looked at
  std::vector<uint32_t> arrived_;  // slots that have, and were not looked at
  std::vector<State> states_;
  std::vector<uint8_t> page_wrong_;  // [slots, pages]
};

}  // namespace ssdkv
