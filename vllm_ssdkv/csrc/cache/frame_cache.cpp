#include "cache/frame_cache.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace ssdkv {
namespace {

constexpr int32_t kTaking = -2;  // in Place::frame: this slot is part of the batch being looked at

size_t index(FrameState state) { return static_cast<size_t>(state); }

bool readable(FrameState state) {
  return state == FrameState::kHeld || state == FrameState::kWriting || state == FrameState::kClean;
}

[[noreturn]] void no_such(const char* what, int64_t number, size_t count) {
  throw std::out_of_range(std::string(what) + " " + std::to_string(number) + " of " +
                          std::to_string(count));
}

}  // namespace

FrameCache::FrameCache(size_t frames, size_t slots, size_t shut)
    : frames_(frames), places_(slots), idle_(frames) {
  if (frames >= INT32_MAX) throw std::invalid_argument("more frames than fit 31 bits");
  if (shut > frames) throw std::invalid_argument("more frames are shut than there are");
  free_.reserve(frames);  // never grows: reclaim() cannot fail
  const size_t open = frames - shut;
  for (size_t frame = open; frame > 0; --frame) free_.push_back(static_cast<int32_t>(frame - 1));
  for (size_t frame = open; frame < frames; ++frame) frames_[frame].state = FrameState::kShut;
  counts_[index(FrameState::kFree)] = open;
  counts_[index(FrameState::kShut)] = shut;
}

// ---- looking ----

FrameState FrameCache::state(int64_t frame) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (frame < 0 || static_cast<size_t>(frame) >= frames_.size()) {
    no_such("frame", frame, frames_.size());
  }
  return frames_[static_cast<size_t>(frame)].state;
}

int32_t FrameCache::frame_of(int64_t slot) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  check_slots({&slot, 1});
  return place(slot).frame;
}

size_t FrameCache::count(std::span<const FrameState> states) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  size_t total = 0;
  for (const FrameState state : states) total += counts_[index(state)];
  return total;
}

std::vector<int32_t> FrameCache::frames_of(Slots slots) const {
  std::vector<int32_t> frames(slots.size());
  const std::lock_guard<std::mutex> lock(mutex_);
  check_slots(slots);
  for (size_t i = 0; i < slots.size(); ++i) frames[i] = place(slots[i]).frame;
  return frames;
}

std::vector<int64_t> FrameCache::slots_of(Frames frames) const {
  std::vector<int64_t> slots(frames.size());
  const std::lock_guard<std::mutex> lock(mutex_);
  check_frames(frames);
  for (size_t i = 0; i < frames.size(); ++i) slots[i] = at(frames[i]).slot;
  return slots;
}

size_t FrameCache::spare() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return free_.size() + idle_.count(false);
}

uint64_t FrameCache::evictions() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return evictions_;
}

// ---- contexts ----

void FrameCache::retain(Slots slots) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check_slots(slots);
  for (const int64_t slot : slots) {
    Place& here = place(slot);
    if (++here.references == 1 && here.frame != kNoFrame) refile(here.frame);
  }
}

std::vector<int64_t> FrameCache::release(Slots slots) {
  std::vector<int64_t> loose;
  loose.reserve(slots.size());
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    check_slots(slots);
    for (const int64_t slot : slots) {
      Place& here = place(slot);
      if (--here.references == 0 && here.frame != kNoFrame) refile(here.frame);
    }
    for (const int64_t slot : slots) {
      if (place(slot).references <= 0) loose.push_back(slot);
    }
  }
  std::sort(loose.begin(), loose.end());
  loose.erase(std::unique(loose.begin(), loose.end()), loose.end());
  return loose;
}

std::vector<uint8_t> FrameCache::referenced(Slots slots) const {
  std::vector<uint8_t> found(slots.size());
  const std::lock_guard<std::mutex> lock(mutex_);
  check_slots(slots);
  for (size_t i = 0; i < slots.size(); ++i) found[i] = place(slots[i]).references > 0;
  return found;
}

// ---- reading ----

std::vector<int32_t> FrameCache::borrow(Slots slots) {
  std::vector<int32_t> found(slots.size(), kNoFrame);
  const std::lock_guard<std::mutex> lock(mutex_);
  check_slots(slots);
  for (size_t i = 0; i < slots.size(); ++i) {
    const int32_t frame = place(slots[i]).frame;
    if (frame == kNoFrame || !readable(at(frame).state)) continue;
    found[i] = frame;
    if (++at(frame).readers == 1) refile(frame);
  }
  return found;
}

void FrameCache::give_back(Frames frames) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check_frames(frames, true);
  for (const int32_t frame : frames) {
    if (frame == kNoFrame || --at(frame).readers != 0) continue;
    refile(frame);
    reclaim(frame);
  }
  wake();
}

// ---- taking ----

std::vector<int32_t> FrameCache::take(Slots slots, FrameState state, bool spare_contexts) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return take_now(slots, state, spare_contexts);
}

std::vector<int32_t> FrameCache::take_until(Slots slots, FrameState state,
                                            Clock::time_point deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    std::vector<int32_t> taken = take_now(slots, state, false);
    if (!taken.empty() || slots.empty() || Clock::now() >= deadline) return taken;
    changed_.wait_until(lock, deadline);
  }
}

std::vector<int32_t> FrameCache::take_now(Slots slots, FrameState state, bool spare_contexts) {
  if (state != FrameState::kHeld && state != FrameState::kLoading) {
    throw std::invalid_argument("a frame is taken to be filled or read into");
  }
  check_slots(slots);
  std::vector<int32_t> taken;
  taken.reserve(std::min(slots.size(), frames_.size()));
  for (size_t i = 0; i < slots.size(); ++i) {
    if (place(slots[i]).frame == kNoFrame) {
      place(slots[i]).frame = kTaking;
      continue;
    }
    const bool twice = place(slots[i]).frame == kTaking;
    while (i > 0) place(slots[--i]).frame = kNoFrame;
    throw std::invalid_argument(twice ? "a slot stands twice in a batch"
                                      : "a slot that has a frame cannot get another");
  }
  for (const int64_t slot : slots) place(slot).frame = kNoFrame;
  for (const int64_t slot : slots) {
    if (free_.empty()) {
      const int32_t victim = idle_.first(spare_contexts);
      if (victim == kNoFrame) break;
      unbind(victim);
      reclaim(victim);
      ++evictions_;
    }
    const int32_t frame = free_.back();
    free_.pop_back();
    at(frame).slot = slot;
    at(frame).in_flight = state == FrameState::kLoading;
    set_state(at(frame), state);
    place(slot).frame = frame;
    taken.push_back(frame);
  }
  return taken;
}

// ---- lending their memory ----

void FrameCache::open(Frames frames) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check_frames(frames);
  for (const int32_t frame : frames) {
    if (at(frame).state != FrameState::kShut) {
      throw std::invalid_argument("frame " + std::to_string(frame) + " is not shut");
    }
  }
  for (const int32_t frame : frames) {
    if (at(frame).state == FrameState::kFree) continue;  // it stands there twice
    set_state(at(frame), FrameState::kFree);
    free_.push_back(frame);
    available_ = true;
  }
  wake();
}

std::vector<uint8_t> FrameCache::shut(Frames frames) {
  std::vector<uint8_t> done(frames.size());
  const std::lock_guard<std::mutex> lock(mutex_);
  check_frames(frames);
  for (size_t i = 0; i < frames.size(); ++i) {
    const int32_t frame = frames[i];
    if (idle_.contains(frame)) {
      unbind(frame);
      reclaim(frame);
      ++evictions_;
    }
    if (at(frame).state == FrameState::kFree) set_state(at(frame), FrameState::kShut);
    done[i] = at(frame).state == FrameState::kShut;
  }
  std::erase_if(free_, [this](int32_t frame) { return at(frame).state == FrameState::kShut; });
  return done;
}

// ---- writing and loading ----

std::vector<int32_t> FrameCache::start_writing(Slots slots) {
  std::vector<int32_t> found(slots.size(), kNoFrame);
  const std::lock_guard<std::mutex> lock(mutex_);
  check_slots(slots);
  for (size_t i = 0; i < slots.size(); ++i) {
    const int32_t frame = place(slots[i]).frame;
    if (frame == kNoFrame || at(frame).state != FrameState::kHeld) continue;
    set_state(at(frame), FrameState::kWriting);
    at(frame).in_flight = true;
    found[i] = frame;
  }
  return found;
}

void FrameCache::settle(Frames frames, FrameState state) {
  if (state != FrameState::kFree && state != FrameState::kHeld && state != FrameState::kClean) {
    throw std::invalid_argument("after its I/O a frame is free, held or clean");
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  check_frames(frames);
  for (const int32_t frame : frames) {
    at(frame).in_flight = false;
    if (at(frame).slot != kNoSlot) {
      if (state == FrameState::kFree) {
        unbind(frame);
      } else {
        set_state(at(frame), state);
        refile(frame);
      }
    }
    reclaim(frame);
  }
  wake();
}

void FrameCache::abandon(Frames frames) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check_frames(frames);
  for (const int32_t frame : frames) {
    if (at(frame).slot != kNoSlot) unbind(frame);
  }
}

void FrameCache::forget(Slots slots) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check_slots(slots);
  for (const int64_t slot : slots) {
    const int32_t frame = place(slot).frame;
    if (frame == kNoFrame) continue;
    unbind(frame);
    reclaim(frame);
  }
  wake();
}

// ---- with the mutex held ----

void FrameCache::check_frames(Frames frames, bool none_allowed) const {
  for (const int32_t frame : frames) {
    if (frame == kNoFrame && none_allowed) continue;
    if (frame < 0 || static_cast<size_t>(frame) >= frames_.size()) {
      no_such("frame", frame, frames_.size());
    }
  }
}

void FrameCache::check_slots(Slots slots) const {
  for (const int64_t slot : slots) {
    if (slot < 0 || static_cast<size_t>(slot) >= places_.size()) {
      no_such("slot", slot, places_.size());
    }
  }
}

void FrameCache::set_state(Frame& frame, FrameState state) {
  --counts_[index(frame.state)];
  ++counts_[index(state)];
  frame.state = state;
}

void FrameCache::refile(int32_t frame) {
  if (idle_.contains(frame)) idle_.remove(frame);
  if (at(frame).state != FrameState::kClean || at(frame).readers != 0) return;
  idle_.add(frame, place(at(frame).slot).references > 0);
  available_ = true;
}

void FrameCache::unbind(int32_t frame) {
  place(at(frame).slot).frame = kNoFrame;
  at(frame).slot = kNoSlot;
  set_state(at(frame), FrameState::kLost);
  refile(frame);
}

void FrameCache::reclaim(int32_t frame) {
  Frame& here = at(frame);
  if (here.state != FrameState::kLost || here.in_flight || here.readers != 0) return;
  set_state(here, FrameState::kFree);
  free_.push_back(frame);
  available_ = true;
}

void FrameCache::wake() {
  if (available_) changed_.notify_all();
  available_ = false;
}

// ---- for tests ----

void FrameCache::audit() const {
  const auto require = [](bool condition, const char* what, int64_t number) {
    if (!condition) throw std::logic_error(std::string(what) + ": " + std::to_string(number));
  };
  const std::lock_guard<std::mutex> lock(mutex_);
  std::array<size_t, kFrameStates> counts{};
  std::vector<bool> free(frames_.size());
  for (const int32_t frame : free_) {
    require(!free[static_cast<size_t>(frame)], "free twice", frame);
    free[static_cast<size_t>(frame)] = true;
  }
  for (size_t i = 0; i < frames_.size(); ++i) {
    const auto number = static_cast<int32_t>(i);
    const Frame& frame = frames_[i];
    ++counts[index(frame.state)];
    const bool shut = frame.state == FrameState::kShut;
    const bool unbound =
        shut || frame.state == FrameState::kFree || frame.state == FrameState::kLost;
    require(unbound == (frame.slot == kNoSlot), "state and slot disagree", number);
    require(unbound || place(frame.slot).frame == number, "not its slot's frame", number);
    require(free[i] == (frame.state == FrameState::kFree), "state and free list disagree", number);
    require(frame.readers >= 0 && !((free[i] || shut) && (frame.readers != 0 || frame.in_flight)),
            "free but in use", number);
    require(idle_.contains(number) == (frame.state == FrameState::kClean && frame.readers == 0),
            "state and order of eviction disagree", number);
    require(
        !idle_.contains(number) || idle_.referenced(number) == (place(frame.slot).references > 0),
        "in the wrong class", number);
  }
  for (size_t i = 0; i < places_.size(); ++i) {
    const int32_t frame = places_[i].frame;
    require(frame == kNoFrame || at(frame).slot == static_cast<int64_t>(i), "not its frame's slot",
            static_cast<int64_t>(i));
  }
  require(counts == counts_, "frames are counted wrong", 0);
}

}  // namespace ssdkv
