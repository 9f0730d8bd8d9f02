#include "cache/page_order.hpp"

#include <algorithm>
#include <tuple>

namespace ssdkv {

std::unique_ptr<PageOrder> make_order(PagePolicy policy, size_t places) {
  if (policy == PagePolicy::kFrequent) return std::make_unique<FrequentPages>(places);
  return std::make_unique<RecentPages>(places);
}

void FrequentPages::renew(int32_t place) {
  at(place).end = now_ - 1;
  at(place).last = -1;
}

void FrequentPages::read_from(int32_t place, uint16_t device) {
  at(place).device = device;
  if (device >= heaps_.size()) heaps_.resize(device + size_t{1});
}

void FrequentPages::used(int32_t place) {
  Entry& entry = at(place);
  if (entry.last == now_) return;  // by another query of this step
  // A step without a use took one away, this one gives one: `end` counts from the step before.
  entry.end = std::max(entry.end, now_ - 1) + 2;
  entry.last = now_;
}

void FrequentPages::step(std::span<const double> costs) {
  ++now_;
  costs_.assign(costs.begin(), costs.end());
}

int32_t FrequentPages::first() const {
  int32_t best = -1;
  std::tuple<double, int64_t, uint64_t> lowest;
  for (size_t device = 0; device < heaps_.size(); ++device) {
    if (heaps_[device].empty()) continue;
    const int32_t place = heaps_[device].front();
    const Entry& entry = at(place);
    const double cost = device < costs_.size() ? costs_[device] : 1.0;
    const auto frequency = static_cast<double>(std::max<int64_t>(0, entry.end - now_));
    const std::tuple score(frequency * cost, entry.end, entry.added);
    if (best == -1 || score < lowest) std::tie(best, lowest) = std::tuple(place, score);
  }
  return best;
}

// ---- a heap per device, whose entries know where they are ----

bool FrequentPages::before(int32_t a, int32_t b) const {
  return std::tie(at(a).end, at(a).added) < std::tie(at(b).end, at(b).added);
}

void FrequentPages::add(int32_t place) {
  Heap& heap = heaps_[at(place).device];
  at(place).added = ++added_;
  heap.push_back(place);
  put(heap, heap.size() - 1, place);
  rise(heap, heap.size() - 1);
}

void FrequentPages::remove(int32_t place) {
  Heap& heap = heaps_[at(place).device];
  const size_t position = at(place).position;
  const int32_t last = heap.back();
  heap.pop_back();
  at(place).position = kNowhere;
  if (last == place) return;
  put(heap, position, last);
  rise(heap, position);
  sink(heap, at(last).position);
}

void FrequentPages::put(Heap& heap, size_t position, int32_t place) {
  heap[position] = place;
  at(place).position = position;
}

void FrequentPages::rise(Heap& heap, size_t position) {
  const int32_t place = heap[position];
  while (position > 0) {
    const size_t parent = (position - 1) / 2;
    if (!before(place, heap[parent])) break;
    put(heap, position, heap[parent]);
    position = parent;
  }
  put(heap, position, place);
}

void FrequentPages::sink(Heap& heap, size_t position) {
  const int32_t place = heap[position];
  for (;;) {
    size_t child = 2 * position + 1;
    if (child >= heap.size()) break;
    if (child + 1 < heap.size() && before(heap[child + 1], heap[child])) ++child;
    if (!before(heap[child], place)) break;
    put(heap, position, heap[child]);
    position = child;
  }
  put(heap, position, place);
}

}  // namespace ssdkv
