// The frame tables from many threads. Every frame has a stamp that is no atomic: the cache alone
// keeps those who write it from those who read it, and TSan sees when it does not.
#include <atomic>
#include <chrono>
#include <numeric>
#include <stdexcept>

#include "cache/frame_cache.hpp"
#include "suite.hpp"

namespace ssdkv::test {
namespace {

constexpr size_t kFrames = 24;
constexpr size_t kShared = 64;    // slots that everybody loads and reads
constexpr size_t kPerWriter = 8;  // slots that one thread alone fills
constexpr unsigned kWriters = 2, kLoaders = 2, kReaders = 2;
constexpr unsigned kRounds = 3000;
constexpr size_t kShut = 10;  // the last frames, which come and go
constexpr size_t kSlots = kShared + kWriters * kPerWriter;

struct Rig {
  FrameCache cache{kFrames, kSlots, kShut};
  std::vector<int64_t> stamp = std::vector<int64_t>(kFrames);
  std::atomic<uint64_t> hits{0};

  int64_t& at(int32_t frame) { return stamp[static_cast<size_t>(frame)]; }
};

std::vector<int64_t> some_slots(Random& random, size_t first, size_t count) {
  std::vector<int64_t> slots(count);
  std::iota(slots.begin(), slots.end(), static_cast<int64_t>(first));
  for (size_t i = count; i > 1; --i) std::swap(slots[i - 1], slots[random(i)]);
  slots.resize(1 + random(std::min<size_t>(count, 6)));
  return slots;
}

// Fills frames of its own slots, writes them and sometimes forgets them on the way.
void write_slots(Rig& rig, unsigned thread) {
  Random random(100 + thread);
  const size_t first = kShared + thread * kPerWriter;
  for (unsigned round = 0; round < kRounds; ++round) {
    auto slots = some_slots(random, first, kPerWriter);
    rig.cache.forget(slots);
    const auto deadline = Clock::now() + std::chrono::seconds(60);
    const auto frames = rig.cache.take_until(slots, FrameState::kHeld, deadline);
    check(!frames.empty(), "a frame becomes free in time");
    slots.resize(frames.size());
    for (size_t i = 0; i < frames.size(); ++i) rig.at(frames[i]) = slots[i];
    const auto writing = rig.cache.start_writing(slots);
    check(writing == frames, "what is held can be written");
    for (size_t i = 0; i < frames.size(); ++i) {
      check(rig.at(frames[i]) == slots[i], "what is written is what was filled in");
    }
    if (random(4) == 0) rig.cache.forget(slots);
    const bool good = random(4) != 0;
    rig.cache.settle(frames, good ? FrameState::kClean : FrameState::kHeld);
    if (!good) rig.cache.forget(slots);
  }
}

// Loads shared slots that have no frame; some loads fail or are late.
void load_slots(Rig& rig, unsigned thread, std::mutex& one_loader) {
  Random random(200 + thread);
  for (unsigned round = 0; round < kRounds; ++round) {
    auto slots = some_slots(random, 0, kShared);
    std::vector<int32_t> frames;
    {
      // As in the store: between looking for slots without a frame and taking, nobody else takes.
      const std::lock_guard<std::mutex> lock(one_loader);
      std::erase_if(slots, [&](int64_t slot) { return rig.cache.frame_of(slot) != kNoFrame; });
      frames = rig.cache.take(slots, FrameState::kLoading, random(2) == 0);
    }
    slots.resize(frames.size());
    for (size_t i = 0; i < frames.size(); ++i) rig.at(frames[i]) = slots[i];
    const uint64_t end = random(5);
    if (end == 0) rig.cache.abandon(frames);
    rig.cache.settle(frames, end <= 1 ? FrameState::kFree : FrameState::kClean);
  }
}

// Reads shared slots, within contexts.
void read_slots(Rig& rig, unsigned thread) {
  Random random(300 + thread);
  for (unsigned round = 0; round < kRounds; ++round) {
    const auto slots = some_slots(random, 0, kShared);
    rig.cache.retain(slots);
    const auto frames = rig.cache.borrow(slots);
    for (size_t i = 0; i < slots.size(); ++i) {
      if (frames[i] == kNoFrame) continue;
      rig.hits.fetch_add(1, std::memory_order_relaxed);
      check(rig.at(frames[i]) == slots[i], "a frame holds its slot");
    }
    if (random(8) == 0) rig.cache.forget(slots);
    for (size_t i = 0; i < slots.size(); ++i) {
      check(frames[i] == kNoFrame || rig.at(frames[i]) == slots[i],
            "and keeps it while it is read");
    }
    rig.cache.give_back(frames);
    for (const uint8_t wanted : rig.cache.referenced(slots)) check(wanted != 0, "a context holds");
    (void)rig.cache.release(slots);
  }
}

// Lends memory to frames, and takes it back for a while.
void move_border(Rig& rig) {
  Random random(400);
  std::vector<int32_t> shut(kShut), open;
  std::iota(shut.begin(), shut.end(), static_cast<int32_t>(kFrames - kShut));
  for (unsigned round = 0; round < kRounds; ++round) {
    const auto count = static_cast<std::ptrdiff_t>(random(shut.size() + 1));
    rig.cache.open(std::span(shut).first(static_cast<size_t>(count)));
    open.insert(open.end(), shut.begin(), shut.begin() + count);
    shut.erase(shut.begin(), shut.begin() + count);
    const auto done = rig.cache.shut(open);
    for (size_t i = open.size(); i > 0; --i) {
      if (done[i - 1] == 0) continue;
      rig.at(open[i - 1]) = -1;
      shut.push_back(open[i - 1]);
      open.erase(open.begin() + static_cast<std::ptrdiff_t>(i - 1));
    }
  }
  rig.cache.open(shut);
}

void many_threads() {
  Rig rig;
  std::mutex one_loader;
  in_threads(kWriters + kLoaders + kReaders + 2, [&](unsigned thread) {
    if (thread < kWriters) {
      write_slots(rig, thread);
    } else if (thread < kWriters + kLoaders) {
      load_slots(rig, thread, one_loader);
    } else if (thread < kWriters + kLoaders + kReaders) {
      read_slots(rig, thread);
    } else if (thread == kWriters + kLoaders + kReaders) {
      move_border(rig);
    } else {
      for (unsigned round = 0; round < kRounds / 10; ++round) rig.cache.audit();
    }
  });
  check(rig.hits.load() > 0 && rig.cache.evictions() > 0, "there was something to see");
  std::vector<int64_t> everything(kSlots);
  std::iota(everything.begin(), everything.end(), 0);
  rig.cache.forget(everything);
  rig.cache.audit();
  const FrameState free[] = {FrameState::kFree};
  check(rig.cache.count(free) == kFrames, "every frame came back");
}

void waiting_ends() {
  FrameCache cache(2, 8);
  const std::vector<int64_t> first{0, 1};
  const auto held = cache.take(first, FrameState::kHeld, false);
  const std::vector<int64_t> wanted{5};
  const auto soon = Clock::now() + std::chrono::milliseconds(20);
  check(cache.take_until(wanted, FrameState::kHeld, soon).empty(), "a deadline ends a wait");
  in_threads(3, [&](unsigned thread) {
    const auto late = Clock::now() + std::chrono::seconds(60);
    if (thread < 2) {
      const std::vector<int64_t> mine{6 + static_cast<int64_t>(thread)};
      check(cache.take_until(mine, FrameState::kHeld, late).size() == 1,
            "a free frame ends a wait");
    } else {
      const auto writing = cache.start_writing(first);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      cache.settle(std::span(writing).first(1), FrameState::kClean);
      cache.settle(std::span(writing).last(1), FrameState::kFree);
    }
  });
  check(held.size() == 2 && cache.evictions() == 1, "one was evicted, one was free");
  cache.audit();
}

void memory_is_lent() {
  FrameCache cache(3, 8, 2);
  const FrameState free[] = {FrameState::kFree}, shut[] = {FrameState::kShut};
  check(cache.count(free) == 1 && cache.count(shut) == 2 && cache.spare() == 1, "shut at first");
  const std::vector<int64_t> slots{4, 5, 6};
  check(cache.take(slots, FrameState::kHeld, false).size() == 1, "what is shut is not given out");
  cache.open(std::vector<int32_t>{2});
  const auto taken = cache.take(std::span(slots).subspan(1), FrameState::kLoading, false);
  check(taken == std::vector<int32_t>{2}, "what is open is");
  const std::vector<int32_t> all{0, 1, 2};
  check(cache.shut(all) == std::vector<uint8_t>({0, 1, 0}), "nothing in use is taken away");
  check(cache.slots_of(all) == std::vector<int64_t>({4, -1, 5}), "and stays where it is");
  check(cache.frames_of(slots) == std::vector<int32_t>({0, 2, kNoFrame}), "either way");
  cache.settle(taken, FrameState::kClean);
  check(cache.spare() == 1, "what nobody refers to can be had");
  cache.retain(std::span(slots).subspan(1, 1));
  check(cache.spare() == 0, "what a context refers to is not spare");
  check(cache.shut(taken) == std::vector<uint8_t>{1} && cache.evictions() == 1, "but may be shut");
  check(cache.frame_of(5) == kNoFrame, "then its slot has no frame");
  const std::vector<int32_t> twice{2, 2, 1};
  cache.open(twice);
  check(cache.count(free) == 2, "a frame that is named twice is free once");
  cache.audit();
  check_throws<std::invalid_argument>([&] { cache.open(std::span(twice).first(1)); },
                                      "open looks at states");
  check_throws<std::invalid_argument>([] { FrameCache(2, 3, 3); },
                                      "no more are shut than there are");
}

void bad_batches() {
  FrameCache cache(2, 3);
  for (const int64_t bad : {int64_t{-1}, int64_t{3}, INT64_MAX, INT64_MIN}) {
    const std::vector<int64_t> slots{0, bad};
    check_throws<std::out_of_range>([&] { cache.retain(slots); }, "retain looks");
    check_throws<std::out_of_range>([&] { (void)cache.release(slots); }, "release looks");
    check_throws<std::out_of_range>([&] { (void)cache.borrow(slots); }, "borrow looks");
    check_throws<std::out_of_range>([&] { (void)cache.frames_of(slots); }, "frames_of looks");
    check_throws<std::out_of_range>([&] { (void)cache.take(slots, FrameState::kHeld, false); },
                                    "take looks");
    check_throws<std::out_of_range>([&] { cache.forget(slots); }, "forget looks");
  }
  for (const int32_t bad : {-2, 2, INT32_MAX, INT32_MIN}) {
    const std::vector<int32_t> frames{0, bad};
    check_throws<std::out_of_range>([&] { cache.give_back(frames); }, "give_back looks");
    check_throws<std::out_of_range>([&] { cache.settle(frames, FrameState::kFree); },
                                    "settle looks");
    check_throws<std::out_of_range>([&] { cache.abandon(frames); }, "abandon looks");
    check_throws<std::out_of_range>([&] { cache.open(frames); }, "open looks");
    check_throws<std::out_of_range>([&] { (void)cache.shut(frames); }, "shut looks");
    check_throws<std::out_of_range>([&] { (void)cache.slots_of(frames); }, "slots_of looks");
  }
  const std::vector<int64_t> twice{1, 2, 1};
  check_throws<std::invalid_argument>([&] { (void)cache.take(twice, FrameState::kHeld, false); },
                                      "take refuses a slot twice");
  cache.audit();
  FrameCache none(0, 3);
  check(none.take(Slots(twice).first(1), FrameState::kHeld, false).empty(), "no frames at all");
}

}  // namespace

Tests cache_tests() {
  return {{"cache: bad batches change nothing", bad_batches},
          {"cache: waiting ends", waiting_ends},
          {"cache: memory is lent", memory_is_lent},
          {"cache: many threads", many_threads}};
}

}  // namespace ssdkv::test
