// Eviction order of idle frames. Pages have another one: page_order.hpp.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ssdkv {

inline constexpr int32_t kNoFrame = -1;

// Least recently used first, in two classes: frames of running contexts go after all others. This
// class is all that the cache knows of a policy: another one needs these six functions. Every one
// takes constant time. Not thread-safe.
class LruOrder {
 public:
  explicit LruOrder(size_t frames);

  bool contains(int32_t frame) const { return link(frame).next != kNoFrame; }
  bool referenced(int32_t frame) const { return link(frame).referenced; }  // class, if contained

  // A frame that is not contained becomes the last of its class.
  void add(int32_t frame, bool referenced);
  void remove(int32_t frame);

  size_t count(bool referenced) const { return counts_[referenced ? 1 : 0]; }

  // The frame to evict next, or kNoFrame; none of a context when those are spared.
  int32_t first(bool spare_contexts) const;

 private:
  struct Link {
    int32_t previous = kNoFrame;
    int32_t next = kNoFrame;
    bool referenced = false;
  };

  Link& link(int32_t frame) { return links_[static_cast<size_t>(frame)]; }
  const Link& link(int32_t frame) const { return links_[static_cast<size_t>(frame)]; }
  int32_t end(bool referenced) const { return frames_ + (referenced ? 1 : 0); }

  const int32_t frames_;
  std::vector<Link> links_;  // by frame, then the ends of the two rings
  std::array<size_t, 2> counts_{};
};

}  // namespace ssdkv
