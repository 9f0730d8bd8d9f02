#include "cache/page_order.hpp"

#include <tuple>

namespace ssdkv {

std::unique_ptr<PageOrder> make_order(PagePolicy policy, size_t places) {
  if (policy == PagePolicy::kFrequent) return std::make_unique<FrequentPages>(places);
  if (policy == PagePolicy::kDecayed) return std::make_unique<DecayedPages>(places);
  return std::make_unique<RecentPages>(places);
}

template <class Fall>
void CountedPages<Fall>::add(int32_t place) {
  Entry& entry = at(place);
  entry.added = ++added_;
  entry.rank = Fall::rank(entry.count.frequency, entry.count.step);
  heap(place).add(*this, place);
}

template <class Fall>
void CountedPages<Fall>::renew(int32_t place, int64_t key) {
  Entry& entry = at(place);
  entry.used = false;
  entry.count = {0, now_};
  const auto found = left_.find(key);
  if (found == left_.end()) return;
  entry.count = found->second.count;
  if (!Fall::kFallsOutside) entry.count.step = std::max(entry.count.step, now_);
  left_.erase(found);
}

template <class Fall>
void CountedPages<Fall>::used(int32_t place) {
  if (at(place).used) return;  // by another query of this step
  at(place).used = true;
  used_.push_back(place);
}

template <class Fall>
void CountedPages<Fall>::count_use(Entry& entry) const {
  Count& count = entry.count;
  entry.used = false;
  if (count.step > now_) return;  // it left in this step, and is back
  count = {Fall::use(Fall::after(count.frequency, now_ - count.step)), now_ + 1};
}

template <class Fall>
void CountedPages<Fall>::evicted(int32_t place, int64_t key) {
  Entry& entry = at(place);
  if (entry.used) count_use(entry);
  Count count = entry.count;
  if (!Fall::kFallsOutside && count.step < now_) {
    count = {Fall::after(count.frequency, now_ - count.step), now_};
  }
  if (count.frequency == 0) return;
  left_[key] = {count, ++evicted_};
  leaving_.emplace_back(key, evicted_);
  if (leaving_.size() <= kKnown * entries_.size()) return;
  const auto [oldest, number] = leaving_.front();
  leaving_.pop_front();
  const auto found = left_.find(oldest);
  if (found != left_.end() && found->second.number == number) left_.erase(found);
}

template <class Fall>
void CountedPages<Fall>::read_from(int32_t place, uint16_t device) {
  if (!Fall::kByCost) return;
  at(place).device = device;
  if (device >= heaps_.size()) heaps_.resize(device + size_t{1});
}

template <class Fall>
void CountedPages<Fall>::step(std::span<const double> costs) {
  for (const int32_t place : used_) {
    Entry& entry = at(place);
    if (!entry.used) continue;  // it has been given away
    const bool idle = contains(place);
    if (idle) remove(place);
    count_use(entry);
    if (idle) add(place);
  }
  used_.clear();
  ++now_;
  costs_.assign(costs.begin(), costs.end());
}

template <class Fall>
int32_t CountedPages<Fall>::first() const {
  int32_t best = -1;
  std::tuple<double, double, uint64_t> lowest;
  for (size_t device = 0; device < heaps_.size(); ++device) {
    if (heaps_[device].empty()) continue;
    const int32_t place = heaps_[device].first();
    const Entry& entry = at(place);
    const double cost = device < costs_.size() ? costs_[device] : 1.0;
    const int64_t steps = std::max<int64_t>(0, now_ - entry.count.step);
    const double frequency = Fall::after(entry.count.frequency, steps);
    const std::tuple score(frequency * cost, entry.rank, entry.added);
    if (best == -1 || score < lowest) std::tie(best, lowest) = std::tuple(place, score);
  }
  return best;
}

template <class Fall>
bool CountedPages<Fall>::before(int32_t a, int32_t b) const {
  return std::tie(at(a).rank, at(a).added) < std::tie(at(b).rank, at(b).added);
}

template class CountedPages<FallByOne>;
template class CountedPages<FallByShare>;

}  // namespace ssdkv
