// ArrivalVerifier of slots that are being read: as they arrive they are checked and copied to where
// they are wanted, beside the reads and without the interpreter.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "io/engine/batch.hpp"
#include "io/slot/slot_header.hpp"

namespace ssdkv {

struct SlotShape {
  HeaderShape header;
  size_t pages;  // behind the header, each with an xxh3-64 there
  size_t page_bytes;
  size_t payload_bytes;  // of a page
};

// Pages of a read that are looked at: first, first + step, ... of those of all slots, one after
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

class ArrivalVerifier {
 public:
  enum class State : uint8_t { kAwaited, kRight, kWrongHeader, kWrongPage };

  struct Slot {
    uint64_t address;        // where it is read to
    const std::byte* fixed;  // the first bytes that its header must have
    uint64_t block;          // where it goes; 0: nowhere
  };

  // Bytes that a request brings.
  struct Part {
    int64_t slot;
    uint64_t begin;  // in the slot
    uint32_t length;
  };

  struct WrongPage {
    int64_t slot;  // index among those of the batch
    int64_t page;
  };

  // `parts` has one entry for each request of the batch, ordered by slot and position. A slot of
  // which something was not asked for never arrives. What the slots point to outlives this.
  // Stretches ascend. Throws std::invalid_argument for what does not fit together.
  ArrivalVerifier(const SlotShape& shape, std::vector<Slot> slots, std::vector<Part> parts,
                  std::vector<Stretch> stretches, Sample sample);

  // One thread at a time calls these. They look at every page that has arrived, behind its slot's
  // header, since the last call: as long as any has, take more; then wait for the rest until the
  // deadline. True: all requests of the batch have ended, and what they brought was looked at.
  bool follow(Batch& batch, Clock::time_point deadline);
  // The same for an engine of another kind, with what its requests have ended with so far.
  void take(std::span<const int32_t> results);

  // By slot of the batch; awaited until all of it was looked at.
  const std::vector<State>& states() const { return states_; }
  // Wrong pages of the slots whose state says that they have some.
  std::vector<WrongPage> wrong_pages() const;

 private:
  // State of a page.
  enum class Page : uint8_t { kAwaited, kTaken, kWrong };

  // Pages [first, last) of a slot that have arrived, and whose header is right.
  struct Run {
    size_t slot, first, last;
  };

  template <class Result>
  bool look(const Result& result);  // whether there are runs
  void arrive(const Part& part);
  void add_runs(size_t slot, size_t first, size_t last);
  void work_off();
  void check_and_copy(const Run& run) noexcept;
  void settle(size_t slot);

  const SlotShape shape_;
  const std::vector<Slot> slots_;
  const std::vector<Part> parts_;
  const std::vector<Stretch> stretches_;
  const Sample sample_;
  std::vector<size_t> stretch_of_;     // [pages + 1]: of each page, the first one
  std::vector<uint32_t> awaited_;      // requests that had not ended when last looked at
  std::vector<uint64_t> header_left_;  // [slots]: bytes that have not arrived
  std::vector<uint64_t> page_left_;    // [slots, pages]: the same
  std::vector<Page> pages_;            // [slots, pages]
  std::vector<size_t> untaken_;        // [slots]: pages that are awaited
  std::vector<Run> runs_;              // that were not looked at
  std::vector<State> states_;
};

}  // namespace ssdkv
