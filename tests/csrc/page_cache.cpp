// The tables of single pages and all orders of eviction, under sanitizers; what they answer is
// compared with a model in tests/store/cache/test_selected_pages.py.
#include "cache/page_cache.hpp"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "cache/page_lookup.hpp"
#include "suite.hpp"

namespace ssdkv::test {
namespace {

constexpr size_t kPlaces = 40, kSlots = 16, kPages = 13, kRounds = 4000;
constexpr PageLayout kLayout{1 << 20, 4096, 4096};

struct Fetch {
  std::vector<int64_t> pages;
  std::vector<uint64_t> frames;
  AskedPages asked;
};

// Fetches and guesses overlap, fail, and are forgotten on their way; all places come back.
void use_cache(PagePolicy policy) {
  PageCache cache(kLayout, kPlaces, kSlots, kPages, policy);
  Random random(7);
  std::vector<Fetch> running;
  const std::vector<double> costs{1.0, 0.5, 4.0};
  for (size_t round = 0; round < kRounds; ++round) {
    if (random(3) == 0) cache.step(costs);
    std::vector<int64_t> slots(random(12)), pages(slots.size());
    std::vector<uint64_t> frames(slots.size());
    for (size_t i = 0; i < slots.size(); ++i) {
      slots[i] = static_cast<int64_t>(random(kSlots));
      pages[i] = static_cast<int64_t>(random(kPages));
      frames[i] = random(5) == 0 ? 1 << 30 : 0;
    }
    if (random(3) == 0) {
      const std::vector<int32_t> begin{0, static_cast<int32_t>(slots.size())};
      running.push_back({{}, {}, cache.prefetch(slots, pages, frames, begin, random(6), {}, {})});
    } else {
      AskedPages asked = cache.acquire(slots, pages, frames);
      running.push_back({std::move(pages), std::move(frames), std::move(asked)});
    }
    if (random(10) == 0) {
      // Runs of four places; what is taken is passed over.
      const std::vector<int32_t> runs{24, 28, 32, 36};
      cache.open(std::span(runs).first(random(3)), 4);
      const auto closed = cache.close(std::span(runs).last(random(3)), 4);
      const auto held = cache.held_in(std::span(runs).last(closed.size()), 4);
      for (size_t i = 0; i < closed.size(); ++i) {
        check(held[i] == (closed[i] != 0 ? 0 : -1), "what is closed holds nothing");
      }
      check(cache.held() <= kPlaces - cache.closed(), "nor does it count");
    }
    if (random(20) == 0) cache.forget(std::vector{static_cast<int64_t>(random(kSlots))});
    while (running.size() > 3 || (round + 1 == kRounds && !running.empty())) {
      const size_t which = random(running.size());
      Fetch ended = std::move(running[which]);
      running.erase(running.begin() + static_cast<std::ptrdiff_t>(which));
      const AskedPages& asked = ended.asked;
      const size_t reads = asked.keys.size() - asked.held;
      std::vector<uint8_t> good(reads);
      std::vector<uint16_t> devices(reads);
      for (size_t i = 0; i < reads; ++i) {
        good[i] = random(8) != 0;
        devices[i] = static_cast<uint16_t>(random(4));
      }
      cache.complete(std::span(asked.keys).subspan(asked.held),
                     std::span(asked.places).subspan(asked.held), good, devices);
      const FoundPages found =
          cache.find(ended.pages, ended.frames, asked.which, asked.keys, asked.places);
      for (size_t i = 0; i < found.here.size(); ++i) {
        check((found.address[i] != 0) == (found.here[i] != 0), "only what is there has an address");
      }
      cache.release(asked.places);
    }
    check(cache.taken() + cache.held() <= 2 * kPlaces && cache.held() <= kPlaces,
          "counts are sane");
  }
  check(cache.taken() == 0, "all places come back");
  std::vector<int64_t> everything(kSlots);
  std::iota(everything.begin(), everything.end(), 0);
  cache.forget(everything);
  check(cache.held() == 0, "nothing is held");
  check(cache.evictions() > 0, "pages made room for others");
  cache.open(std::vector<int32_t>{24, 28, 32, 36}, 4);
  check(cache.closed() == 0, "all is open again");
  std::vector<int64_t> slots(kPlaces), pages(kPlaces);
  for (size_t i = 0; i < kPlaces; ++i) {
    slots[i] = static_cast<int64_t>(i / kPages);
    pages[i] = static_cast<int64_t>(i % kPages);
  }
  const AskedPages all = cache.acquire(slots, pages, std::vector<uint64_t>(kPlaces));
  check(std::ranges::count(all.places, kNoPlace) == 0, "and every place can be had");
  cache.complete(all.keys, all.places, std::vector<uint8_t>(kPlaces),
                 std::vector<uint16_t>(kPlaces));
  cache.release(all.places);
}

void refuse_nonsense() {
  PageCache cache(kLayout, kPlaces, kSlots, kPages, PagePolicy::kRecent);
  const std::vector<int64_t> slot{0}, beyond{kSlots};
  const std::vector<uint64_t> frame{0};
  check_throws<std::out_of_range>([&] { cache.acquire(beyond, slot, frame); }, "a slot too far");
  check_throws<std::out_of_range>([&] { cache.forget(beyond); }, "a slot too far");
  check_throws<std::invalid_argument>([&] { cache.acquire(slot, slot, {}); }, "too few frames");
  check_throws<std::out_of_range>([&] { cache.release(std::vector<int32_t>{kPlaces}); }, "a place");
  for (const int32_t bad : {-1, static_cast<int32_t>(kPlaces) - 3, INT32_MAX}) {
    const std::vector<int32_t> runs{0, bad};
    check_throws<std::out_of_range>([&] { (void)cache.close(runs, 4); }, "a run too far");
    check_throws<std::out_of_range>([&] { cache.open(runs, 4); }, "a run too far");
    check_throws<std::out_of_range>([&] { (void)cache.held_in(runs, 4); }, "a run too far");
  }
  check_throws<std::invalid_argument>([&] { cache.open(std::vector<int32_t>{8}, -4); }, "a length");
  check(cache.taken() == 0 && cache.closed() == 0, "nothing has changed");
}

void locate_pages() {
  const std::vector<int32_t> first{0, 2}, pages{0, 3, 1, 2, 3}, begin{0, 2, 3, 3, 5};
  const std::vector<int64_t> slots{7, 5, 9, 4};
  const std::vector<uint64_t> frames{0, 1, 0, 2};
  const PageShape shape{2, 2, 8, 100};
  const LocatedPages found = locate({first, slots, frames}, shape, pages, begin);
  check(found.slots == std::vector<int64_t>{7, 5, 7, 4, 4}, "slots");
  check(found.pages == std::vector<int64_t>{100, 101, 103, 102, 103}, "pages");
  check(found.frames == std::vector<uint64_t>{0, 1, 0, 2, 2}, "frames");
  check(found.position == std::vector<int64_t>{0, 24, 8, 16, 24}, "positions");
  check(found.blocks == std::vector<int32_t>{0, 1, 0, 3, 3}, "blocks");
  const std::vector<int32_t> far{0, 3, 1, 2, 4};
  check_throws<std::out_of_range>([&] { locate({first, slots, frames}, shape, far, begin); },
                                  "a block too far");
  const std::vector<int32_t> wild{0, 1000000, 3, 3, 5};
  check_throws<std::invalid_argument>([&] { locate({first, slots, frames}, shape, pages, wild); },
                                      "a list that ends behind the pages");
}

}  // namespace

Tests page_cache_tests() {
  return {{"page_cache.recent", [] { use_cache(PagePolicy::kRecent); }},
          {"page_cache.frequent", [] { use_cache(PagePolicy::kFrequent); }},
          {"page_cache.decayed", [] { use_cache(PagePolicy::kDecayed); }},
          {"page_cache.nonsense", refuse_nonsense},
          {"page_cache.locate", locate_pages}};
}

}  // namespace ssdkv::test
