// What an engine counts per device and direction.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "io/request.hpp"

namespace ssdkv {

using Statistics = std::vector<std::pair<std::string, uint64_t>>;

// Adds {"<name>.<number>", value}.
void append(Statistics& all, std::string name, size_t number, const std::atomic<uint64_t>& value);

// Since the start, of one direction on one device.
struct Totals {
  std::atomic<uint64_t> submitted{0};    // requests accepted
  std::atomic<uint64_t> requests{0};     // requests ended
  std::atomic<uint64_t> bytes{0};        // moved
  std::atomic<uint64_t> errors{0};       // ended with -errno
  std::atomic<uint64_t> nanoseconds{0};  // spent in the device, summed over requests

  void add_ended(int32_t result, uint64_t nanoseconds_spent) noexcept;
};

struct DeviceTotals {
  std::array<Totals, 2> by_op;

  Totals& of(Op op) { return by_op[static_cast<size_t>(op)]; }
  const Totals& of(Op op) const { return by_op[static_cast<size_t>(op)]; }
  // As {"read_bytes.<device>", 4096}.
  void append_to(Statistics& all, size_t device) const;
};

}  // namespace ssdkv
