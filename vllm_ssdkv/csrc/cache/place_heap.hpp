// Binary heaps of places that know where they are in it: any of them leaves in O(log n).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ssdkv {

inline constexpr size_t kNowhere = SIZE_MAX;  // the position of a place that is in no heap

// `Table` has before(a, b), a strict order of places, and position(place), a reference to the
// place's position. Several heaps may share a table; a place is in one of them at most. The order
// of places that are contained does not change. Not thread-safe.
template <class Table>
class PlaceHeap {
 public:
  bool empty() const { return heap_.empty(); }
  int32_t first() const { return heap_.front(); }

  void add(Table& table, int32_t place) {
    heap_.push_back(place);
    rise(table, heap_.size() - 1);
  }

  void remove(Table& table, int32_t place) {
    const size_t position = table.position(place);
    const int32_t last = heap_.back();
    heap_.pop_back();
    table.position(place) = kNowhere;
    if (last == place) return;
    put(table, position, last);
    rise(table, position);
    sink(table, table.position(last));
  }

 private:
  void put(Table& table, size_t position, int32_t place) {
    heap_[position] = place;
    table.position(place) = position;
  }

  void rise(Table& table, size_t position) {
    const int32_t place = heap_[position];
    while (position > 0) {
      const size_t parent = (position - 1) / 2;
      if (!table.before(place, heap_[parent])) break;
      put(table, position, heap_[parent]);
      position = parent;
    }
    put(table, position, place);
  }

  void sink(Table& table, size_t position) {
    const int32_t place = heap_[position];
    for (;;) {
      size_t child = 2 * position + 1;
      if (child >= heap_.size()) break;
      if (child + 1 < heap_.size() && table.before(heap_[child + 1], heap_[child])) ++child;
      if (!table.before(heap_[child], place)) break;
      put(table, position, heap_[child]);
      position = child;
    }
    put(table, position, place);
  }

  std::vector<int32_t> heap_;
};

}  // namespace ssdkv
