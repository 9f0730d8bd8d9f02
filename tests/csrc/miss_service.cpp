// Requests of a device, for which a thread stands, and answers: their order and content, pages that
// cannot be read, drives that hang, and a service that ends.
#include "decode/miss_service.hpp"

#include <chrono>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>

#include "io/slot/memory.hpp"
#include "suite.hpp"

namespace ssdkv::test {
namespace {

using std::chrono::milliseconds;

constexpr int64_t kLayers = 3, kLayerPages = 4, kBlocks = 8, kRows = 2, kSlots = 16, kMost = 40;
constexpr int64_t kPages = kLayers * kLayerPages;
constexpr size_t kPage = 4096, kPlaces = 30;
constexpr int64_t kSlotBytes = static_cast<int64_t>(kPage) * (1 + kPages);
constexpr double kPatience = 60;

// A page that the fast lane finds wrong; somebody else may have it.
bool garbled(int64_t key) { return key % 11 == 0; }
bool elsewhere(int64_t key) { return key % 22 == 0; }

uint8_t byte_of(int64_t key) { return static_cast<uint8_t>(1 + key % 251); }

// Drive, page cache, and a mailbox.
struct Rig {
  std::vector<uint8_t> arena = std::vector<uint8_t>(kPlaces * kPage);
  PageLayout layout{reinterpret_cast<uint64_t>(arena.data()), kPage, kPage};
  PageCache cache{layout, kPlaces, kSlots, kPages, PagePolicy::kRecent};
  std::vector<uint8_t> drive = std::vector<uint8_t>(kSlots * kSlotBytes);
  std::vector<int32_t> row_of = std::vector<int32_t>(kSlots);
  std::vector<uint64_t> marks = std::vector<uint64_t>(kSlots * kPages);
  std::vector<int64_t> requests = std::vector<int64_t>(2 * (kMailHead + kMost));
  std::vector<int64_t> replies = requests;
  std::shared_ptr<const Stripes> stripes;
  std::mutex mutex;
  std::vector<std::shared_ptr<Batch>> hung;
  std::atomic<bool> hangs{false}, refuses{false};
  std::vector<int64_t> slots[kRows];

  Rig() {
    const auto table = std::make_shared<const StripeTable>(
        StripeTable{1, 1, kSlotBytes, 0, 1, {0, kSlotBytes}, {0}, {0}, {kSlotBytes}});
    const std::vector<int64_t> none{0}, all{kSlots};
    stripes = std::make_shared<const Stripes>(std::vector{table}, none, all, none,
                                              std::vector<int64_t>{0}, 1);
    for (int64_t key = 0; key < kSlots * kPages; ++key) {
      uint8_t* const at = drive.data() + key / kPages * kSlotBytes +
                          (1 + key % kPages) * static_cast<int64_t>(kPage);
      std::memset(at, byte_of(key), kPage);
      const auto address = reinterpret_cast<uint64_t>(at);
      checksum(&address, 1, kPage, 1, &marks[static_cast<size_t>(key)]);
      if (garbled(key)) std::memset(at, 0, kPage);
    }
    for (int32_t slot = 0; slot < kSlots; ++slot) row_of[static_cast<size_t>(slot)] = slot;
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t i = 0; i < kBlocks; ++i) slots[row].push_back((7 * i + row) % kSlots);
    }
  }

  // Reads at once, unless the drive hangs.
  std::shared_ptr<Batch> submit(const RequestArrays& arrays) {
    if (refuses) throw std::invalid_argument("the engine is closed");
    auto batch = std::make_shared<Batch>(Op::kRead, check_requests(arrays, 1, arena.size()));
    if (hangs) {
      const std::lock_guard<std::mutex> lock(mutex);
      hung.push_back(batch);
      return batch;
    }
    for (size_t i = 0; i < batch->size(); ++i) {
      const Request& one = batch->request(i);
      std::memcpy(arena.data() + one.buffer, drive.data() + one.offset, one.length);
      batch->complete(i, static_cast<int32_t>(one.length));
    }
    return batch;
  }

  std::unique_ptr<MissService> serve(double deadline_s, bool fast = true) {
    const Mailbox mail{requests.data(), replies.data(), kMost, kLayers, kBlocks, kLayerPages};
    const StoredPages stored{
        layout, layout.address, kPages, kPage, {row_of.data(), nullptr, marks.data(), 0, 1}};
    MissService::Submit engine;
    if (fast) engine = [this](const RequestArrays& arrays) { return submit(arrays); };
    return std::make_unique<MissService>(cache, mail, stored, engine, deadline_s);
  }

  int64_t begin(MissService& service) { return service.arm({slots[0], slots[1]}, stripes); }

  void end(MissService& service) { cache.release(service.disarm().places); }

  // Key of a page of the store.
  int64_t stored(int64_t key, int64_t layer) const {
    const int64_t block = key / kLayerPages;
    return slots[block / kBlocks][static_cast<size_t>(block % kBlocks)] * kPages +
           layer * kLayerPages + key % kLayerPages;
  }
};

// The device's part. Addresses of the pages; nothing where no answer came in time.
std::vector<int64_t> ask(Rig& rig, int64_t base, int64_t layer, const std::vector<int64_t>& keys,
                         milliseconds patience) {
  const auto at = base / kLayers % 2 * (static_cast<int64_t>(kMailHead) + kMost);
  int64_t* const request = rig.requests.data() + at;
  int64_t* const reply = rig.replies.data() + at;
  std::copy(keys.begin(), keys.end(), request + kMailHead);
  request[1] = static_cast<int64_t>(keys.size());
  const int64_t ticket = base + layer + 1;
  std::atomic_ref<int64_t>(*request).store(ticket, std::memory_order_release);
  const auto until = Clock::now() + patience;
  while (std::atomic_ref<int64_t>(*reply).load(std::memory_order_acquire) != ticket) {
    if (Clock::now() > until) return {};
    std::this_thread::yield();
  }
  const std::vector<int64_t> found(reply + kMailHead, reply + kMailHead + keys.size());
  int64_t lost = 0;
  for (size_t i = 0; i < keys.size(); ++i) lost += keys[i] >= 0 && found[i] == 0;
  check(reply[1] == lost, "as many are lost as were asked for and have none");
  return found;
}

constexpr milliseconds kSure{60'000}, kShort{100};

void check_pages(const Rig& rig, int64_t layer, const std::vector<int64_t>& keys,
                 const std::vector<int64_t>& found, bool slow) {
  check(found.size() == keys.size(), "it is answered");
  for (size_t i = 0; i < keys.size(); ++i) {
    const int64_t key = rig.stored(keys[i], layer);
    check((found[i] != 0) == (!garbled(key) || (slow && elsewhere(key))), "what can be had is");
    if (found[i] == 0) continue;
    const auto* const bytes = reinterpret_cast<const uint8_t*>(found[i]);
    for (size_t b = 0; b < kPage; b += 64) check(bytes[b] == byte_of(key), "it is that page");
  }
}

// Reads what the fast lane could not until it is told to end.
void slow_lane(Rig& rig, MissService& service, const std::atomic<bool>& ends) {
  while (!ends) {
    const auto work = service.next(deadline_after(0.01));
    if (!work) continue;
    std::vector<uint8_t> states;
    for (size_t i = 0; i < work->keys.size(); ++i) {
      const int64_t key = work->keys[i];
      const bool there = !garbled(key) || elsewhere(key);
      uint8_t* const place = rig.arena.data() + static_cast<size_t>(work->places[i]) * kPage;
      if (there) std::memset(place, byte_of(key), kPage);
      states.push_back(there ? 1 : 0);
    }
    service.answer(states, std::vector<uint16_t>(states.size(), 0));
  }
}

void answers_a_stream(bool fast) {
  Rig rig;
  const auto service = rig.serve(kPatience, fast);
  std::atomic<bool> ends{false};
  std::thread slow([&] { slow_lane(rig, *service, ends); });
  Random random(3);
  for (int step = 0; step < 200; ++step) {
    const int64_t base = rig.begin(*service);
    std::thread stream([&] {
      for (int64_t layer = 0; layer < kLayers; ++layer) {
        std::vector<int64_t> keys(random(12));
        for (int64_t& key : keys) {
          key = static_cast<int64_t>(random(kRows * kBlocks * kLayerPages));
        }
        if (keys.empty()) continue;  // nothing is missing: the device does not ask
        check_pages(rig, layer, keys, ask(rig, base, layer, keys, kSure), true);
      }
    });
    stream.join();
    rig.end(*service);
    check(rig.cache.taken() == 0, "all places come back");
  }
  check(rig.cache.evictions() > 0, "places were given away");
  ends = true;
  slow.join();
}

void answers_hostile_keys() {
  Rig rig;
  const auto service = rig.serve(kPatience);
  const std::vector<int64_t> keys{-1, 1, kRows * kBlocks * kLayerPages,
                                  std::numeric_limits<int64_t>::max(),
                                  std::numeric_limits<int64_t>::min()};
  const int64_t base = rig.begin(*service);
  const auto found = ask(rig, base, 0, keys, kSure);
  check(found[1] != 0 && std::count(found.begin(), found.end(), 0) == 4, "no such pages");
  const auto at = base / kLayers % 2 * (static_cast<int64_t>(kMailHead) + kMost);
  int64_t* const request = rig.requests.data() + at;
  request[1] = std::numeric_limits<int64_t>::max();
  std::atomic_ref<int64_t>(*request).store(base + 2, std::memory_order_release);
  while (service->answered() != 2) std::this_thread::yield();
  rig.end(*service);
  check(rig.replies[static_cast<size_t>(at) + 1] <= kMost, "no more than there is room for");
}

void slots_that_do_not_exist_lose_pages() {
  Rig rig;
  const auto service = rig.serve(kPatience);
  const int64_t slot = std::exchange(rig.slots[0][0], kSlots);
  const std::vector<int64_t> keys{1, kLayerPages + 1};
  check(ask(rig, rig.begin(*service), 0, keys, kSure) == std::vector<int64_t>{0, 0}, "nothing");
  const Served served = service->disarm();
  check(served.lost == keys.size(), "it is told");
  check(rig.cache.taken() == 0, "nothing is taken");
  rig.slots[0][0] = slot;
  check_pages(rig, 0, keys, ask(rig, rig.begin(*service), 0, keys, kSure), false);
  rig.end(*service);
}

void more_pages_than_places_are_lost() {
  Rig rig;
  const auto service = rig.serve(kPatience);
  std::vector<int64_t> keys;
  for (int64_t key = 1; key < kRows * kBlocks * kLayerPages && keys.size() < kMost; ++key) {
    if (!garbled(rig.stored(key, 0))) keys.push_back(key);
  }
  const auto found = ask(rig, rig.begin(*service), 0, keys, kSure);
  const auto lost = std::count(found.begin(), found.end(), 0);
  check(lost > 0 && lost < kMost, "as many as there are places are read");
  rig.end(*service);
  check(rig.cache.taken() == 0, "all places come back");
}

// A drive that hangs loses pages, not time without end, and keeps their places until it answers.
void a_hung_drive_loses_pages() {
  Rig rig;
  const auto service = rig.serve(0.05);
  const std::vector<int64_t> keys{1, 2}, other{5, 6};
  rig.hangs = true;
  const int64_t base = rig.begin(*service);
  check(ask(rig, base, 0, keys, kSure) == std::vector<int64_t>{0, 0}, "they are lost");
  rig.hangs = false;
  std::thread slow(
      [&] { check(!service->next(deadline_after(0.2)), "nor is anything asked of others"); });
  check(ask(rig, base, 1, other, kSure) == std::vector<int64_t>{0, 0}, "nothing more is read");
  slow.join();
  Served served = service->disarm();
  check(served.lost == 4 && served.overdue.size() == 1, "it is told");
  rig.cache.release(served.places);
  check(rig.cache.taken() == keys.size(), "the drive may write to their places");
  const int64_t next = rig.begin(*service);
  check_pages(rig, 0, other, ask(rig, next, 0, other, kSure), false);
  check(rig.hung.size() == 1, "one request was made of neighbours");
  rig.hung[0]->complete(0, -5);
  check_pages(rig, 1, keys, ask(rig, next, 1, keys, kSure), false);
  rig.end(*service);
  check(rig.cache.taken() == 0, "all places come back");
}

void a_late_slow_lane_gives_places_back() {
  Rig rig;
  const auto service = rig.serve(0.02);
  rig.refuses = true;
  const int64_t base = rig.begin(*service);
  std::atomic<bool> lost{false};
  std::thread slow([&] {
    const auto work = service->next(deadline_after(kPatience));
    while (!lost) std::this_thread::yield();
    check(work && work->keys.size() == 3, "it has the work of the engine");
    service->answer(std::vector<uint8_t>{1, 0, 2}, std::vector<uint16_t>(3, 0));
  });
  const std::vector<int64_t> keys{1, 2, 3};
  check(ask(rig, base, 0, keys, kSure) == std::vector<int64_t>{0, 0, 0}, "they are lost");
  lost = true;
  slow.join();
  rig.end(*service);
  rig.refuses = false;
  const int64_t next = rig.begin(*service);
  check(rig.cache.taken() == 1, "one is with who reads slowly");
  check_pages(rig, 0, keys, ask(rig, next, 0, keys, kSure), false);
  rig.end(*service);
}

void a_late_answer_is_not_taken_for_another() {
  Rig rig;
  const auto service = rig.serve(0.1, false);
  int64_t base = rig.begin(*service);
  std::thread first([&] { check(ask(rig, base, 0, {1}, kSure)[0] == 0, "it is lost"); });
  check(service->next(deadline_after(kPatience)).has_value(), "it is asked for");
  first.join();
  rig.end(*service);
  base = rig.begin(*service);
  std::thread second([&] {
    const std::vector<int64_t> keys{5};
    const auto found = ask(rig, base, 0, keys, kSure);
    if (found[0] != 0) check_pages(rig, 0, keys, found, true);
  });
  std::this_thread::sleep_for(milliseconds(20));
  service->answer(std::vector<uint8_t>{1}, std::vector<uint16_t>{0});
  second.join();
  rig.end(*service);
}

void pages_without_digests_are_lost() {
  Rig rig;
  const auto service = rig.serve(0.02);
  rig.row_of[static_cast<size_t>(rig.slots[0][1])] = -1;
  const auto found = ask(rig, rig.begin(*service), 0, {1, kLayerPages + 1}, kSure);
  check(found[0] != 0 && found[1] == 0, "nobody knows whether it is right");
  rig.end(*service);
}

void nobody_is_answered_behind_the_end() {
  Rig rig;
  const auto service = rig.serve(kPatience);
  const int64_t base = rig.begin(*service);
  const std::vector<int64_t> keys{1};
  check(!ask(rig, base, 0, keys, kSure).empty(), "it is there");
  service->close();
  check(ask(rig, base, 1, keys, kShort).empty(), "it is not there any more");
  rig.end(*service);
  check(rig.begin(*service) == 0, "and says so");
}

void an_end_waits_for_no_slow_lane() {
  Rig rig;
  const auto service = rig.serve(kPatience, false);
  const int64_t base = rig.begin(*service);
  std::thread stream(
      [&] { check(ask(rig, base, 0, {1}, kSure) == std::vector<int64_t>{0}, "it is lost"); });
  check(service->next(deadline_after(kPatience)).has_value(), "it is asked for");
  const auto begun = Clock::now();
  service->close();
  check(Clock::now() - begun < std::chrono::seconds(30), "nobody waits for who does not answer");
  stream.join();
  check(!service->next(deadline_after(kPatience)), "there is nothing more to read");
  check(Clock::now() - begun < std::chrono::seconds(30), "and nobody waits for it");
  rig.end(*service);
}

// A step that the device has not ended in time asks in the mail of another one.
void tickets_of_other_steps_are_passed_over() {
  Rig rig;
  const auto service = rig.serve(kPatience);
  const std::vector<int64_t> keys{1};
  const int64_t first = rig.begin(*service);
  rig.end(*service);
  const int64_t second = rig.begin(*service);
  check(ask(rig, first, 2, keys, kShort).empty(), "it is over");
  check(ask(rig, second - 2 * kLayers, 2, keys, kShort).empty(), "long ago");
  check(ask(rig, second, kLayers, keys, kShort).empty(), "nor is there such a layer");
  check(!ask(rig, second, 2, keys, kSure).empty(), "this one is not");
  check(ask(rig, second, 1, keys, kShort).empty(), "nor do layers come twice");
  rig.end(*service);
}

}  // namespace

Tests miss_service_tests() {
  return {{"a device's requests are answered", [] { answers_a_stream(true); }},
          {"a device's requests are answered without an engine", [] { answers_a_stream(false); }},
          {"a device's requests for no page", answers_hostile_keys},
          {"a device's requests for slots that do not exist", slots_that_do_not_exist_lose_pages},
          {"a device's requests for too many pages", more_pages_than_places_are_lost},
          {"a device's requests while a drive hangs", a_hung_drive_loses_pages},
          {"a device's requests while copies are read", a_late_slow_lane_gives_places_back},
          {"a device's requests while nobody reads copies", an_end_waits_for_no_slow_lane},
          {"a device's requests behind a late answer", a_late_answer_is_not_taken_for_another},
          {"a device's requests for unknown pages", pages_without_digests_are_lost},
          {"a device's requests of other steps", tickets_of_other_steps_are_passed_over},
          {"a device's requests behind the end", nobody_is_answered_behind_the_end}};
}

}  // namespace ssdkv::test
