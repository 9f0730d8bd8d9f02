// C simulation only: stands in for the vendor's header of this name. Own code.
#pragma once

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace hls {

// Processes run one after another in C simulation, so a stream holds all that the writer wrote.
// What would wait for ever in hardware, reading what nobody wrote, ends the program.
template <typename T, int Depth = 0>
class stream {
 public:
  stream() = default;
  explicit stream(const char* name) : name_(name) {}
  stream(const stream&) = delete;
  stream& operator=(const stream&) = delete;

  void write(const T& value) { held_.push_back(value); }

  T read() {
    if (next_ == held_.size()) {
      std::fprintf(stderr, "stream %s: read of what was not written\n", name_);
      std::abort();
    }
    const T value = held_[next_++];
    if (next_ == held_.size()) {
      held_.clear();
      next_ = 0;
    }
    return value;
  }

  bool empty() const { return next_ == held_.size(); }

 private:
  const char* name_ = "";
  std::vector<T> held_;
  std::size_t next_ = 0;
};

}  // namespace hls
