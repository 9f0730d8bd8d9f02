#include "index/key_map.hpp"

#include <random>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace ssdkv {
namespace {

uint64_t random_seed() {
  std::random_device source;
  return (uint64_t{source()} << 32) | source();
}

}  // namespace

KeyMap::KeyMap(const std::byte* keys, size_t stride, size_t max_entries)
    : keys_(keys),
      stride_(stride),
      seed_(random_seed()),
      places_(max_entries + max_entries / 2 + 2) {}

uint32_t KeyMap::tag_of(const Key& key) const {
  return static_cast<uint32_t>(XXH3_64bits_withSeed(key.data(), key.size(), seed_) >> 32);
}

std::optional<uint32_t> KeyMap::find(const Key& key) const {
  const uint32_t tag = tag_of(key);
  for (size_t at = home(tag); places_[at].number != 0; at = after(at)) {
    const uint32_t number = places_[at].number - 1;
    if (places_[at].tag == tag && key_of(number) == key) return number;
  }
  return std::nullopt;
}

void KeyMap::insert(uint32_t number) {
  const uint32_t tag = tag_of(key_of(number));
  size_t at = home(tag);
  while (places_[at].number != 0) at = after(at);
  places_[at] = {tag, number + 1};
  ++size_;
}

void KeyMap::erase(uint32_t number) {
  size_t hole = home(tag_of(key_of(number)));
  while (places_[hole].number != number + 1) hole = after(hole);
  // Whatever follows without a gap and may lie in the hole, seen from where it wants to be, moves
  // there: a search stops at the first empty place.
  for (size_t at = after(hole); places_[at].number != 0; at = after(at)) {
    const size_t wanted = home(places_[at].tag);
    const bool between = hole < at ? hole < wanted && wanted <= at : hole < wanted || wanted <= at;
    if (between) continue;
    places_[hole] = places_[at];
    hole = at;
  }
  places_[hole] = {};
  --size_;
}

}  // namespace ssdkv
