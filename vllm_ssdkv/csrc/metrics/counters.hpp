// Counters of a process, by key. In C++ because every step counts some fifty numbers behind a model
// that has emptied the processor's caches: here they are a few lines of memory.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <vector>

namespace ssdkv {

// Every call holds the GIL from its first change to its last, so any thread may call.
class Counters {
 public:
  // Throws std::invalid_argument where keys and values differ in length or a value is negative or
  // not a number; the values before it are counted.
  void add(nanobind::handle keys, nanobind::handle values);
  // Gains since the last call, by key; new keys also if that is nothing.
  nanobind::dict take();
  // Since the start; 0 where nothing was ever counted.
  double total(nanobind::handle key) const;
  nanobind::dict totals() const;

 private:
  struct Counter {
    nanobind::object key;
    double taken = 0.0;
    double gained = 0.0;
    bool untold = true;
  };

  static constexpr size_t kNowhere = static_cast<size_t>(-1);

  size_t place_of(nanobind::handle key) const;  // in counters_, or kNowhere
  Counter& at(nanobind::handle key);

  std::vector<Counter> counters_;
  nanobind::dict places_;  // of keys in counters_: their hashes are known
};

void bind_counters(nanobind::module_& m);

}  // namespace ssdkv
