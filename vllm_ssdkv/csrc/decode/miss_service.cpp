#include "decode/miss_service.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "base/worker_thread.hpp"
#include "io/crypto/cipher.hpp"
#include "io/slot/memory.hpp"
#include "io/slot/striped_extents.hpp"

namespace ssdkv {
namespace {

constexpr size_t kMostCoalesced = 64;  // as in vllm_ssdkv/store/io/coalescing.py
constexpr std::chrono::microseconds kAwake{200}, kNap{20};

// The device asks layer by layer: soon after a request there may be the next.
void rest(Clock::time_point active) {
  if (Clock::now() - active < kAwake) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(kNap);
  }
}

}  // namespace

// Distinct pages on their way into places.
struct MissService::Read {
  std::vector<int64_t> keys;
  std::vector<int32_t> places;
  std::vector<Slow> states;
  std::vector<uint16_t> devices;
  Clock::time_point until, last;  // of the fast lane, and of the slow one
};

MissService::MissService(PageCache& cache, const Mailbox& mail, const StoredPages& stored,
                         Submit submit, double deadline_s)
    : cache_(cache),
      mail_(mail),
      stored_(stored),
      submit_(std::move(submit)),
      deadline_s_(deadline_s),
      owner_(getpid()) {
  const BlockSignals quiet;
  thread_ = std::thread([this] { run(); });
}

MissService::~MissService() { close(); }

void MissService::close() {
  if (getpid() != owner_) {  // a forked child: no thread to wait for
    if (thread_.joinable()) thread_.detach();
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(lane_);
    ends_ = true;
  }
  done_.notify_all();
  work_.notify_all();
  wanted_ = true;
  {
    const std::lock_guard<std::mutex> lock(turn_);
    closing_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

int64_t MissService::arm(std::vector<std::span<const int64_t>> rows,
                         std::shared_ptr<const Stripes> stripes) {
  wanted_ = true;
  const std::lock_guard<std::mutex> lock(turn_);
  wanted_ = false;
  if (closing_) return 0;
  settle();
  rows_ = std::move(rows);
  stripes_ = std::move(stripes);
  served_ = {};
  late_ = false;
  latest_ = base_ = ++step_ * mail_.layers;
  changed_.notify_all();
  return base_;
}

Served MissService::disarm() {
  wanted_ = true;
  const std::lock_guard<std::mutex> lock(turn_);
  wanted_ = false;
  base_ = 0;
  rows_.clear();
  served_.places = std::exchange(taken_, {});
  return std::exchange(served_, {});
}

std::optional<SlowRead> MissService::next(Clock::time_point deadline) {
  std::unique_lock<std::mutex> lock(lane_);
  if (!work_.wait_until(lock, deadline, [this] { return ends_ || queued_; }) || !queued_) {
    return std::nullopt;
  }
  under_way_ = std::exchange(queued_, std::nullopt);
  return under_way_;
}

void MissService::answer(std::span<const uint8_t> states, std::span<const uint16_t> devices) {
  const std::lock_guard<std::mutex> lock(lane_);
  if (!under_way_) return;
  const SlowRead work = *std::exchange(under_way_, std::nullopt);
  if (awaited_) {
    states_.assign(states.begin(), states.end());
    devices_.assign(devices.begin(), devices.end());
  } else {
    for (size_t i = 0; i < work.places.size(); ++i) {
      if (Slow{states[i]} != Slow::kHeld) returned_.push_back(work.places[i]);
    }
  }
  done_.notify_all();
}

void MissService::run() noexcept {
  use_all_cpus();
  auto active = Clock::now();
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(turn_);
      changed_.wait(lock, [this] { return closing_ || (base_ != 0 && !wanted_); });
      if (closing_) return;
      if (look()) active = Clock::now();
    }
    rest(active);
  }
}

int64_t* MissService::of_step(int64_t* mail) const {
  const int64_t turn = base_ / mail_.layers % 2;
  return mail + turn * (static_cast<int64_t>(kMailHead) + mail_.most);
}

bool MissService::look() {
  int64_t* const request = of_step(mail_.requests);
  const int64_t ticket = std::atomic_ref<int64_t>(*request).load(std::memory_order_acquire);
  if (ticket <= latest_ || ticket > base_ + mail_.layers) return false;
  latest_ = ticket;
  int64_t* const reply = of_step(mail_.replies);
  const auto count = static_cast<size_t>(std::clamp<int64_t>(request[1], 0, mail_.most));
  try {
    serve(request, count, reply);
  } catch (const std::exception&) {  // no memory, or no such slot: these pages are lost
    std::fill_n(reply + kMailHead, count, 0);
    reply[1] = static_cast<int64_t>(count);
    served_.lost += count;
  }
  std::atomic_ref<int64_t>(*reply).store(ticket, std::memory_order_release);
  answered_.fetch_add(1, std::memory_order_relaxed);
  return true;
}

void MissService::serve(const int64_t* request, size_t count, int64_t* reply) {
  // Whoever asks has done with the pages of the layer before.
  cache_.release(std::exchange(taken_, {}));
  settle();
  const int64_t first = (latest_ - base_ - 1) * mail_.layer_pages;
  std::vector<int64_t> slots, numbers;
  std::vector<size_t> known;
  size_t lost = 0;
  for (size_t i = 0; i < count; ++i) {
    const int64_t key = request[kMailHead + i], block = key / mail_.layer_pages;
    if (key < 0) continue;
    ++lost;
    const auto row = static_cast<size_t>(block / mail_.blocks);
    const auto column = static_cast<size_t>(block % mail_.blocks);
    if (row >= rows_.size() || column >= rows_[row].size()) continue;
    slots.push_back(rows_[row][column]);
    numbers.push_back(first + key % mail_.layer_pages);
    known.push_back(i);
  }
  const std::vector<uint64_t> no_frame(slots.size(), 0);
  AskedPages asked = cache_.acquire(slots, numbers, no_frame);
  served_.held += asked.held - asked.coming;
  bring(asked);
  const FoundPages found = cache_.find(numbers, no_frame, asked.which, asked.keys, asked.places);
  std::fill_n(reply + kMailHead, count, 0);
  for (size_t i = 0; i < known.size(); ++i) {
    reply[kMailHead + known[i]] = static_cast<int64_t>(found.address[i]);
    lost -= found.here[i] != 0;
  }
  reply[1] = static_cast<int64_t>(lost);
  std::copy_if(asked.places.begin(), asked.places.end(), std::back_inserter(taken_),
               [](int32_t place) { return place != kNoPlace; });
  served_.lost += lost;
}

// Reads the entries behind those that are held. A place that a read may still write to is not the
// entry's any more.
void MissService::bring(AskedPages& asked) {
  Read read;
  for (size_t i = asked.held; i < asked.keys.size() && asked.places[i] != kNoPlace; ++i) {
    read.keys.push_back(asked.keys[i]);
    read.places.push_back(asked.places[i]);
  }
  if (read.keys.empty()) return;
  read.states.assign(read.keys.size(), Slow::kMissing);
  read.devices.assign(read.keys.size(), 0);
  read.until = deadline_after(deadline_s_);
  read.last = deadline_after(2 * deadline_s_);
  if (!late_ && submit_ && stripes_) read_fast(read);
  if (!late_) read_slowly(read);
  std::vector<uint8_t> good;
  for (size_t i = 0; i < read.keys.size(); ++i) {
    good.push_back(read.states[i] == Slow::kGood);
    served_.read += good.back();
    if (read.states[i] == Slow::kHeld) asked.places[asked.held + i] = kNoPlace;
  }
  cache_.complete(read.keys, read.places, good, read.devices);
}

void MissService::read_fast(Read& read) {
  std::vector<int64_t> slots, offsets;
  std::vector<uint64_t> at;
  const auto pages = static_cast<int64_t>(stored_.pages);
  for (size_t i = 0; i < read.keys.size(); ++i) {
    const auto inside = static_cast<uint64_t>(read.keys[i] % pages) * stored_.places.page_bytes;
    slots.push_back(read.keys[i] / pages);
    offsets.push_back(static_cast<int64_t>(stored_.places.header_bytes + inside));
    at.push_back(address(read.places[i]) - stored_.arena);
  }
  std::optional<StripedExtents> extents;
  std::shared_ptr<Batch> batch;
  try {
    extents.emplace(*stripes_, slots, offsets, static_cast<int64_t>(stored_.places.page_bytes), at,
                    true, kMostCoalesced, std::span<const uint64_t>{}, 0);
    batch = submit_(extents->requests().arrays());
  } catch (const std::exception&) {
    return;  // the slow lane finds out why
  }
  (void)batch->wait_until(read.until);
  const std::vector<int32_t> results = batch->results();
  const SlotRequests& pieces = extents->pieces();
  const Parts& parts = extents->requests().parts;
  std::vector<uint8_t> arrived(read.keys.size(), 1);
  for (size_t i = pieces.device.size(); i-- > 0;) {
    const auto page = static_cast<size_t>(pieces.slot_index[i]);
    const int32_t result = results[static_cast<size_t>(parts.request[i])];
    read.devices[page] = pieces.device[i];
    if (result == Batch::kPending) {
      read.states[page] = Slow::kHeld;
    } else if (int64_t{part_result(result, parts.begin[i], pieces.length[i])} == pieces.length[i]) {
      served_.bytes.resize(std::max(served_.bytes.size(), size_t{pieces.device[i]} + 1));
      served_.bytes[pieces.device[i]] += pieces.length[i];
      continue;
    }
    arrived[page] = 0;
  }
  OverdueRead overdue{batch, extents->requests().device, extents->requests().length, {}};
  for (size_t i = 0; i < read.keys.size(); ++i) {
    if (read.states[i] == Slow::kHeld) overdue.places.push_back(read.places[i]);
    if (arrived[i] != 0 && right(read.keys[i], read.places[i])) read.states[i] = Slow::kGood;
  }
  if (overdue.places.empty()) return;
  late_ = true;
  overdue_.push_back(overdue);
  served_.overdue.push_back(std::move(overdue));
}

void MissService::read_slowly(Read& read) {
  SlowRead work;
  std::vector<size_t> which;
  for (size_t i = 0; i < read.keys.size(); ++i) {
    if (read.states[i] != Slow::kMissing) continue;
    which.push_back(i);
    work.keys.push_back(read.keys[i]);
    work.places.push_back(read.places[i]);
  }
  if (which.empty()) return;
  std::unique_lock<std::mutex> lock(lane_);
  const auto idle = [this] { return ends_ || (!queued_ && !under_way_); };
  if (!done_.wait_until(lock, read.last, idle) || ends_) {
    late_ = true;
    return;
  }
  queued_ = std::move(work);
  awaited_ = true;
  states_.clear();
  work_.notify_one();
  done_.wait_until(lock, read.last, [this] { return ends_ || !states_.empty(); });
  awaited_ = false;
  late_ = states_.empty();
  const bool begun = !queued_;
  queued_.reset();
  for (size_t i = 0; i < which.size(); ++i) {
    if (late_) {
      if (begun) read.states[which[i]] = Slow::kHeld;
      continue;
    }
    read.states[which[i]] = Slow{states_[i]};
    read.devices[which[i]] = devices_[i];
    served_.slow += Slow{states_[i]} == Slow::kGood;
  }
}

bool MissService::right(int64_t key, int32_t place) const {
  const DigestTable& digests = stored_.digests;
  const auto page = static_cast<size_t>(key % static_cast<int64_t>(stored_.pages));
  const int32_t row = digests.row_of[key / static_cast<int64_t>(stored_.pages)];
  if (row < 0) return false;
  const auto of = static_cast<size_t>(row);
  const uint64_t at = address(place);
  const uint64_t* const mark = digests.marks + (of * stored_.pages + page) * digests.mark_words;
  if (digests.opening_words == 0) {
    uint64_t sum = 0;
    checksum(&at, 1, stored_.payload_bytes, 1, &sum);
    return sum == *mark;
  }
  const auto* const opening =
      reinterpret_cast<const uint8_t*>(digests.opening + of * digests.opening_words);
  uint8_t good = 0;
  try {
    open({opening, opening + kKeyBytes, static_cast<uint32_t>(page), &at, &at, 1, 1,
          stored_.payload_bytes},
         1, reinterpret_cast<const uint8_t*>(mark), &good);
  } catch (const std::exception&) {
    return false;  // libcrypto refuses, as it will in the slow lane
  }
  return good != 0;
}

uint64_t MissService::address(int32_t place) const {
  return stored_.places.address + static_cast<uint64_t>(place) * stored_.places.page_bytes;
}

// Gives back places of reads that have ended since they were late.
void MissService::settle() {
  std::vector<int32_t> free;
  {
    const std::lock_guard<std::mutex> lock(lane_);
    free.swap(returned_);
  }
  const auto ended = std::partition(overdue_.begin(), overdue_.end(),
                                    [](const OverdueRead& read) { return !read.batch->done(); });
  for (auto read = ended; read != overdue_.end(); ++read) {
    free.insert(free.end(), read->places.begin(), read->places.end());
  }
  overdue_.erase(ended, overdue_.end());
  cache_.release(free);
}

}  // namespace ssdkv
