// Counters of an engine per device and direction.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "io/engine/request.hpp"

namespace ssdkv {

using Statistics = std::vector<std::pair<std::string, uint64_t>>;

// Adds {"<name>.<number>", value}.
void append(Statistics& all, std::string name, size_t number, const std::atomic<uint64_t>& value);

// Numbers of values that were at most each bound and above the one before; the last counts the
// rest.
template <size_t N>
class Histogram {
 public:
  explicit constexpr Histogram(const std::array<uint64_t, N>& bounds) : bounds_(bounds) {}

  void add(uint64_t value) noexcept {
    const auto bound = std::lower_bound(bounds_.begin(), bounds_.end(), value);
    counts_[static_cast<size_t>(bound - bounds_.begin())].fetch_add(1, std::memory_order_relaxed);
  }
  // As {"<name>_<bound>.<number>", count}, the last bound being "inf".
  void append_to(Statistics& all, const std::string& name, size_t number) const {
    const std::string prefix = name + "_";
    for (size_t i = 0; i <= N; ++i) {
      const std::string bound = i < N ? std::to_string(bounds_[i]) : "inf";
      append(all, prefix + bound, number, counts_[i]);
    }
  }

 private:
  const std::array<uint64_t, N>& bounds_;
  std::array<std::atomic<uint64_t>, N + 1> counts_{};
};

// In metrics.py too, which the tests compare. A flash drive's answer takes 60 us, a dying one's s.
inline constexpr std::array<uint64_t, 15> kLatencyBounds{
    50'000,      100'000,     200'000,     500'000,       1'000'000,
    2'000'000,   5'000'000,   10'000'000,  20'000'000,    50'000'000,
    100'000'000, 200'000'000, 500'000'000, 1'000'000'000, 5'000'000'000};
inline constexpr std::array<uint64_t, 9> kDepthBounds{1, 2, 4, 8, 16, 32, 64, 128, 256};

// Since the start, of one direction on one device.
struct DirectionCounters {
  std::atomic<uint64_t> submitted{0};    // requests accepted
  std::atomic<uint64_t> requests{0};     // requests ended
  std::atomic<uint64_t> bytes{0};        // moved
  std::atomic<uint64_t> errors{0};       // ended with -errno
  std::atomic<uint64_t> nanoseconds{0};  // spent in the device, summed over requests
  Histogram<kLatencyBounds.size()> latency{kLatencyBounds};  // nanoseconds in the device

  void add_ended(int32_t result, uint64_t nanoseconds_spent) noexcept;
};

struct DeviceCounters {
  std::array<DirectionCounters, 2> by_op;
  Histogram<kDepthBounds.size()> depth{kDepthBounds};
  std::atomic<uint64_t> depth_sum{0};

  // A request was given to the device, which has `in_flight` now, this one included.
  void add_started(unsigned in_flight) noexcept;

  DirectionCounters& of(Op op) { return by_op[static_cast<size_t>(op)]; }
  const DirectionCounters& of(Op op) const { return by_op[static_cast<size_t>(op)]; }
  // As {"read_bytes.<device>", 4096}.
  void append_to(Statistics& all, size_t device) const;
};

}  // namespace ssdkv
