#include "index/slot_table.hpp"

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>

namespace ssdkv {
namespace {

uint64_t checked(uint64_t num_slots) {
  if (num_slots < 1 || num_slots > kMaxSlots) {
    throw std::invalid_argument("num_slots is " + std::to_string(num_slots) + ", not in [1, " +
                                std::to_string(kMaxSlots) + "]");
  }
  return num_slots;
}

const char* name_of(State state) {
  static constexpr const char* kNames[] = {"FREE", "WRITING", "READY", "PRIVATE", "LOST", "MASKED"};
  return kNames[static_cast<size_t>(state)];
}

// Entries of times that slots do not have any more, beside one for each that they do.
constexpr size_t kOldTimes = 1024;

// Entries that a call of expire() looks at, a few milliseconds' work: the scheduler waits for it.
constexpr size_t kMostExpired = 1 << 14;

}  // namespace

SlotTable::SlotTable(uint64_t num_slots)
    : num_slots_(checked(num_slots)),
      free_list_(static_cast<uint32_t>(num_slots)),
      later_list_(free_list_ + 1),
      masked_list_(free_list_ + 2),
      used_list_(free_list_ + 3),
      kept_list_(free_list_ + 4),
      slots_(num_slots + 5),
      map_(slots_[0].key.data(), sizeof(Slot), num_slots),
      cursor_(kept_list_) {
  for (uint32_t head = free_list_; head <= kept_list_; ++head) {
    slots_[head].next = slots_[head].previous = head;
  }
  for (size_t i = 0; i < num_slots_; ++i) link(slots_[i], free_list_);
  free_ = num_slots_;
}

size_t SlotTable::nbytes() const {
  return slots_.nbytes() + map_.nbytes() + listed_times_ * sizeof(uint32_t);
}

size_t SlotTable::recover(Replay& replay) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (free_ != num_slots_ || replay.num_slots() > num_slots_) {
    throw std::invalid_argument("recovery into a table that is in use or too small");
  }
  for (const uint32_t number : replay.live()) {
    Slot& slot = slots_[number];
    unlink_free(slot);
    slot.key = replay.newest(number).key;
    slot.epoch = replay.newest(number).epoch;
    slot.state = State::kReady;
    slot.journalled = true;
    map_.insert(number);
    make_evictable(slot);
  }
  ready_ = journalled_ = counts_.recovered = replay.live().size();
  return journalled_;
}

const SlotTable::Slot& SlotTable::at(int64_t slot) const {
  check(&slot, 1);
  return slots_[static_cast<size_t>(slot)];
}

void SlotTable::check(const int64_t* slots, size_t n) const {
  for (size_t i = 0; i < n; ++i) {
    if (slots[i] < 0 || static_cast<uint64_t>(slots[i]) >= num_slots_) {
      throw std::out_of_range("slot " + std::to_string(slots[i]) + " of " +
                              std::to_string(num_slots_));
    }
  }
}

// ---- finding ----

std::vector<int64_t> SlotTable::lookup(const std::vector<const Key*>& keys) const {
  std::vector<int64_t> found;
  found.reserve(keys.size());
  for (const Key* key : keys) {
    const auto slot = find(*key);
    if (!slot) break;
    found.push_back(*slot);
  }
  return found;
}

bool SlotTable::has_all(Key key, const std::vector<uint8_t>& tags) const {
  const std::byte own = key.back();
  for (const uint8_t tag : tags) {
    key.back() = own ^ std::byte{tag};
    if (!find(key)) return false;
  }
  return true;
}

std::vector<int64_t> SlotTable::order() const {
  std::vector<int64_t> order;
  order.reserve(evictable_);
  for (const uint32_t list : {used_list_, kept_list_}) {
    for (uint32_t i = slots_[list].next; i != list; i = slots_[i].next) order.push_back(i);
  }
  return order;
}

std::vector<int64_t> SlotTable::free_slots() const {
  std::vector<int64_t> found;
  found.reserve(free_ + deferred_);
  for (size_t i = 0; i < num_slots_; ++i) {
    if (slots_[i].state == State::kFree) found.push_back(static_cast<int64_t>(i));
  }
  return found;
}

Usage SlotTable::usage(int64_t first, size_t n) const {
  Usage found{};
  for (size_t i = 0; i < n; ++i) {
    const Slot& slot = at(first + static_cast<int64_t>(i));
    found.ready += slot.state == State::kReady ? 1 : 0;
    found.masked += slot.state == State::kMasked ? 1 : 0;
    found.pinned += slot.pins != 0 ? 1 : 0;
    found.obtainable += slot.state == State::kFree || is_evictable(slot) ? 1 : 0;
  }
  return found;
}

const Key& SlotTable::key(int64_t slot) const {
  const Slot& found = at(slot);
  if (found.state != State::kReady) {
    throw std::invalid_argument("key of slot " + std::to_string(slot) + ", which is " +
                                name_of(found.state));
  }
  return found.key;
}

// ---- lists ----

void SlotTable::link(Slot& slot, uint32_t before) {
  const uint32_t number = number_of(slot);
  slot.next = before;
  slot.previous = slots_[before].previous;
  slots_[slot.previous].next = number;
  slots_[before].previous = number;
}

void SlotTable::unlink(Slot& slot) {
  if (number_of(slot) == cursor_) cursor_ = slot.next;
  slots_[slot.previous].next = slot.next;
  slots_[slot.next].previous = slot.previous;
}

void SlotTable::make_evictable(Slot& slot) {
  link(slot, list_of(slot));
  ++evictable_;
}

void SlotTable::unlink_evictable(Slot& slot) {
  unlink(slot);
  --evictable_;
}

void SlotTable::make_free(Slot& slot) {
  slot.state = State::kFree;
  // In front: what was in use last is handed out first.
  link(slot, slots_[slot.deferred ? later_list_ : free_list_].next);
  ++(slot.deferred ? deferred_ : free_);
}

void SlotTable::unlink_free(Slot& slot) {
  unlink(slot);
  --(slot.deferred ? deferred_ : free_);
}

void SlotTable::make_masked(Slot& slot) {
  slot.state = State::kMasked;
  link(slot, masked_list_);
  ++masked_;
}

void SlotTable::unlink_masked(Slot& slot) {
  slot.state = State::kPrivate;
  unlink(slot);
  --masked_;
}

void SlotTable::release(Slot& slot) {
  if (is_masked(slot)) {
    make_masked(slot);
  } else if (slot.quarantined) {
    slot.state = State::kLost;
    ++lost_;
  } else {
    make_free(slot);
  }
}

// ---- allocating ----

std::vector<int64_t> SlotTable::allocate(size_t n, Gone& gone) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (n > obtainable()) throw std::invalid_argument("allocation of more than there is");
  std::vector<int64_t> taken;
  taken.reserve(n);
  for (size_t i = 0; i < n; ++i) {
    const bool evict = free_ + deferred_ == 0;
    const uint32_t oldest = slots_[used_list_].next != used_list_ ? used_list_ : kept_list_;
    const uint32_t list = evict ? oldest : free_ != 0 ? free_list_ : later_list_;
    Slot& slot = slots_[slots_[list].next];
    if (evict) {
      forget(slot, gone);
      unlink_evictable(slot);
      ++counts_.evictions;
    } else {
      unlink_free(slot);
    }
    slot.epoch = ++last_epoch_;
    slot.state = State::kWriting;
    slot.pins = 1;
    taken.push_back(number_of(slot));
  }
  writing_ += n;
  pinned_ += n;
  counts_.allocated += n;
  return taken;
}

void SlotTable::touch(const int64_t* slots, size_t n) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check(slots, n);
  while (n-- > 0) {
    Slot& slot = at(slots[n]);
    if (!is_evictable(slot)) continue;
    unlink(slot);
    link(slot, list_of(slot));
  }
}

void SlotTable::retain(const int64_t* slots, size_t n, uint32_t until, size_t most) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check(slots, n);
  std::vector<uint32_t>& then = times_[until];
  const size_t before = then.size();
  while (n-- > 0) {
    Slot& slot = at(slots[n]);
    if (slot.state != State::kReady) continue;
    const bool listed = is_evictable(slot);
    if (listed) unlink(slot);
    retained_ += slot.until == 0 ? 1 : 0;
    if (slot.until < until) {
      slot.until = until;
      then.push_back(number_of(slot));
      ++listed_times_;
    }
    if (listed) link(slot, kept_list_);
  }
  // expire() takes the last ones first: tails, which are to be older than their heads.
  std::reverse(then.begin() + static_cast<std::ptrdiff_t>(before), then.end());
  if (then.empty()) times_.erase(until);
  most_retained_ = most;
  keep_share();
  if (listed_times_ > 2 * retained_ + kOldTimes) forget_old_times();
}

void SlotTable::expire(uint32_t now) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t left = kMostExpired; left > 0 && !times_.empty() && times_.begin()->first <= now;) {
    auto& [until, slots] = *times_.begin();
    for (; left > 0 && !slots.empty(); --left, --listed_times_) {
      Slot& slot = slots_[slots.back()];
      slots.pop_back();
      if (slot.until == until) make_ordinary(slot);
    }
    if (slots.empty()) times_.erase(times_.begin());
  }
}

// The slot, which is ready, is not retained any more.
void SlotTable::make_ordinary(Slot& slot) {
  slot.until = 0;
  --retained_;
  if (!is_evictable(slot)) return;
  unlink(slot);
  link(slot, used_list_);
}

// The retention of a slot ends before its time.
void SlotTable::cut(Slot& slot) {
  if (slot.until == 0) return;
  make_ordinary(slot);
  ++counts_.retentions_cut;
}

void SlotTable::keep_share() {
  while (retained_ > most_retained_ && slots_[kept_list_].next != kept_list_) {
    cut(slots_[slots_[kept_list_].next]);
  }
}

// Entries of slots that have another time now, or none, go.
void SlotTable::forget_old_times() {
  listed_times_ = 0;
  for (auto& [until, slots] : times_) {
    std::erase_if(slots, [this, until = until](uint32_t number) {
      const bool holds = slots_[number].until == until;
      if (holds) slots_[number].until = 0;  // what comes again is old
      return !holds;
    });
    for (const uint32_t number : slots) slots_[number].until = until;
    listed_times_ += slots.size();
  }
  std::erase_if(times_, [](const auto& entry) { return entry.second.empty(); });
}

void SlotTable::pin(const int64_t* slots, size_t n) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check(slots, n);
  for (size_t i = 0; i < n; ++i) {
    const State state = at(slots[i]).state;
    if (state == State::kFree || state == State::kLost || state == State::kMasked) {
      throw std::invalid_argument("pin of a slot that holds nothing");
    }
  }
  for (size_t i = 0; i < n; ++i) {
    Slot& slot = at(slots[i]);
    if (is_evictable(slot)) {
      unlink_evictable(slot);
      ++pinned_;
    }
    ++slot.pins;
  }
}

void SlotTable::unpin(const int64_t* slots, size_t n) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check(slots, n);
  while (n-- > 0) {
    Slot& slot = at(slots[n]);
    if (slot.pins == 0) {
      throw std::invalid_argument("unpin of slot " + std::to_string(slots[n]) +
                                  ", which is not pinned");
    }
    if (--slot.pins != 0) continue;
    --pinned_;
    if (slot.state == State::kReady) {
      make_evictable(slot);
      keep_share();
    } else {
      writing_ -= slot.state == State::kWriting ? 1 : 0;
      release(slot);
    }
  }
}

// ---- content ----

bool SlotTable::publish(int64_t number, const Key& key) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Slot& slot = at(number);
  if (slot.state == State::kPrivate) return false;
  if (slot.state != State::kWriting) {
    throw std::invalid_argument("publish of slot " + std::to_string(number) + ", which is " +
                                name_of(slot.state));
  }
  --writing_;
  const auto holder = map_.find(key);
  if (holder && slots_[*holder].state == State::kReady) {
    slot.state = State::kPrivate;
    ++counts_.duplicates;
    return false;
  }
  if (holder) {  // it is masked
    map_.erase(*holder);
    slot.older = *holder + 1;
  }
  slot.state = State::kReady;
  slot.key = key;
  map_.insert(number_of(slot));
  ++ready_;
  ++counts_.published;
  return true;
}

Stored SlotTable::durable(const int64_t* slots, size_t n) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < n; ++i) {
    if (at(slots[i]).state == State::kWriting) {
      throw std::invalid_argument("slot " + std::to_string(slots[i]) +
                                  " is durable before it was published");
    }
  }
  Stored stored;
  for (size_t i = 0; i < n; ++i) {
    Slot& slot = at(slots[i]);
    if (slot.state != State::kReady || slot.journalled) continue;
    slot.journalled = true;
    slot.walked = walk_;  // the caller's own record is enough
    ++journalled_;
    stored.slots.push_back(slots[i]);
    stored.epochs.push_back(static_cast<int64_t>(slot.epoch));
    stored.keys.push_back(slot.key);
    if (slot.older != 0) stored.older.push_back(std::exchange(slot.older, 0) - 1);
  }
  return stored;
}

Moved SlotTable::replace(const int64_t* from, const int64_t* to, size_t n) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check(from, n);
  check(to, n);
  for (size_t i = 0; i < n; ++i) {
    if (at(from[i]).pins == 0) {
      throw std::invalid_argument("slot " + std::to_string(from[i]) + " moves, but is not pinned");
    }
  }
  Moved moved;
  moved.which.resize(n);
  for (size_t i = 0; i < n; ++i) {
    Slot& before = at(from[i]);
    Slot& after = at(to[i]);
    if (before.state != State::kReady || after.state != State::kWriting) continue;
    moved.which[i] = true;
    map_.erase(number_of(before));
    before.state = State::kPrivate;
    after.state = State::kReady;
    after.key = before.key;
    after.older = std::exchange(before.older, 0);
    after.until = std::exchange(before.until, 0);
    if (after.until != 0) {
      times_[after.until].push_back(number_of(after));
      ++listed_times_;
    }
    map_.insert(number_of(after));
    --writing_;
    if (!before.journalled) continue;
    after.journalled = true;
    after.walked = walk_;
    ++journalled_;
    moved.from.push_back(from[i]);
    moved.stored.slots.push_back(to[i]);
    moved.stored.epochs.push_back(static_cast<int64_t>(after.epoch));
    moved.stored.keys.push_back(after.key);
  }
  return moved;
}

void SlotTable::retire(const int64_t* slots, size_t n, Gone& gone) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check(slots, n);
  for (size_t i = 0; i < n; ++i) {
    Slot& slot = at(slots[i]);
    unjournal(slot, gone);
    if (slot.state != State::kMasked) continue;
    unlink_masked(slot);
    release(slot);
  }
}

// The key of a ready or masked slot names it no more.
void SlotTable::forget(Slot& slot, Gone& gone) {
  cut(slot);
  const uint32_t number = number_of(slot);
  const uint32_t holder = *map_.find(slot.key);
  if (holder == number) {
    map_.erase(number);
    if (slot.older != 0) map_.insert(std::exchange(slot.older, 0) - 1);
  } else {
    slots_[holder].older = 0;
  }
  if (slot.state == State::kReady) --ready_;
  unjournal(slot, gone);
}

void SlotTable::unjournal(Slot& slot, Gone& gone) {
  if (!slot.journalled) return;
  slot.journalled = false;
  --journalled_;
  gone.slots.push_back(number_of(slot));
  gone.epochs.push_back(static_cast<int64_t>(slot.epoch));
}

size_t SlotTable::drop(const int64_t* slots, size_t n, Gone& gone) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check(slots, n);
  return drop_locked(slots, n, gone);
}

size_t SlotTable::drop_locked(const int64_t* slots, size_t n, Gone& gone) {
  size_t dropped = 0;
  for (size_t i = 0; i < n; ++i) {
    Slot& slot = at(slots[i]);
    if (slot.state == State::kReady) {
      forget(slot, gone);
      if (is_evictable(slot)) {
        unlink_evictable(slot);
        release(slot);
      } else {
        slot.state = State::kPrivate;
      }
    } else if (slot.state == State::kWriting) {
      slot.state = State::kPrivate;
      --writing_;
    } else if (is_masked(slot)) {
      forget(slot, gone);
      if (slot.state == State::kMasked) {
        unlink_masked(slot);
        release(slot);
      }
    } else {
      continue;
    }
    ++dropped;
  }
  counts_.dropped += dropped;
  return dropped;
}

size_t SlotTable::quarantine(const int64_t* slots, size_t n, Gone& gone) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check(slots, n);
  for (size_t i = 0; i < n; ++i) {
    Slot& slot = at(slots[i]);
    if (slot.quarantined) continue;
    slot.quarantined = true;
    ++counts_.quarantined;
    if (slot.state != State::kFree) continue;
    unlink_free(slot);
    release(slot);
  }
  return drop_locked(slots, n, gone);
}

std::pair<size_t, size_t> SlotTable::mask(const int64_t* slots, size_t n) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check(slots, n);
  size_t kept = 0, dropped = 0, listed = 0;
  Gone none;  // what is dropped is not journalled
  for (size_t i = 0; i < n; ++i) {
    Slot& slot = at(slots[i]);
    if (slot.quarantined) continue;
    slot.quarantined = true;
    ++counts_.quarantined;
    if (slot.state == State::kFree) {
      unlink_free(slot);
      release(slot);
    } else if (slot.state == State::kReady && slot.journalled) {
      cut(slot);
      listed += slot.pins == 0 ? 1 : 0;
      slot.state = slot.pins == 0 ? State::kMasked : State::kPrivate;
      --ready_;
      ++kept;
    } else {
      dropped += drop_locked(&slots[i], 1, none);
    }
  }
  for (uint32_t i = slots_[used_list_].next; listed != 0;) {  // in the order of eviction
    Slot& slot = slots_[i];
    i = slot.next;
    if (slot.state != State::kMasked) continue;
    unlink_evictable(slot);
    make_masked(slot);
    --listed;
  }
  return {kept, dropped};
}

// Have a masked slot found: it is linked nowhere.
void SlotTable::show(Slot& slot) {
  const uint32_t holder = *map_.find(slot.key);
  if (holder != number_of(slot)) {
    Gone none;  // the holder is not journalled, and so less than this one
    const int64_t number = holder;
    drop_locked(&number, 1, none);
    ++counts_.duplicates;
  }
  slot.state = State::kReady;
  ++ready_;
}

size_t SlotTable::unmask(const int64_t* slots, size_t n) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check(slots, n);
  size_t shown = 0, listed = 0;
  while (n-- > 0) {  // so that the first is handed out first
    Slot& slot = at(slots[n]);
    const bool held = is_masked(slot);
    if (!slot.quarantined) continue;
    slot.quarantined = false;
    shown += held ? 1 : 0;
    if (slot.state == State::kLost) {
      --lost_;
      make_free(slot);
    } else if (slot.state == State::kMasked) {
      ++listed;
    } else if (held) {
      show(slot);
    }
  }
  for (uint32_t i = slots_[masked_list_].previous; listed != 0;) {
    Slot& slot = slots_[i];
    i = slot.previous;
    if (slot.quarantined) continue;
    unlink_masked(slot);
    show(slot);
    link(slot, slots_[used_list_].next);
    ++evictable_;
    --listed;
  }
  return shown;
}

void SlotTable::restore(const int64_t* slots, size_t n) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < n; ++i) {
    if (at(slots[i]).state != State::kLost) {
      throw std::invalid_argument("restore of a slot that is not lost");
    }
  }
  while (n-- > 0) {  // so that the first is handed out first
    Slot& slot = at(slots[n]);
    if (slot.state != State::kLost) continue;  // named twice
    slot.quarantined = slot.deferred = false;
    --lost_;
    make_free(slot);
  }
}

void SlotTable::defer(const bool* mask) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = num_slots_; i-- > 0;) {
    Slot& slot = slots_[i];
    if (slot.deferred == mask[i]) continue;
    const bool is_free = slot.state == State::kFree;
    if (is_free) unlink_free(slot);
    slot.deferred = mask[i];
    if (is_free) make_free(slot);
  }
}

// ---- the walk ----

void SlotTable::begin_walk() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (++walk_ == 0) {  // the numbers begin anew
    for (size_t i = 0; i < num_slots_; ++i) slots_[i].walked = 0;
    ++walk_;
  }
  cursor_ = slots_[masked_list_].next;
  walk_visits_ = num_slots_;
  walk_number_ = 0;
}

bool SlotTable::walk(uint64_t first_sequence, size_t budget, std::vector<Record>& out) {
  const std::lock_guard<std::mutex> lock(mutex_);
  budget = std::max(budget, kListCost);
  return walk_order(budget, first_sequence, out) || walk_numbers(budget, first_sequence, out);
}

bool SlotTable::walk_order(size_t& budget, uint64_t& sequence, std::vector<Record>& out) {
  for (; cursor_ != kept_list_ && walk_visits_ != 0; --walk_visits_) {
    if (budget < kListCost) return true;
    budget -= kListCost;
    if (cursor_ == masked_list_) cursor_ = slots_[used_list_].next;
    if (cursor_ == used_list_) cursor_ = slots_[kept_list_].next;
    if (cursor_ == kept_list_) break;
    Slot& slot = slots_[cursor_];
    cursor_ = slot.next;
    take(slot, sequence, out);
  }
  walk_visits_ = 0;
  return false;
}

bool SlotTable::walk_numbers(size_t& budget, uint64_t& sequence, std::vector<Record>& out) {
  for (; walk_number_ != num_slots_; ++walk_number_) {
    if (budget < kListCost) return true;
    const size_t before = out.size();
    take(slots_[walk_number_], sequence, out);
    budget -= out.size() != before ? kListCost : 1;
  }
  return false;
}

void SlotTable::take(Slot& slot, uint64_t& sequence, std::vector<Record>& out) {
  if (!slot.journalled || std::exchange(slot.walked, walk_) == walk_) return;
  out.push_back(sealed(Kind::kPut, number_of(slot), slot.epoch, sequence++, slot.key));
}

}  // namespace ssdkv
