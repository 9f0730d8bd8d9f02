#include "cache/lru_order.hpp"

namespace ssdkv {

LruOrder::LruOrder(size_t frames) : frames_(static_cast<int32_t>(frames)), links_(frames + 2) {
  for (const bool referenced : {false, true}) {
    const int32_t ring = end(referenced);
    link(ring) = {ring, ring, referenced};
  }
}

void LruOrder::add(int32_t frame, bool referenced) {
  const int32_t ring = end(referenced);
  const int32_t last = link(ring).previous;
  link(frame) = {last, ring, referenced};
  link(last).next = frame;
  link(ring).previous = frame;
  ++counts_[referenced ? 1 : 0];
}

void LruOrder::remove(int32_t frame) {
  const Link old = link(frame);
  link(old.previous).next = old.next;
  link(old.next).previous = old.previous;
  --counts_[old.referenced ? 1 : 0];
  link(frame) = {};
}

int32_t LruOrder::first(bool spare_contexts) const {
  for (const bool referenced : {false, true}) {
    const int32_t found = link(end(referenced)).next;
    if (found != end(referenced)) return found;
    if (spare_contexts) break;
  }
  return kNoFrame;
}

}  // namespace ssdkv
