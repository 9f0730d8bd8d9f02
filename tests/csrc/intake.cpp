// Slots that arrive are checked and copied, while other threads end their requests.
#include "io/intake.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "io/memory.hpp"
#include "suite.hpp"

namespace ssdkv::test {
namespace {

constexpr size_t kSlots = 40, kParts = 3, kPages = 5;
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

  Intake intake(std::vector<int64_t> slot_of, uint32_t length) {
    std::vector<Intake::Slot> wanted;
    for (size_t slot = 0; slot < kSlots; ++slot) {
      wanted.push_back({reinterpret_cast<uint64_t>(slots.data() + slot * kSlotBytes),
                        fixed.data() + slot * 128, slot + 1});
    }
    std::vector<Stretch> stretches;
    for (size_t page = 0; page < kPages; ++page) {
      const auto base = reinterpret_cast<uint64_t>(blocks.data() + page * 3000);
      stretches.push_back({4096 + page * 4096, 3000, base, kPages * 3000});
    }
    const std::vector<uint8_t> missing(kSlots);
    std::vector<uint32_t> lengths(slot_of.size(), length);
    return Intake(kShape, std::move(wanted), std::move(slot_of), std::move(lengths), missing,
                  std::move(stretches), {});
  }

  bool copied(size_t slot) const {
    for (size_t page = 0; page < kPages; ++page) {
      if (std::memcmp(blocks.data() + ((slot + 1) * kPages + page) * 3000,
                      slots.data() + slot * kSlotBytes + 4096 + page * 4096, 3000) != 0) {
        return false;
      }
    }
    return true;
  }
};

void follows_what_threads_end() {
  Desk desk;
  desk.slots[3 * kSlotBytes + 4096 + 2 * 4096 + 2999] ^= std::byte{1};  // a page
  desk.slots[4 * kSlotBytes + 200] ^= std::byte{1};                     // behind what is used
  desk.slots[5 * kSlotBytes + 10] ^= std::byte{1};                      // what it begins with
  std::vector<int64_t> slot_of;
  std::vector<Request> requests;
  for (size_t i = 0; i < kSlots * kParts; ++i) {
    slot_of.push_back(static_cast<int64_t>(i % kSlots));
    requests.push_back({0, 0, 4096, 0});
  }
  Intake intake = desk.intake(std::move(slot_of), 4096);
  Batch batch(Op::kRead, std::move(requests));
  check(!intake.follow(batch, deadline_after(0.0)), "nothing has ended");
  std::atomic<size_t> next{0};
  in_threads(4, [&](unsigned thread) {
    if (thread == 0) {
      while (!intake.follow(batch, deadline_after(0.001))) {
      }
      return;
    }
    for (size_t i = next++; i < kSlots * kParts; i = next++) {
      batch.complete(i, i == kSlots + 6 ? -5 : i == 7 ? 100 : 4096);
    }
  });
  for (size_t slot = 0; slot < kSlots; ++slot) {
    Intake::State wanted = Intake::State::kRight;
    if (slot == 3) wanted = Intake::State::kWrongPage;
    if (slot == 4 || slot == 5) wanted = Intake::State::kWrongHeader;
    if (slot == 6 || slot == 7) wanted = Intake::State::kAwaited;  // a part failed, one was short
    check(intake.states()[slot] == wanted, "the state of a slot");
    check(desk.copied(slot) == (wanted == Intake::State::kRight), "right slots are copied");
  }
  const auto wrong = intake.wrong_pages();
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
  check_throws<std::invalid_argument>([&] { desk.intake({-1}, 4096); }, "a slot below 0");
  check_throws<std::invalid_argument>([&] { desk.intake({int64_t{kSlots}}, 4096); }, "no slot");
  Batch other(Op::kRead, std::vector<Request>(2));
  Intake intake = desk.intake({0}, 4096);
  check_throws<std::invalid_argument>([&] { intake.follow(other, deadline_after(0.0)); },
                                      "another batch");
}

}  // namespace

Tests intake_tests() {
  return {{"intake follows what threads end", follows_what_threads_end},
          {"intake waits for progress", waits_for_progress},
          {"intake copies to any address", copies_to_any_address},
          {"intake refuses what does not fit", refuses_what_does_not_fit}};
}

}  // namespace ssdkv::test
