// Every slot of a store in one cache line each: what it is, what it holds, whose turn it is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "index/huge_page_array.hpp"
#include "index/key_map.hpp"
#include "index/record.hpp"
#include "index/replay.hpp"

namespace ssdkv {

// Slots are numbered in 32 bits, five numbers are heads of lists, and one means "none".
constexpr uint64_t kMaxSlots = (uint64_t{1} << 31) - 2;

enum class State : uint8_t {
  kFree = 0,
  kWriting = 1,
  kReady = 2,
  kPrivate = 3,
  kLost = 4,
  kMasked = 5
};

// Work of one walk() while everybody waits: a look at a slot in the list costs a cache miss, a
// look at the next number next to nothing. Both come to some tenths of a millisecond.
constexpr size_t kWalkBudget = 16384;
constexpr size_t kListCost = 16;

// Slots whose journalled content is gone: the journal needs a DEL for each.
struct Gone {
  std::vector<int64_t> slots;
  std::vector<int64_t> epochs;
};

// Content that the journal needs a PUT for.
struct Stored {
  std::vector<int64_t> slots;
  std::vector<int64_t> epochs;
  std::vector<Key> keys;
  std::vector<int64_t> older;  // masked slots with one of these keys: retire() them next
};

// Slots that have moved: new ones that took the place of old ones, which the journal must be told
// of in this order, a PUT for each that is journalled and then, after retire(), a DEL for its old
// one.
struct Moved {
  std::vector<bool> which;  // of those that were given
  std::vector<int64_t> from;
  Stored stored;
};

// Counts since the start.
struct Counts {
  uint64_t allocated, evictions, published, duplicates, dropped, quarantined, recovered;
  uint64_t retentions_cut;  // of slots that lost it before its time
};

// Numbers of slots in a range.
struct Usage {
  size_t ready, masked, pinned;
  size_t obtainable;  // free or evictable
};

// The rules are in store/index/slot_index.py. Memory: 64 bytes per slot, and 12 in the map
// of keys where it holds a block.
//
// One thread, the owner's, calls everything but walk(), which another one may call meanwhile: a
// mutex keeps each walk() apart from each call that changes something. Calls that only read need
// none, because walk() writes nothing that they look at.
//
// A masked slot keeps its key, its journal record and its place in the map of keys, where find()
// passes over it. A new slot that is published with its key takes that place, and names the masked
// one in `older` until it is journalled itself: then the masked one goes. If the new one goes
// first, the masked one has its place again. So at most one journalled slot has a key.
//
// Slot numbers outside the table throw std::out_of_range, other misuse std::invalid_argument.
class SlotTable {
 public:
  explicit SlotTable(uint64_t num_slots);

  // Take over what a journal says; the table must be fresh. How many slots it holds.
  size_t recover(Replay& replay);

  std::optional<uint32_t> find(const Key& key) const {
    const auto slot = map_.find(key);
    return slot && slots_[*slot].state == State::kReady ? slot : std::nullopt;
  }
  // Slots of the longest prefix of keys that is ready.
  std::vector<int64_t> lookup(const std::vector<const Key*>& keys) const;
  // Whether the key is ready with each of the tags exclusive-or'd into its last byte.
  bool has_all(Key key, const std::vector<uint8_t>& tags) const;
  int64_t epoch(int64_t slot) const { return static_cast<int64_t>(at(slot).epoch); }
  State state(int64_t slot) const { return at(slot).state; }
  // Key of a ready slot.
  const Key& key(int64_t slot) const;
  // Usage of the n slots from `first` on.
  Usage usage(int64_t first, size_t n) const;
  // Evictable slots, in the order of eviction: the least recently used first, retained ones last.
  std::vector<int64_t> order() const;
  // Slots that hold nothing and nobody uses, by number.
  std::vector<int64_t> free_slots() const;

  // Take n slots, each pinned once and with a new epoch; at most obtainable() are there.
  std::vector<int64_t> allocate(size_t n, Gone& gone);
  void touch(const int64_t* slots, size_t n);
  // Retain the ready ones of a chain, head first, until a time in seconds, or longer where they are
  // already. The least recently used of more than `most` become ordinary, of those that nobody
  // uses.
  void retain(const int64_t* slots, size_t n, uint32_t until, size_t most);
  // It is `now`: slots whose time has come become ordinary, as if just used; the next call goes on
  // where they are many.
  void expire(uint32_t now);
  void pin(const int64_t* slots, size_t n);
  void unpin(const int64_t* slots, size_t n);
  // False when the slot stays private, or was so before.
  bool publish(int64_t slot, const Key& key);
  Stored durable(const int64_t* slots, size_t n);
  // Slots `to`, which are being written, hold what slots `from` hold and are found in their place.
  // Pairs of which one was dropped meanwhile are left alone. Every `from` is pinned, and stays
  // journalled until retire(): a walk in between finds its record, and maybe the new one.
  Moved replace(const int64_t* from, const int64_t* to, size_t n);
  // The journal knows their successors: private slots that have moved, or masked ones.
  void retire(const int64_t* slots, size_t n, Gone& gone);
  size_t drop(const int64_t* slots, size_t n, Gone& gone);
  size_t quarantine(const int64_t* slots, size_t n, Gone& gone);
  // Quarantine, but keep what is journalled: it is not found until unmask(). First how many slots
  // are masked, then how many were dropped, whose data is not durable.
  std::pair<size_t, size_t> mask(const int64_t* slots, size_t n);
  // Slots that were quarantined are in use again, masked ones with what they hold. In the order of
  // eviction the latter come first. One whose key a slot has that is not journalled takes it back.
  // Number of slots that are found again.
  size_t unmask(const int64_t* slots, size_t n);
  // Quarantined slots that nobody uses any more are free again, and not deferred.
  void restore(const int64_t* slots, size_t n);
  // Slots whose entry of `mask` (one per slot) is set are handed out when no other is free.
  void defer(const bool* mask);

  void set_last_epoch(uint64_t epoch) { last_epoch_ = epoch; }
  size_t num_slots() const { return num_slots_; }
  size_t obtainable() const { return free_ + deferred_ + evictable_; }
  size_t free() const { return free_; }
  size_t deferred() const { return deferred_; }
  size_t evictable() const { return evictable_; }
  size_t ready() const { return ready_; }
  size_t masked() const { return masked_; }
  size_t journalled() const { return journalled_; }
  size_t writing() const { return writing_; }
  size_t pinned() const { return pinned_; }
  size_t lost() const { return lost_; }
  size_t retained() const { return retained_; }
  const Counts& counts() const { return counts_; }
  size_t nbytes() const;

  // Start to walk over everything journalled: what is masked and what may be evicted in that order,
  // then the rest by number. Belongs to the thread that walks.
  void begin_walk();
  // Sealed PUT records of the next few, with sequence numbers from `first_sequence`; false when
  // that was all. Whatever changes between two calls may be in the walk or not: the owner's own
  // records about it have later sequence numbers than the walk's.
  bool walk(uint64_t first_sequence, size_t budget, std::vector<Record>& out);

 private:
  struct alignas(64) Slot {
    Key key;  // while ready or masked
    uint64_t epoch;
    uint32_t next, previous;  // in the list it is in, if any
    uint32_t pins;
    uint32_t older;   // plus one, a masked slot whose key it has; 0: there is none
    uint32_t until;   // while ready, the time to which it is retained; 0: it is ordinary
    uint16_t walked;  // number of the last walk that took it
    State state;
    bool journalled : 1;
    bool quarantined : 1;
    bool deferred : 1;
  };
  static_assert(sizeof(Slot) == 64);

  const Slot& at(int64_t slot) const;
  Slot& at(int64_t slot) { return const_cast<Slot&>(std::as_const(*this).at(slot)); }
  void check(const int64_t* slots, size_t n) const;
  uint32_t number_of(const Slot& slot) const { return static_cast<uint32_t>(&slot - &slots_[0]); }
  bool is_evictable(const Slot& slot) const {
    return slot.state == State::kReady && slot.pins == 0;
  }
  void link(Slot& slot, uint32_t before);
  void unlink(Slot& slot);
  void make_evictable(Slot& slot);
  void unlink_evictable(Slot& slot);
  uint32_t list_of(const Slot& slot) const { return slot.until != 0 ? kept_list_ : used_list_; }
  void make_ordinary(Slot& slot);
  void cut(Slot& slot);
  void keep_share();
  void forget_old_times();
  void make_free(Slot& slot);
  void unlink_free(Slot& slot);
  void release(Slot& slot);
  bool is_masked(const Slot& slot) const {
    return slot.state == State::kMasked ||
           (slot.state == State::kPrivate && slot.journalled && slot.quarantined);
  }
  void make_masked(Slot& slot);
  void unlink_masked(Slot& slot);
  void show(Slot& slot);
  void forget(Slot& slot, Gone& gone);
  void unjournal(Slot& slot, Gone& gone);
  size_t drop_locked(const int64_t* slots, size_t n, Gone& gone);
  bool walk_order(size_t& budget, uint64_t& sequence, std::vector<Record>& out);
  bool walk_numbers(size_t& budget, uint64_t& sequence, std::vector<Record>& out);
  void take(Slot& slot, uint64_t& sequence, std::vector<Record>& out);

  const size_t num_slots_;
  // Heads of the lists of free, of deferred free, of masked, of evictable ordinary and of evictable
  // retained slots: the last five entries.
  const uint32_t free_list_;
  const uint32_t later_list_;
  const uint32_t masked_list_;
  const uint32_t used_list_;
  const uint32_t kept_list_;
  HugePageArray<Slot> slots_;
  KeyMap map_;
  uint64_t last_epoch_ = 0;
  size_t free_ = 0, deferred_ = 0, evictable_ = 0, journalled_ = 0, writing_ = 0, pinned_ = 0,
         lost_ = 0, ready_ = 0, masked_ = 0, retained_ = 0;
  Counts counts_{};

  // Slots by the time to which they are retained, tails of chains first. A slot may be there more
  // often: only its entry at `until` counts.
  std::map<uint32_t, std::vector<uint32_t>> times_;
  size_t listed_times_ = 0;
  size_t most_retained_ = 0;

  mutable std::mutex mutex_;
  uint16_t walk_ = 0;       // number of the walk
  uint32_t cursor_;         // next masked or evictable slot it will look at, or the list's head
  size_t walk_visits_ = 0;  // how many it may still look at: the list may grow before its eyes
  size_t walk_number_ = 0;  // then, the next slot by number
};

}  // namespace ssdkv
