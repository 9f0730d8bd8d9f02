// In which order the page cache gives up what it holds: one protocol, a policy each.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cache/lru_order.hpp"
#include "cache/place_heap.hpp"

namespace ssdkv {

// The places that may be taken, in order. Not thread-safe. A place that is not contained is in use.
class PageOrder {
 public:
  virtual ~PageOrder() = default;

  virtual bool contains(int32_t place) const = 0;
  virtual void add(int32_t place) = 0;     // its last user has gone
  virtual void remove(int32_t place) = 0;  // it has a user, or holds nothing any more
  virtual int32_t first() const = 0;       // to take next, or -1

  // For places that are not contained:
  virtual void renew(int32_t place, int64_t key) = 0;    // it is for this page now
  virtual void used(int32_t place) = 0;                  // a query chose its page
  virtual void evicted(int32_t place, int64_t key) = 0;  // this page made room for another
  virtual void read_from(int32_t place, uint16_t device) = 0;

  virtual void forget(int64_t key) = 0;  // the page, which no place holds, has another content

  // Queries of the next token follow; relative times of a read from each device.
  virtual void step(std::span<const double> costs) = 0;
};

// Least recently used first.
class RecentPages final : public PageOrder {
 public:
  explicit RecentPages(size_t places) : order_(places) {}

  bool contains(int32_t place) const override { return order_.contains(place); }
  void add(int32_t place) override { order_.add(place, false); }
  void remove(int32_t place) override { order_.remove(place); }
  int32_t first() const override { return order_.first(true); }
  void renew(int32_t, int64_t) override {}
  void used(int32_t) override {}
  void evicted(int32_t, int64_t) override {}
  void read_from(int32_t, uint16_t) override {}
  void forget(int64_t) override {}
  void step(std::span<const double>) override {}

 private:
  LruOrder order_;
};

// Lowest score first: how often queries chose the page of late, times what a read of it costs.
//
// A page's frequency f is counted once per step, in whichever layers and lists it was chosen. Two
// things hold the cache together where it has less room than a step chooses, in all layers
// together:
// - f outlives the page's stay: else everything that is read starts alike, and the cache gives away
//   what the next layer asks for. Known are the pages that left last, `kKnown` for each place.
// - The uses of a step count when it ends: else what layers have done with outweighs what later
// ones
//   will ask for in the very step.
//
// `Fall` says how f falls with time. It keeps the order of two pages as long as neither is chosen,
// so places of one device are in a heap by `Fall::rank`, and each device has one of its own.
template <class Fall>
class CountedPages final : public PageOrder {
 public:
  explicit CountedPages(size_t places) : entries_(places), heaps_(1), costs_(1, 1.0) {}

  bool contains(int32_t place) const override { return at(place).position != kNowhere; }
  void add(int32_t place) override;
  void remove(int32_t place) override { heap(place).remove(*this, place); }
  int32_t first() const override;
  void renew(int32_t place, int64_t key) override;
  void used(int32_t place) override;
  void evicted(int32_t place, int64_t key) override;
  void read_from(int32_t place, uint16_t device) override;
  void forget(int64_t key) override { left_.erase(key); }
  void step(std::span<const double> costs) override;

 private:
  friend class PlaceHeap<CountedPages>;
  static constexpr size_t kKnown = 4;

  struct Count {
    double frequency = 0;  // after the steps before `step`
    int64_t step = 0;
  };
  struct Entry {
    Count count;
    double rank = 0;
    uint64_t added = 0;  // of equals, who became free first goes first
    size_t position = kNowhere;
    uint16_t device = 0;
    bool used = false;  // in this step, which does not count yet
  };
  struct Left {
    Count count;
    uint64_t number;
  };

  Entry& at(int32_t place) { return entries_[static_cast<size_t>(place)]; }
  const Entry& at(int32_t place) const { return entries_[static_cast<size_t>(place)]; }
  size_t& position(int32_t place) { return at(place).position; }
  PlaceHeap<CountedPages>& heap(int32_t place) { return heaps_[at(place).device]; }
  bool before(int32_t a, int32_t b) const;
  void count_use(Entry& entry) const;

  std::vector<Entry> entries_;
  std::vector<PlaceHeap<CountedPages>> heaps_;        // by device
  std::vector<int32_t> used_;                         // places, once each or more often
  std::unordered_map<int64_t, Left> left_;            // by page
  std::deque<std::pair<int64_t, uint64_t>> leaving_;  // pages in the order in which they left
  std::vector<double> costs_;
  int64_t now_ = 0;
  uint64_t added_ = 0;
  uint64_t evicted_ = 0;
};

// Swarm's S-7: one more for each step in which a query chose the page, one less, to no less than 0,
// for each in which none did while the page was in the cache. The score is that of equation (6),
// corrected: f * (T_base + s * T_transfer) / s. All entries are single pages (s = 1), so the factor
// is the time of a read from the device that the page is on.
struct FallByOne {
  static constexpr bool kByCost = true;
  static constexpr bool kFallsOutside = false;
  static double after(double frequency, int64_t steps) {
    return std::max(0.0, frequency - static_cast<double>(steps));
  }
  static double use(double frequency) { return frequency + 1; }
  // The step in which f is 0.
  static double rank(double frequency, int64_t step) {
    return frequency + static_cast<double>(step);
  }
};

// f = 0.7 f + (1 if chosen), in the cache or not. The rank is the logarithm of f / 0.7^step, to the
// base of 1 / 0.7: both fall alike.
struct FallByShare {
  static constexpr bool kByCost = false;
  static constexpr bool kFallsOutside = true;
  static constexpr double kKept = 0.7;
  static double after(double frequency, int64_t steps) {
    return frequency * std::pow(kKept, static_cast<double>(steps));
  }
  static double use(double frequency) { return after(frequency, 1) + 1; }
  static double rank(double frequency, int64_t step) {
    return static_cast<double>(step) - std::log(frequency) / std::log(kKept);
  }
};

using FrequentPages = CountedPages<FallByOne>;
using DecayedPages = CountedPages<FallByShare>;

enum class PagePolicy : uint8_t { kRecent, kFrequent, kDecayed };

std::unique_ptr<PageOrder> make_order(PagePolicy policy, size_t places);

}  // namespace ssdkv
