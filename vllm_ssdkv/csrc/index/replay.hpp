// Replay of a journal: the newest record of every slot, gathered piece by piece.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "index/huge_page_array.hpp"
#include "index/record.hpp"

namespace ssdkv {

// Memory: 56 bytes per slot that a record names, and 28 per live one while live() sorts; nothing
// grows with the length of the journal. Sequence numbers decide, not positions. Not thread-safe.
class Replay {
 public:
  struct Newest {
    Key key;
    uint64_t epoch;
    uint64_t stamp;  // twice the sequence, plus one in a PUT; 0: no record
  };

  // Throws std::invalid_argument for more slots than an index may have.
  explicit Replay(uint64_t num_slots);

  // The bytes behind those of the last call. Bad records are counted, never thrown.
  void feed(const std::byte* data, size_t nbytes);

  // Slots that hold a key, in the order of their records; of several with one key the newest.
  // Ends the journal: a record that is not whole by now counts as corrupt.
  const std::vector<uint32_t>& live();

  const Newest& newest(uint32_t slot) const { return slots_[slot]; }
  uint64_t num_slots() const { return num_slots_; }
  uint64_t records() const { return records_; }
  uint64_t corrupt() const { return damaged_ + at_end_ + (part_ != 0 ? 1 : 0); }
  // Corrupt records with a valid one behind them: an append that was cut does not leave them.
  uint64_t damaged() const { return damaged_; }
  uint64_t out_of_range() const { return out_of_range_; }
  // Records of slots whose key a newer record gives to another one: a crash in the middle of a move
  // leaves them. Known when live() was called.
  uint64_t superseded() const { return superseded_; }
  uint64_t newest_epoch() const { return newest_epoch_; }
  uint64_t newest_sequence() const { return newest_sequence_; }

 private:
  void take(const Record& record);

  const uint64_t num_slots_;
  HugePageArray<Newest> slots_;
  std::vector<uint32_t> live_;
  bool ended_ = false;
  Record partial_{};  // the beginning of a record whose end is in the next piece
  size_t part_ = 0;   // bytes of it
  uint64_t records_ = 0;
  uint64_t damaged_ = 0;
  uint64_t at_end_ = 0;  // corrupt ones since the last valid one
  uint64_t out_of_range_ = 0;
  uint64_t superseded_ = 0;
  uint64_t newest_epoch_ = 0;
  uint64_t newest_sequence_ = 0;
};

}  // namespace ssdkv
