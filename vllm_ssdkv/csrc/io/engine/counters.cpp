#include "io/engine/counters.hpp"

namespace ssdkv {

void append(Statistics& all, std::string name, size_t number, const std::atomic<uint64_t>& value) {
  name += '.';
  name += std::to_string(number);
  all.emplace_back(std::move(name), value.load(std::memory_order_relaxed));
}

void DirectionCounters::add_ended(int32_t result, uint64_t nanoseconds_spent) noexcept {
  requests.fetch_add(1, std::memory_order_relaxed);
  nanoseconds.fetch_add(nanoseconds_spent, std::memory_order_relaxed);
  latency.add(nanoseconds_spent);
  if (result < 0) {
    errors.fetch_add(1, std::memory_order_relaxed);
  } else {
    bytes.fetch_add(static_cast<uint64_t>(result), std::memory_order_relaxed);
  }
}

void DeviceCounters::add_started(unsigned in_flight) noexcept {
  depth.add(in_flight);
  depth_sum.fetch_add(in_flight, std::memory_order_relaxed);
}

void DeviceCounters::append_to(Statistics& all, size_t device) const {
  for (const Op op : {Op::kRead, Op::kWrite}) {
    const DirectionCounters& totals = of(op);
    const std::string direction = op == Op::kRead ? "read_" : "write_";
    append(all, direction + "submitted", device, totals.submitted);
    append(all, direction + "requests", device, totals.requests);
    append(all, direction + "bytes", device, totals.bytes);
    append(all, direction + "errors", device, totals.errors);
    append(all, direction + "nanoseconds", device, totals.nanoseconds);
    totals.latency.append_to(all, direction + "latency", device);
  }
  depth.append_to(all, "depth", device);
  append(all, "depth_sum", device, depth_sum);
}

}  // namespace ssdkv
