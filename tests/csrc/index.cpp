// The index of slots: journals in any pieces and with any damage, and a walk beside the owner.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "index/replay.hpp"
#include "index/slot_table.hpp"
#include "suite.hpp"

namespace ssdkv::test {
namespace {

Key key_of(uint64_t number) {
  Key key{};
  std::memcpy(key.data(), &number, sizeof(number));
  return key;
}

// Records of which some are damaged, and of those some sealed again.
std::vector<std::byte> journal(Random& random) {
  std::vector<std::byte> bytes;
  const size_t count = random(40);
  for (size_t i = 0; i < count; ++i) {
    const Kind kind = random(3) == 0 ? Kind::kDel : Kind::kPut;
    Record record = sealed(kind, random(12), random(1000), random(60), key_of(random(8)));
    const auto begin = bytes.size();
    bytes.resize(begin + sizeof(record));
    std::memcpy(bytes.data() + begin, &record, sizeof(record));
    if (random(4) == 0) {
      bytes[begin + random(sizeof(record))] ^= static_cast<std::byte>(1 << random(8));
      std::memcpy(&record, bytes.data() + begin, sizeof(record));
      if (random(2) == 0) {
        const Record again = sealed(static_cast<Kind>(record.kind), record.slot, record.epoch,
                                    record.sequence, record.key);
        std::memcpy(bytes.data() + begin, &again, sizeof(again));
      }
    }
  }
  if (!bytes.empty()) bytes.resize(bytes.size() - random(std::min<size_t>(bytes.size(), 80)));
  return bytes;
}

void feed(Replay& replay, const std::vector<std::byte>& bytes, Random& random, size_t most) {
  for (size_t at = 0; at < bytes.size();) {
    const size_t some = std::min(bytes.size() - at, 1 + random(most));
    // A copy that ends with its last byte, so that reading further is noticed.
    const std::vector<std::byte> piece(bytes.begin() + static_cast<ptrdiff_t>(at),
                                       bytes.begin() + static_cast<ptrdiff_t>(at + some));
    replay.feed(piece.data(), piece.size());
    at += some;
  }
}

void journals() {
  constexpr uint64_t kSlots = 10;
  Random random(1);
  for (int round = 0; round < 4000; ++round) {
    const auto bytes = journal(random);
    Replay whole(kSlots), parts(kSlots), again(kSlots);
    feed(whole, bytes, random, bytes.size() + 1);
    feed(parts, bytes, random, 100);
    const auto live = whole.live();
    check(live == parts.live() && whole.corrupt() == parts.corrupt(), "pieces do not matter");
    uint64_t sequence = 1;
    for (const uint32_t slot : live) {
      check(slot < kSlots, "live slots exist");
      const auto& newest = whole.newest(slot);
      const Record record = sealed(Kind::kPut, slot, newest.epoch, sequence++, newest.key);
      again.feed(reinterpret_cast<const std::byte*>(&record), sizeof(record));
    }
    check(again.live() == live && again.corrupt() == 0, "what is live says itself");
    SlotTable table(kSlots);
    check(table.recover(whole) == live.size(), "a table takes it over");
    check(table.order() == std::vector<int64_t>(live.begin(), live.end()), "in that order");
  }
}

// The owner changes everything while another thread walks over what is journalled.
void walk_beside() {
  constexpr size_t kSlots = 300;
  SlotTable table(kSlots);
  std::atomic<bool> over{false};
  std::atomic<uint64_t> walked{0};
  in_threads(2, [&](unsigned thread) {
    if (thread == 1) {
      while (!over.load()) {
        std::vector<Record> records;
        table.begin_walk();
        while (table.walk(records.size() + 1, 64, records)) std::this_thread::yield();
        std::vector<bool> seen(kSlots);
        for (const Record& record : records) {
          check(is_valid(record) && record.slot < kSlots, "a record of a slot");
          check(!seen[record.slot], "every slot once");
          seen[record.slot] = true;
        }
        walked.fetch_add(records.size());
      }
      return;
    }
    Random random(2);
    uint64_t next_key = 0;
    for (int round = 0; round < 8000 || walked.load() == 0; ++round) {
      Gone gone;
      const size_t n = std::min<size_t>(random(6), table.obtainable());
      const auto slots = table.allocate(n, gone);
      const auto now = static_cast<uint32_t>(round + 1);
      for (const int64_t slot : slots) (void)table.publish(slot, key_of(random(2) + next_key++));
      const Stored stored = table.durable(slots.data(), slots.size());
      for (size_t i = 0; i < stored.slots.size(); ++i) {
        check(table.find(stored.keys[i]) == static_cast<uint32_t>(stored.slots[i]), "it is found");
        check(table.epoch(stored.slots[i]) == stored.epochs[i], "in its epoch");
      }
      if (random(4) == 0) (void)table.drop(slots.data(), slots.size(), gone);
      if (random(4) == 0)
        table.retain(slots.data(), slots.size(), now + static_cast<uint32_t>(random(90)),
                     kSlots / 4);
      table.expire(now);
      table.unpin(slots.data(), slots.size());
      check(table.retained() <= kSlots / 4, "the share is kept");
      if (random(8) == 0) {
        const auto order = table.order();
        table.touch(order.data(), order.size() / 2);
      }
      if (random(64) == 0) {
        std::vector<int64_t> all(kSlots);
        std::iota(all.begin(), all.end(), 0);
        (void)table.quarantine(all.data(), kSlots / 4, gone);
        table.restore(all.data(), kSlots / 4);
        const auto mask = std::make_unique<bool[]>(kSlots);
        for (size_t i = 0; i < kSlots; ++i) mask[i] = random(2) == 0;
        table.defer(mask.get());
      }
      check(table.free() + table.deferred() + table.ready() == kSlots, "every slot has one place");
    }
    over.store(true);
  });
  const int64_t outside[] = {0, int64_t{kSlots}};
  check_throws<std::out_of_range>([&] { table.touch(outside, 2); }, "slots exist");
}

}  // namespace

Tests index_tests() {
  return {{"index: journals", journals}, {"index: a walk beside its owner", walk_beside}};
}

}  // namespace ssdkv::test
