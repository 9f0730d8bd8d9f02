// Slots that arrive are checked and copied, while other threads end their requests.
#include "io/slot/arrival_verifier.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "io/slot/memory.hpp"
#include "suite.hpp"

namespace ssdkv::test {
namespace {

constexpr size_t kSlots = 40, kParts = 3, kPages = 5;
constexpr uint32_t kPartBytes = 8192;  // the header and a page, then two pages each
constexpr SlotShape kShape{{4096, 128, 128 + 8 * kPages}, kPages, 4096, 3000};
constexpr size_t kSlotBytes = 4096 + kPages * 4096;

void put(std::vector<std::byte>& bytes, size_t at, uint64_t value) {
  for (size_t i = 0; i < sizeof value; ++i) {
    bytes[at + i] = static_cast<std::byte>(value >> (8 * i));
  }
}

// Sealed slots one after the other, and the blocks that they go to.
struct Desk {
  std::vector<std::byte> slots, blocks, fixed;

  Desk() : slots(kSlots * kSlotBytes), blocks((kSlots + 1) * kPages * 3000), fixed(kSlots * 128) {
    Random random(5);
    for (std::byte& one : fixed) one = static_cast<std::byte>(random(256));
    for (size_t slot = 0; slot < kSlots; ++slot) {
      const size_t begin = slot * kSlotBytes;
      std::copy_n(fixed.begin() + static_cast<ptrdiff_t>(slot * 128), 128,
                  slots.begin() + static_cast<ptrdiff_t>(begin));
      for (size_t page = 0; page < kPages; ++page) {
        const size_t at = begin + 4096 + page * 4096;
        for (size_t i = 0; i < 4096; ++i) slots[at + i] = static_cast<std::byte>(random(256));
        put(slots, begin + 128 + 8 * page, checksum(slots.data() + at, 3000));
      }
      put(slots, begin + 4088, checksum(slots.data() + begin, 4088));
    }
  }

  ArrivalVerifier verifier(std::vector<ArrivalVerifier::Part> parts) {
    std::vector<ArrivalVerifier::Slot> wanted;
    for (size_t slot = 0; slot < kSlots; ++slot) {
      wanted.push_back({reinterpret_cast<uint64_t>(slots.data() + slot * kSlotBytes),
                        fixed.data() + slot * 128, slot + 1});
    }
    std::vector<Stretch> stretches;
    for (size_t page = 0; page < kPages; ++page) {
      const auto base = reinterpret_cast<uint64_t>(blocks.data() + page * 3000);
      stretches.push_back({4096 + page * 4096, 3000, base, kPages * 3000});
    }
    return ArrivalVerifier(kShape, std::move(wanted), std::move(parts), std::move(stretches), {});
  }

  bool copied(size_t slot, size_t page) const {
    return std::memcmp(blocks.data() + ((slot + 1) * kPages + page) * 3000,
                       slots.data() + slot * kSlotBytes + 4096 + page * 4096, 3000) == 0;
  }

  bool copied(size_t slot) const {
    for (size_t page = 0; page < kPages; ++page) {
      if (!copied(slot, page)) return false;
    }
    return true;
  }
};

std::vector<ArrivalVerifier::Part> all_parts() {
  std::vector<ArrivalVerifier::Part> parts;
  for (size_t i = 0; i < kSlots * kParts; ++i) {
    parts.push_back({static_cast<int64_t>(i / kParts), i % kParts * kPartBytes, kPartBytes});
  }
  return parts;
}

// A page goes on as soon as it and its slot's header are here, whatever of the slot is not.
void takes_pages_one_by_one() {
  Desk desk;
  const std::vector<ArrivalVerifier::Part> parts = {{1, 0, 4096},     {1, 4096, 6000},
                                                    {1, 10096, 2192}, {1, 12288, 4096},
                                                    {2, 0, 4096},     {2, 4096, 20480}};
  ArrivalVerifier verifier = desk.verifier(parts);
  std::vector<int32_t> results(parts.size(), Batch::kPending);
  const auto end = [&](size_t request) {
    results[request] = static_cast<int32_t>(parts[request].length);
    verifier.take(results);
  };
  end(1);
  end(3);
  check(!desk.copied(1, 0) && !desk.copied(1, 2), "nothing before the header");
  end(0);
  check(desk.copied(1, 0) && desk.copied(1, 2), "what came before its header");
  check(!desk.copied(1, 1), "not what is here in part");
  end(2);
  check(desk.copied(1, 1), "as soon as it is whole");
  check(verifier.states()[1] == ArrivalVerifier::State::kAwaited, "two pages were never asked for");
  end(5);
  check(!desk.copied(2, 0), "no header");
  end(4);
  check(desk.copied(2), "all at once");
  check(verifier.states()[2] == ArrivalVerifier::State::kRight, "all of it is right");
}

void follows_what_threads_end() {
  Desk desk;
  desk.slots[3 * kSlotBytes + 4096 + 2 * 4096 + 2999] ^= std::byte{1};  // a page
  desk.slots[4 * kSlotBytes + 200] ^= std::byte{1};                     // behind what is used
  desk.slots[5 * kSlotBytes + 10] ^= std::byte{1};                      // what it begins with
  const std::vector<Request> requests(kSlots * kParts, Request{0, 0, kPartBytes, 0});
  ArrivalVerifier verifier = desk.verifier(all_parts());
  Batch batch(Op::kRead, std::move(requests));
  check(!verifier.follow(batch, deadline_after(0.0)), "nothing has ended");
  std::atomic<size_t> next{0};
  in_threads(4, [&](unsigned thread) {
    if (thread == 0) {
      while (!verifier.follow(batch, deadline_after(0.001))) {
      }
      return;
    }
    for (size_t i = next++; i < kSlots * kParts; i = next++) {
      const size_t slot = i % kSlots;  // of each slot the last part first
      const size_t part = kParts - 1 - i / kSlots;
      const int32_t ended = slot == 6 && part == 1   ? -5
                            : slot == 7 && part == 2 ? 100
                                                     : int32_t{kPartBytes};
      batch.complete(slot * kParts + part, ended);
    }
  });
  for (size_t slot = 0; slot < kSlots; ++slot) {
    ArrivalVerifier::State wanted = ArrivalVerifier::State::kRight;
    if (slot == 3) wanted = ArrivalVerifier::State::kWrongPage;
    if (slot == 4 || slot == 5) wanted = ArrivalVerifier::State::kWrongHeader;
    if (slot == 6 || slot == 7)
      wanted = ArrivalVerifier::State::kAwaited;  // a part failed, one was short
    check(verifier.states()[slot] == wanted, "the state of a slot");
    check(desk.copied(slot) == (wanted == ArrivalVerifier::State::kRight),
          "right slots are copied");
  }
  const auto wrong = verifier.wrong_pages();
  check(wrong.size() == 1 && wrong[0].slot == 3 && wrong[0].page == 2, "the wrong page");
}

void waits_for_progress() {
  std::vector<Request> requests(64, Request{0, 0, 4096, 0});
  for (unsigned round = 0; round < 50; ++round) {
    Batch batch(Op::kRead, requests);
    check(batch.wait_for_less(64, deadline_after(0.0)) == 64, "it gives up");
    in_threads(3, [&](unsigned thread) {
      if (thread == 0) {
        size_t left = 64;
        while (left > 0) left = batch.wait_for_less(left, deadline_after(60.0));
      } else if (thread == 1) {
        check(batch.wait_until(deadline_after(60.0)), "who waits for all gets all");
      } else {
        for (size_t i = 0; i < 64; ++i) batch.complete(i, 4096);
      }
    });
  }
}

void copies_to_any_address() {
  for (const size_t nbytes : {size_t{0}, size_t{1}, size_t{1023}, size_t{1024}, size_t{5000}}) {
    for (size_t shift = 0; shift < 70; shift += 23) {
      const std::vector<uint8_t> from(nbytes + shift, 7);
      std::vector<uint8_t> to(nbytes + 2 * shift, 1);
      copy_past_cache(reinterpret_cast<uint64_t>(to.data() + shift),
                      reinterpret_cast<uint64_t>(from.data() + shift), nbytes);
      fence_copies();
      const auto sevens = static_cast<size_t>(std::count(to.begin(), to.end(), 7));
      check(sevens == nbytes, "so many bytes are copied");
      check(nbytes == 0 || (to[shift] == 7 && to[shift + nbytes - 1] == 7), "where they belong");
    }
  }
}

void refuses_what_does_not_fit() {
  Desk desk;
  const auto refused = [&desk](std::vector<ArrivalVerifier::Part> parts, const char* what) {
    check_throws<std::invalid_argument>([&] { desk.verifier(parts); }, what);
  };
  refused({{-1, 0, 4096}}, "a slot below 0");
  refused({{int64_t{kSlots}, 0, 4096}}, "no slot");
  refused({{0, 0, 0}}, "no bytes");
  refused({{0, 4096, kSlotBytes}}, "more than the slot");
  refused({{0, kSlotBytes + 1, 1}}, "behind the slot");
  refused({{0, 0, 4096}, {0, 4095, 4096}}, "some bytes twice");
  refused({{1, 0, 4096}, {0, 0, 4096}}, "slots in no order");
  SlotShape nothing = kShape;
  nothing.page_bytes = nothing.payload_bytes = 0;
  check_throws<std::invalid_argument>([&] { ArrivalVerifier(nothing, {}, {}, {}, {}); },
                                      "empty pages");
  Batch other(Op::kRead, std::vector<Request>(2));
  ArrivalVerifier verifier = desk.verifier({{0, 0, 4096}});
  check_throws<std::invalid_argument>([&] { verifier.follow(other, deadline_after(0.0)); },
                                      "another batch");
}

}  // namespace

Tests arrival_verifier_tests() {
  return {{"verifier follows what threads end", follows_what_threads_end},
          {"verifier takes pages one by one", takes_pages_one_by_one},
          {"verifier waits for progress", waits_for_progress},
          {"verifier copies to any address", copies_to_any_address},
          {"verifier refuses what does not fit", refuses_what_does_not_fit}};
}

}  // namespace ssdkv::test
