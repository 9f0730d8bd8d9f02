// Key to number, in one flat array: a hash table of numbers whose keys lie elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "index/huge_page_array.hpp"
#include "index/record.hpp"

namespace ssdkv {

// Linear probing at a load of two thirds at most, and deletion that moves entries back, so that
// there are no tombstones and never a rebuild. 12 bytes per entry. Not thread-safe.
class KeyMap {
 public:
  // Number i has its key at keys + i * stride. At most max_entries are in the map at a time.
  KeyMap(const std::byte* keys, size_t stride, size_t max_entries);

  std::optional<uint32_t> find(const Key& key) const;

  // The key of `number` must be absent.
  void insert(uint32_t number);

  // The key of `number` must be present, and still where it was.
  void erase(uint32_t number);

  size_t size() const { return size_; }
  size_t nbytes() const { return places_.nbytes(); }

 private:
  struct Entry {
    uint32_t tag;     // of the hash: says where the entry wants to be, without a look at its key
    uint32_t number;  // plus one; 0 is an empty place
  };

  const Key& key_of(uint32_t number) const {
    return *reinterpret_cast<const Key*>(keys_ + stride_ * number);
  }
  uint32_t tag_of(const Key& key) const;
  size_t home(uint32_t tag) const { return (places_.size() * tag) >> 32; }
  size_t after(size_t at) const { return at + 1 == places_.size() ? 0 : at + 1; }

  const std::byte* const keys_;
  const size_t stride_;
  const uint64_t seed_;  // keys come from prompts: nobody shall be able to make them collide
  HugePageArray<Entry> places_;
  size_t size_ = 0;
};

}  // namespace ssdkv
