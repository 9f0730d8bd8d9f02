// Slots to requests: the arithmetic itself is tested from Python, here what is out of bounds.
#include "io/slot/stripes.hpp"

#include <limits>
#include <memory>
#include <stdexcept>

#include "io/slot/striped_extents.hpp"
#include "suite.hpp"

namespace ssdkv::test {
namespace {

// One unit on each of two devices.
StripeTable two_devices() {
  return {2, 1, 8192, 0, 1, {0, 4096, 8192}, {0, 1, 1, 0}, {0, 0, 4096, 4096}, {8192, 8192}};
}

void finds_slots() {
  const StripeTable table = two_devices();
  table.check();
  const std::vector<int64_t> begin{0, 1 << 20};
  const std::vector<StripedRange> ranges{{10, 4, &table, begin.data()}};
  const std::vector<int64_t> slots{10, 11, 13}, all{0};
  const SlotRequests found = find_slots(ranges, slots, all, 8192, 0, true, 0);
  check(found.device == std::vector<uint16_t>{0, 1, 1, 0, 1, 0}, "devices");
  check(found.offset[0] == 0 && found.offset[1] == 1 << 20, "offsets of the first slot");
  check(found.offset[4] == (1 << 20) + 3 * 4096, "offset in the second row");
  check(found.buffer.back() == 2 * 8192 + 4096, "where it goes");
  const SlotRequests cut = find_slots(ranges, slots, all, 8192, 0, true, 1024);
  check(cut.device == std::vector<uint16_t>{0, 0, 1, 1, 1, 0, 1, 1, 0}, "a piece more of each");
  check(cut.offset[1] == 1024 && cut.buffer[1] == 1024, "where it begins");
  check(cut.length[0] == 1024 && cut.length[1] == 3072 && cut.length[2] == 4096, "lengths");
}

void refuses_hostile_numbers() {
  const StripeTable table = two_devices();
  const std::vector<int64_t> begin{0, 0};
  const std::vector<StripedRange> ranges{{10, 4, &table, begin.data()}};
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const auto refused = [&](int64_t slot, int64_t offset, int64_t length) {
    const std::vector<int64_t> slots{slot}, offsets{offset};
    check_throws<std::invalid_argument>(
        [&] { find_slots(ranges, slots, offsets, length, 0, true, 0); }, "it is refused");
  };
  for (const int64_t slot : {int64_t{-1}, int64_t{9}, int64_t{14}, kMost, -kMost}) {
    refused(slot, 0, 1);
  }
  for (const int64_t offset : {int64_t{-1}, int64_t{8192}, kMost, -kMost}) refused(10, offset, 1);
  for (const int64_t length : {int64_t{0}, int64_t{-1}, int64_t{8193}, kMost, -kMost}) {
    refused(10, 0, length);
  }
  const std::vector<int64_t> slot{10}, from{0};
  check_throws<std::invalid_argument>([&] { find_slots(ranges, slot, from, 1, -1, true, 0); },
                                      "no such copy");
  StripeTable wrong = two_devices();
  wrong.device[1] = 2;
  check_throws<std::invalid_argument>([&] { wrong.check(); }, "no such device");
  wrong = two_devices();
  wrong.place.pop_back();
  check_throws<std::invalid_argument>([&] { wrong.check(); }, "a table that is too small");
  for (const auto& start :
       {std::vector<int64_t>{}, std::vector<int64_t>{0, 8192, 8192},
        std::vector<int64_t>{4096, 6144, 8192}, std::vector<int64_t>{0, 4096, 8191}}) {
    wrong = two_devices();
    wrong.start = start;
    check_throws<std::invalid_argument>([&] { wrong.check(); }, "units that do not cover the slot");
  }
}

void finds_units_of_unequal_sizes() {
  // A unit of 4096 and one of 12288 bytes, the second slot's the other way round on the devices.
  const StripeTable table{
      2, 1, 16384, 0, 1, {0, 4096, 16384}, {0, 1, 1, 0}, {0, 0, 12288, 4096}, {16384, 16384}};
  table.check();
  const std::vector<int64_t> begin{0, 0};
  const std::vector<StripedRange> ranges{{0, 4, &table, begin.data()}};
  const std::vector<int64_t> slots{0, 1, 2}, from{4095, 4096, 8192};
  const SlotRequests found = find_slots(ranges, slots, from, 4096, 0, true, 0);
  check(found.device == std::vector<uint16_t>{0, 1, 0, 1}, "devices");
  check(found.offset == std::vector<uint64_t>{4095, 0, 4096, 16384 + 4096}, "offsets");
  check(found.length == std::vector<uint32_t>{1, 4095, 4096, 4096}, "lengths");
}

Stripes stripes() {
  const std::vector<int64_t> first{10}, slots{4}, table_of{0};
  const auto table = std::make_shared<const StripeTable>(two_devices());
  return {{table}, first, slots, table_of, {0, 1 << 20}, 2};
}

void places_pieces() {
  const Stripes where = stripes();
  const std::vector<int64_t> slots{13, 10, 12}, all{0};
  // The second and third slot lie one after the other in memory, and on each device.
  const std::vector<uint64_t> places{65536, 0, 8192};
  const StripedExtents whole(where, slots, all, 8192, places, true, 1, {}, 0);
  check(whole.requests().buffer == std::vector<uint64_t>{65536, 69632, 0, 4096, 8192, 12288},
        "where each piece goes");
  check(whole.bytes_per_device() == std::vector<double>{12288, 12288}, "bytes of each device");
  std::vector<int32_t> results(6, 4096);
  check(whole.whole(results), "all have moved");
  results[3] = 4095;
  check(!whole.whole(results), "one was cut short");
  const std::vector<uint64_t> tails{100000, 200000, 300000};
  const StripedExtents apart_from_tails(where, slots, all, 8192, places, true, 1, tails, 6144);
  check(apart_from_tails.requests().buffer ==
            std::vector<uint64_t>{65536, 69632, 100000, 0, 4096, 200000, 8192, 12288, 300000},
        "tails go elsewhere");
  check(apart_from_tails.requests().length[2] == 2048, "they are what is left");
  const std::vector<uint64_t> two{0, 0};
  check_throws<std::invalid_argument>(
      [&] { StripedExtents(where, slots, all, 8192, places, true, 1, two, 6144); },
      "not one tail for each slot");
  const std::vector<int64_t> again{10, 10};
  const std::vector<uint64_t> apart{0, 4096};
  const StripedExtents single(where, again, all, 4096, apart, false, 8, {}, 0);
  check(single.requests().device.size() == 2, "the same piece twice is no neighbour of itself");
  check_throws<std::invalid_argument>([&] { (void)whole.whole({}); }, "results of another batch");
  for (const auto& few : {std::vector<uint64_t>{}, std::vector<uint64_t>{0, 0}}) {
    check_throws<std::invalid_argument>(
        [&] { StripedExtents(where, slots, all, 8192, few, true, 1, {}, 0); },
        "not one place for each slot");
  }
  check_throws<std::invalid_argument>(
      [&] { StripedExtents(where, slots, all, 8192, places, true, 0, {}, 0); },
      "requests of no pieces");
}

}  // namespace

Tests stripe_tests() {
  return {{"stripes find slots", finds_slots},
          {"stripes find units of unequal sizes", finds_units_of_unequal_sizes},
          {"stripes refuse hostile numbers", refuses_hostile_numbers},
          {"stripes place pieces", places_pieces}};
}

}  // namespace ssdkv::test
