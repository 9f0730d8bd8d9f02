// DRAM frames by slot, and who may touch their bytes. Tables only: the bytes themselves
// lie in the arena, which this class never looks at.
#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "cache/lru_order.hpp"
#include "io/engine/batch.hpp"

namespace ssdkv {

// Equal to vllm_ssdkv.store.cache.frames.FrameState, which says what the states mean.
enum class FrameState : uint8_t { kFree, kHeld, kWriting, kClean, kLoading, kLost, kShut };
inline constexpr size_t kFrameStates = 7;

using Slots = std::span<const int64_t>;
using Frames = std::span<const int32_t>;

// Thread-safe. Each function takes a whole batch, in time proportional to its length, and changes
// nothing when it throws. Only take_until() waits.
//
// Functions that take slots or frames throw std::out_of_range for a number that does not exist.
class FrameCache {
 public:
  // The last `shut` frames begin in that state.
  FrameCache(size_t frames, size_t slots, size_t shut = 0);
  FrameCache(const FrameCache&) = delete;
  FrameCache& operator=(const FrameCache&) = delete;

  size_t frames() const { return frames_.size(); }
  size_t slots() const { return places_.size(); }

  FrameState state(int64_t frame) const;
  int32_t frame_of(int64_t slot) const;
  size_t count(std::span<const FrameState> states) const;
  std::vector<int32_t> frames_of(Slots slots) const;   // kNoFrame where a slot has none
  std::vector<int64_t> slots_of(Frames frames) const;  // kNoSlot where a frame has none
  size_t spare() const;  // frames that can be had without one of a running context
  uint64_t evictions() const;

  // Contexts that refer to slots. A slot that enters or leaves use by contexts counts as used now.
  void retain(Slots slots);
  std::vector<int64_t> release(Slots slots);  // those without a reference now, ascending, once each
  std::vector<uint8_t> referenced(Slots slots) const;

  // Readers. The last to end its reading makes the frame the most recently used one.
  std::vector<int32_t> borrow(Slots slots);
  void give_back(Frames frames);  // skips kNoFrame

  // Throws std::invalid_argument when a slot has a frame or stands there twice, and for other
  // states than kHeld and kLoading.
  std::vector<int32_t> take(Slots slots, FrameState state, bool spare_contexts);
  // As take(), waiting until the deadline for at least one frame.
  std::vector<int32_t> take_until(Slots slots, FrameState state, Clock::time_point deadline);

  // Frames whose memory is somebody else's for a while. shut() evicts what is clean, passes over
  // what is in use and says which are shut; open() throws std::invalid_argument for one that is
  // not.
  void open(Frames frames);
  std::vector<uint8_t> shut(Frames frames);

  std::vector<int32_t> start_writing(Slots slots);
  // Throws std::invalid_argument for other states than kFree, kHeld and kClean.
  void settle(Frames frames, FrameState state);
  void abandon(Frames frames);
  void forget(Slots slots);

  // Throws std::logic_error, naming what is wrong, unless all tables agree. For tests: it looks at
  // everything.
  void audit() const;

  static constexpr int64_t kNoSlot = -1;

 private:
  struct Frame {
    int64_t slot = kNoSlot;
    int32_t readers = 0;
    FrameState state = FrameState::kFree;
    bool in_flight = false;
  };

  struct Place {  // of a slot
    int32_t frame = kNoFrame;
    int32_t references = 0;
  };

  // All of these: mutex_ held.
  Frame& at(int32_t frame) { return frames_[static_cast<size_t>(frame)]; }
  const Frame& at(int32_t frame) const { return frames_[static_cast<size_t>(frame)]; }
  Place& place(int64_t slot) { return places_[static_cast<size_t>(slot)]; }
  const Place& place(int64_t slot) const { return places_[static_cast<size_t>(slot)]; }
  void check_frames(Frames frames, bool none_allowed = false) const;
  void check_slots(Slots slots) const;
  void set_state(Frame& frame, FrameState state);
  void refile(int32_t frame);   // into or out of the order of eviction, as its state wants
  void unbind(int32_t frame);   // from its slot
  void reclaim(int32_t frame);  // free it if nothing holds it any more
  void wake();                  // those who wait for what became free or may be evicted
  std::vector<int32_t> take_now(Slots slots, FrameState state, bool spare_contexts);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Frame> frames_;
  std::vector<Place> places_;  // by slot
  LruOrder idle_;              // clean frames that nobody reads
  std::vector<int32_t> free_;
  std::array<size_t, kFrameStates> counts_{};
  uint64_t evictions_ = 0;
  bool available_ = false;  // since the last wake(), a frame became free or evictable
};

}  // namespace ssdkv
