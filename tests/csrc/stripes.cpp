// Slots to requests: the arithmetic itself is tested from Python, here what is out of bounds.
#include "io/stripes.hpp"

#include <limits>
#include <stdexcept>

#include "suite.hpp"

namespace ssdkv::test {
namespace {

// One unit on each of two devices.
StripeTable two_devices() {
  return {2, 1, 2, 4096, 8192, 0, 1, {0, 1, 1, 0}, {0, 0, 1, 1}, {2, 2}};
}

void finds_slots() {
  const StripeTable table = two_devices();
  table.check();
  const std::vector<int64_t> begin{0, 1 << 20};
  const std::vector<StripedRange> ranges{{10, 4, &table, begin.data()}};
  const std::vector<int64_t> slots{10, 11, 13}, all{0};
  const SlotRequests found = find_slots(ranges, slots, all, 8192, 0, true);
  check(found.device == std::vector<uint16_t>{0, 1, 1, 0, 1, 0}, "devices");
  check(found.offset[0] == 0 && found.offset[1] == 1 << 20, "offsets of the first slot");
  check(found.offset[4] == (1 << 20) + 3 * 4096, "offset in the second row");
  check(found.buffer.back() == 2 * 8192 + 4096, "where it goes");
}

void refuses_hostile_numbers() {
  const StripeTable table = two_devices();
  const std::vector<int64_t> begin{0, 0};
  const std::vector<StripedRange> ranges{{10, 4, &table, begin.data()}};
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const auto refused = [&](int64_t slot, int64_t offset, int64_t length) {
    const std::vector<int64_t> slots{slot}, offsets{offset};
    check_throws<std::invalid_argument>(
        [&] { find_slots(ranges, slots, offsets, length, 0, true); }, "it is refused");
  };
  for (const int64_t slot : {int64_t{-1}, int64_t{9}, int64_t{14}, kMost, -kMost}) {
    refused(slot, 0, 1);
  }
  for (const int64_t offset : {int64_t{-1}, int64_t{8192}, kMost, -kMost}) refused(10, offset, 1);
  for (const int64_t length : {int64_t{0}, int64_t{-1}, int64_t{8193}, kMost, -kMost}) {
    refused(10, 0, length);
  }
  StripeTable wrong = two_devices();
  wrong.device[1] = 2;
  check_throws<std::invalid_argument>([&] { wrong.check(); }, "no such device");
  wrong = two_devices();
  wrong.place.pop_back();
  check_throws<std::invalid_argument>([&] { wrong.check(); }, "a table that is too small");
}

}  // namespace

Tests stripe_tests() {
  return {{"stripes find slots", finds_slots},
          {"stripes refuse hostile numbers", refuses_hostile_numbers}};
}

}  // namespace ssdkv::test
