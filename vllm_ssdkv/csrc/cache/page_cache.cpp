#include "cache/page_cache.hpp"

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>
#include <tuple>

namespace ssdkv {
namespace {

// Ends of the runs of consecutive numbers in an ascending list.
template <class T>
std::vector<std::pair<size_t, size_t>> runs_of(std::span<const T> numbers) {
  std::vector<std::pair<size_t, size_t>> runs;
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (i == 0 || numbers[i] != numbers[i - 1] + 1) runs.emplace_back(i, i);
    runs.back().second = i + 1;
  }
  return runs;
}

// Neighbours among the pages get neighbouring places where there are such, so that one request can
// read both: the longest runs of pages first, each from the longest run of places that is left.
void match(std::span<const int64_t> keys, std::span<int32_t> places) {
  std::sort(places.begin(), places.end());
  auto wanted = runs_of(keys);
  if (wanted.size() == keys.size()) return;
  const auto longer = [](const auto& a, const auto& b) {
    return a.second - a.first > b.second - b.first;
  };
  std::stable_sort(wanted.begin(), wanted.end(), longer);
  const std::vector<int32_t> sorted(places.begin(), places.end());
  auto there = runs_of(std::span<const int32_t>(sorted));
  std::stable_sort(there.begin(), there.end(), longer);
  size_t run = 0;
  for (auto [begin, end] : wanted) {
    while (begin < end) {
      if (there[run].first == there[run].second) ++run;
      places[begin++] = sorted[there[run].first++];
    }
  }
}

}  // namespace

PageCache::PageCache(const PageLayout& layout, size_t places, size_t slots, size_t pages,
                     PagePolicy policy)
    : layout_(layout),
      slots_(static_cast<int64_t>(slots)),
      pages_(static_cast<int64_t>(pages)),
      table_(places),
      place_of_(static_cast<int32_t*>(std::calloc(slots * pages + 1, sizeof(int32_t)))),
      order_(make_order(policy, places)) {
  if (places >= INT32_MAX) throw std::invalid_argument("more places than fit 31 bits");
  if (!place_of_) throw std::bad_alloc();
  free_.reserve(places);  // never grows: drop() cannot fail
  for (size_t place = places; place > 0; --place) list(static_cast<int32_t>(place - 1));
}

AskedPages PageCache::acquire(std::span<const int64_t> slots, std::span<const int64_t> pages,
                              std::span<const uint64_t> frames) {
  check(slots, pages, frames);
  AskedPages asked;
  asked.which.resize(slots.size(), kNoPlace);
  std::vector<Missing> missing;
  std::vector<int64_t> framed;
  ++stamp_;
  for (size_t i = 0; i < slots.size(); ++i) {
    const int64_t wanted = key(slots[i], pages[i]);
    if (frames[i] != 0) {
      framed.push_back(wanted);
      continue;
    }
    const int32_t place = place_of(wanted) - 1;
    if (place == kNoPlace) {
      missing.push_back({wanted, static_cast<int32_t>(i), 0});
      continue;
    }
    Place& here = at(place);
    if (here.stamp != stamp_) {
      here.stamp = stamp_;
      here.entry = static_cast<int32_t>(asked.keys.size());
      asked.keys.push_back(wanted);
      asked.places.push_back(place);
      asked.coming += here.coming;
      asked.guessed += here.guessed;
      here.guessed = false;
      use(place);
      order_->used(place);
    }
    asked.which[i] = here.entry;
  }
  asked.held = asked.keys.size();
  std::sort(missing.begin(), missing.end(),
            [](const Missing& a, const Missing& b) { return a.key < b.key; });
  for (const Missing& page : missing) {
    if (asked.keys.size() == asked.held || asked.keys.back() != page.key) {
      asked.keys.push_back(page.key);
    }
    asked.which[static_cast<size_t>(page.asked)] = static_cast<int32_t>(asked.keys.size() - 1);
  }
  asked_ += asked.keys.size();
  bring(asked, false);
  asked.framed = count_framed(std::move(framed));
  return asked;
}

AskedPages PageCache::prefetch(std::span<const int64_t> slots, std::span<const int64_t> pages,
                               std::span<const uint64_t> frames, std::span<const int32_t> begin,
                               size_t limit, std::span<const uint16_t> devices,
                               std::span<const int64_t> quota) {
  check(slots, pages, frames);
  for (size_t list = 0; list + 1 < begin.size(); ++list) {
    if (begin[list] < 0 || begin[list] > begin[list + 1]) {
      throw std::invalid_argument("lists of pages are ascending");
    }
  }
  if (!begin.empty() && static_cast<size_t>(begin.back()) > slots.size()) {
    throw std::out_of_range("lists end behind the pages");
  }
  if (!devices.empty() && devices.size() != slots.size()) {
    throw std::invalid_argument("each page has a device, or none has");
  }
  for (const uint16_t device : devices) {
    if (device >= quota.size()) throw std::out_of_range("device " + std::to_string(device));
  }
  std::vector<Missing> missing;
  for (size_t list = 0; list + 1 < begin.size(); ++list) {
    int32_t rank = 0;
    for (int32_t i = begin[list]; i < begin[list + 1]; ++i) {
      const auto page = static_cast<size_t>(i);
      const int64_t wanted = key(slots[page], pages[page]);
      if (frames[page] != 0 || place_of(wanted) != 0) continue;
      missing.push_back({wanted, i, rank++});
    }
  }
  // Lists share pages: each counts once, where a list names it soonest.
  std::sort(missing.begin(), missing.end(), [](const Missing& a, const Missing& b) {
    return std::tie(a.key, a.rank, a.asked) < std::tie(b.key, b.rank, b.asked);
  });
  missing.erase(std::unique(missing.begin(), missing.end(),
                            [](const Missing& a, const Missing& b) { return a.key == b.key; }),
                missing.end());
  std::sort(missing.begin(), missing.end(), [](const Missing& a, const Missing& b) {
    return std::tie(a.rank, a.asked) < std::tie(b.rank, b.asked);
  });
  std::vector<int64_t> left(quota.begin(), quota.end());
  AskedPages asked;
  for (const Missing& page : missing) {
    if (asked.keys.size() == limit) break;
    if (!devices.empty() && left[devices[static_cast<size_t>(page.asked)]]-- <= 0) continue;
    asked.keys.push_back(page.key);
  }
  std::sort(asked.keys.begin(), asked.keys.end());
  bring(asked, true);
  while (!asked.places.empty() && asked.places.back() == kNoPlace) {
    asked.places.pop_back();
    asked.keys.pop_back();
  }
  return asked;
}

void PageCache::bring(AskedPages& asked, bool guessed) {
  std::vector<int32_t> taken = take(asked.keys.size() - asked.held);
  match({asked.keys.data() + asked.held, taken.size()}, taken);
  for (size_t i = 0; i < taken.size(); ++i) {
    const int64_t wanted = asked.keys[asked.held + i];
    Place& here = at(taken[i]);
    here.key = wanted;
    here.coming = true;
    here.guessed = guessed;
    place_of(wanted) = taken[i] + 1;
    order_->renew(taken[i], wanted);
    if (!guessed) order_->used(taken[i]);
  }
  asked.places.insert(asked.places.end(), taken.begin(), taken.end());
  asked.places.resize(asked.keys.size(), kNoPlace);
}

std::vector<int32_t> PageCache::take(size_t count) {
  std::vector<int32_t> taken;
  taken.reserve(count);
  while (taken.size() < count) {
    int32_t place = kNoPlace;
    if (!free_.empty()) {
      place = free_.back();
      free_.pop_back();
      at(place).listed = false;
      if (at(place).closed) continue;
    } else {
      place = order_->first();
      if (place == kNoPlace) break;
      order_->remove(place);
      order_->evicted(place, at(place).key);
      place_of(at(place).key) = 0;
      --held_;
      ++evictions_;
    }
    at(place) = {};
    at(place).users = 1;
    ++taken_;
    taken.push_back(place);
  }
  return taken;
}

void PageCache::complete(std::span<const int64_t> keys, std::span<const int32_t> places,
                         std::span<const uint8_t> good, std::span<const uint16_t> devices) {
  check_places(places);
  if (keys.size() != places.size() || good.size() != places.size() ||
      devices.size() != places.size()) {
    throw std::invalid_argument("keys, places, good and devices are of one length");
  }
  for (size_t i = 0; i < places.size(); ++i) {
    if (places[i] == kNoPlace) continue;
    Place& here = at(places[i]);
    if (!here.coming || here.key != keys[i]) continue;  // it was forgotten meanwhile
    here.coming = false;
    if (good[i] == 0) {
      place_of(here.key) = 0;
      here.key = -1;
      continue;
    }
    ++held_;
    order_->read_from(places[i], devices[i]);
  }
}

FoundPages PageCache::find(std::span<const int64_t> pages, std::span<const uint64_t> frames,
                           std::span<const int32_t> which, std::span<const int64_t> keys,
                           std::span<const int32_t> places) const {
  check_places(places);
  if (pages.size() != which.size() || frames.size() != which.size() ||
      keys.size() != places.size()) {
    throw std::invalid_argument("these are not the pages that were asked for");
  }
  FoundPages found{std::vector<uint64_t>(which.size()), std::vector<uint8_t>(which.size(), 1)};
  for (size_t i = 0; i < which.size(); ++i) {
    if (which[i] == kNoPlace) {
      found.address[i] =
          frames[i] + layout_.header_bytes + static_cast<uint64_t>(pages[i]) * layout_.page_bytes;
      continue;
    }
    const auto entry = static_cast<size_t>(which[i]);
    if (entry >= keys.size()) throw std::out_of_range("entry " + std::to_string(entry));
    const int32_t place = places[entry];
    found.here[i] = place != kNoPlace && at(place).key == keys[entry] && !at(place).coming;
    if (found.here[i] != 0) {
      found.address[i] = layout_.address + static_cast<uint64_t>(place) * layout_.page_bytes;
    }
  }
  return found;
}

std::vector<uint8_t> PageCache::holds(std::span<const int64_t> slots,
                                      std::span<const int64_t> pages) const {
  check(slots, pages);
  std::vector<uint8_t> held(slots.size());
  for (size_t i = 0; i < slots.size(); ++i) {
    const int32_t place = place_of_[static_cast<size_t>(key(slots[i], pages[i]))] - 1;
    held[i] = place != kNoPlace && !at(place).coming;
  }
  return held;
}

void PageCache::release(std::span<const int32_t> places) {
  check_places(places);
  for (const int32_t place : places) {
    if (place == kNoPlace || --at(place).users != 0) continue;
    --taken_;
    if (at(place).key == -1) {
      list(place);
    } else {
      order_->add(place);
    }
  }
}

void PageCache::forget(std::span<const int64_t> slots) {
  for (const int64_t slot : slots) {
    if (slot < 0 || slot >= slots_) throw std::out_of_range("slot " + std::to_string(slot));
  }
  for (const int64_t slot : slots) {
    for (int64_t page = 0; page < pages_; ++page) {
      const int32_t place = place_of(key(slot, page)) - 1;
      if (place != kNoPlace) {
        drop(place);
      } else {
        order_->forget(key(slot, page));
      }
    }
  }
}

std::vector<int32_t> PageCache::held_in(std::span<const int32_t> firsts, int32_t length) const {
  check_runs(firsts, length);
  std::vector<int32_t> found(firsts.size());
  for (size_t i = 0; i < firsts.size(); ++i) {
    for (int32_t place = firsts[i]; place < firsts[i] + length; ++place) {
      if (at(place).users != 0) {
        found[i] = -1;
        break;
      }
      found[i] += at(place).key != -1;
    }
  }
  return found;
}

std::vector<uint8_t> PageCache::close(std::span<const int32_t> firsts, int32_t length) {
  const std::vector<int32_t> held = held_in(firsts, length);
  std::vector<uint8_t> done(firsts.size());
  for (size_t i = 0; i < firsts.size(); ++i) {
    if (held[i] == -1) continue;
    done[i] = 1;
    for (int32_t place = firsts[i]; place < firsts[i] + length; ++place) {
      if (at(place).key != -1) drop(place);
      closed_ += !at(place).closed;
      at(place).closed = true;
    }
  }
  return done;
}

void PageCache::open(std::span<const int32_t> firsts, int32_t length) {
  check_runs(firsts, length);
  for (const int32_t first : firsts) {
    for (int32_t place = first; place < first + length; ++place) {
      if (!at(place).closed) continue;
      at(place).closed = false;
      --closed_;
      if (!at(place).listed) list(place);
    }
  }
}

void PageCache::list(int32_t place) {
  at(place).listed = true;
  free_.push_back(place);
}

void PageCache::drop(int32_t place) {
  Place& here = at(place);
  place_of(here.key) = 0;
  if (!here.coming) --held_;
  here.key = -1;
  here.coming = here.guessed = false;
  if (here.users != 0) return;
  order_->remove(place);
  list(place);
}

void PageCache::use(int32_t place) {
  if (at(place).users++ != 0) return;
  ++taken_;
  order_->remove(place);
}

size_t PageCache::count_framed(std::vector<int64_t> keys) const {
  std::sort(keys.begin(), keys.end());
  return static_cast<size_t>(std::unique(keys.begin(), keys.end()) - keys.begin());
}

void PageCache::check(std::span<const int64_t> slots, std::span<const int64_t> pages,
                      std::span<const uint64_t> frames) const {
  if (slots.size() != frames.size()) {
    throw std::invalid_argument("slots and frames are of one length");
  }
  check(slots, pages);
}

void PageCache::check(std::span<const int64_t> slots, std::span<const int64_t> pages) const {
  if (slots.size() != pages.size()) {
    throw std::invalid_argument("slots and pages are of one length");
  }
  if (slots.size() >= INT32_MAX) throw std::invalid_argument("more pages than fit 31 bits");
  for (size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] < 0 || slots[i] >= slots_ || pages[i] < 0 || pages[i] >= pages_) {
      throw std::out_of_range("page " + std::to_string(pages[i]) + " of slot " +
                              std::to_string(slots[i]));
    }
  }
}

void PageCache::check_runs(std::span<const int32_t> firsts, int32_t length) const {
  if (length < 0) throw std::invalid_argument("a run has a length");
  const auto places = static_cast<int64_t>(table_.size());
  for (const int32_t first : firsts) {
    if (first < 0 || int64_t{first} + length > places) {
      throw std::out_of_range("place " + std::to_string(first));
    }
  }
}

void PageCache::check_places(std::span<const int32_t> places) const {
  for (const int32_t place : places) {
    if (place != kNoPlace && (place < 0 || static_cast<size_t>(place) >= table_.size())) {
      throw std::out_of_range("place " + std::to_string(place));
    }
  }
}

}  // namespace ssdkv
