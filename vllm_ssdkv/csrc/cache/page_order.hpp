// In which order the page cache gives up what it holds: one protocol, a policy each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cache/lru_order.hpp"

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
  virtual void renew(int32_t place) = 0;  // it is for another page now
  virtual void used(int32_t place) = 0;   // a query chose its page
  virtual void read_from(int32_t place, uint16_t device) = 0;

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
  void renew(int32_t) override {}
  void used(int32_t) override {}
  void read_from(int32_t, uint16_t) override {}
  void step(std::span<const double>) override {}

 private:
  LruOrder order_;
};

// Lowest score first, the score of Swarm's equation (6), corrected: f * (T_base + s * T_transfer) /
// s. All entries are single pages (s = 1), so the factor is the time of a read from the device that
// the page is on. The frequency f grows by one when a query chooses the page and falls by one, to
// no less than 0, with each step in which none does (S-7).
//
// f after step t is max(0, end - t) for an `end` that changes with the page's uses alone: so pages
// of one device keep their order while time passes, and each device has a heap of its own.
class FrequentPages final : public PageOrder {
 public:
  explicit FrequentPages(size_t places) : entries_(places), heaps_(1), costs_(1, 1.0) {}

  bool contains(int32_t place) const override { return at(place).position != kNowhere; }
  void add(int32_t place) override;
  void remove(int32_t place) override;
  int32_t first() const override;
  void renew(int32_t place) override;
  void used(int32_t place) override;
  void read_from(int32_t place, uint16_t device) override;
  void step(std::span<const double> costs) override;

 private:
  static constexpr size_t kNowhere = SIZE_MAX;

  struct Entry {
    int64_t end = 0;             // the step at which its frequency is 0
    int64_t last = -1;           // step of its last use
    uint64_t added = 0;          // of equals, who became free first goes first
    size_t position = kNowhere;  // in its device's heap
    uint16_t device = 0;
  };
  using Heap = std::vector<int32_t>;

  Entry& at(int32_t place) { return entries_[static_cast<size_t>(place)]; }
  const Entry& at(int32_t place) const { return entries_[static_cast<size_t>(place)]; }
  bool before(int32_t a, int32_t b) const;
  void put(Heap& heap, size_t position, int32_t place);
  void rise(Heap& heap, size_t position);
  void sink(Heap& heap, size_t position);

  std::vector<Entry> entries_;
  std::vector<Heap> heaps_;  // by device
  std::vector<double> costs_;
  int64_t now_ = 0;
  uint64_t added_ = 0;
};

enum class PagePolicy : uint8_t { kRecent, kFrequent };

std::unique_ptr<PageOrder> make_order(PagePolicy policy, size_t places);

}  // namespace ssdkv
