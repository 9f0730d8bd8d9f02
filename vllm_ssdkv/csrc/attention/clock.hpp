// Clock of a step's attention: see vllm_ssdkv/kernels/step_clock.py.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>

namespace ssdkv::attention {

class AttentionClock {
 public:
  static constexpr std::size_t kParts = 6;  // clock.py names them
  enum Part : std::size_t { kSelect, kFetch, kAhead, kWait, kAttend, kMerge };

  // A layer begins, with attention to windows.
  void start() {
    last_ = Clock::now();
    in_window_ = true;
  }
  // Throws std::out_of_range.
  void lap(std::size_t part) {
    const Clock::time_point now = Clock::now();
    const double seconds = std::chrono::duration<double>(now - last_).count();
    seconds_.at(part) += seconds;
    if (in_window_ && part == kAttend) window_seconds_ += seconds;
    if (part == kFetch) fetched_ = now;
    in_window_ = false;
    last_ = now;
  }
  const std::array<double, kParts>& seconds() const { return seconds_; }
  double window_seconds() const { return window_seconds_; }
  // End of the latest look-up or fetch of pages, as Python's time.monotonic() tells it.
  double fetched_at() const {
    return std::chrono::duration<double>(fetched_.time_since_epoch()).count();
  }

 private:
  using Clock = std::chrono::steady_clock;

  std::array<double, kParts> seconds_{};
  double window_seconds_ = 0;
  bool in_window_ = false;
  Clock::time_point last_{}, fetched_{};
};

}  // namespace ssdkv::attention
