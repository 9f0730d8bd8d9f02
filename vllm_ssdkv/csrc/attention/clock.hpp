// Clock of a step's attention: see vllm_ssdkv/kernels/step_clock.py.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>

namespace ssdkv::attention {

class AttentionClock {
 public:
  static constexpr std::size_t kParts = 6;  // clock.py names them

  void start() { last_ = Clock::now(); }
  // Throws std::out_of_range.
  void lap(std::size_t part) {
    const Clock::time_point now = Clock::now();
    seconds_.at(part) += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }
  const std::array<double, kParts>& seconds() const { return seconds_; }

 private:
  using Clock = std::chrono::steady_clock;

  std::array<double, kParts> seconds_{};
  Clock::time_point last_{};
};

}  // namespace ssdkv::attention
