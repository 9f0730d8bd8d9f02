#include "io/engine/uring/uring_worker.hpp"

#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <exception>
#include <numeric>
#include <system_error>
#include <thread>
#include <utility>

#include "io/engine/file.hpp"

namespace ssdkv {
namespace {

using std::chrono::nanoseconds;

// How many requests of one device are started before the next device gets its turn.
constexpr unsigned kTurn = 8;

// While every device is busy up to its limit, nothing new could be started anyway, so the thread
// sleeps until an eighth of what is in flight has completed: fewer calls and fewer wake-ups. Large
// requests are replaced one by one: a drive misses them for longer, and a call costs little beside
// what it moves. The limit in time is for devices that answer only a part; a shorter one would cost
// a timer interrupt per call.
constexpr size_t kManyInFlight = 32;
constexpr size_t kBatchShare = 8;
constexpr size_t kBatchMax = 32;
constexpr size_t kBatchBytes = size_t{256} << 10;
constexpr nanoseconds kBatchPause = std::chrono::milliseconds{5};

// As transfer() in file.cpp: a second of trying again, then the error counts.
constexpr nanoseconds kBusyPatience = std::chrono::seconds{1};
constexpr nanoseconds kBusyPause = std::chrono::milliseconds{1};

Descriptor make_eventfd() {
  const int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (fd < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  return Descriptor(fd);
}

std::vector<Descriptor> duplicates(const std::vector<int>& fds) {
  std::vector<Descriptor> copies;
  copies.reserve(fds.size());
  for (const int fd : fds) copies.push_back(Descriptor::duplicate(fd));
  return copies;
}

}  // namespace

UringWorker::UringWorker(const std::vector<int>& fds, ArenaRange arena, unsigned queue_depth)
    : files_(duplicates(fds)),
      arena_(arena),
      queue_depth_(queue_depth),
      wake_(make_eventfd()),
      devices_(fds.size()) {
  // Everything that the thread needs, so that it never allocates.
  const size_t slots = fds.size() * queue_depth;
  flights_.resize(slots);
  memory_.resize(slots);
  free_.resize(slots);
  std::iota(free_.rbegin(), free_.rend(), 0U);
  to_issue_.reserve(slots);
  later_.reserve(slots);
  ended_.reserve(slots);
}

void UringWorker::serve(std::promise<UringRing::Setup>& started) noexcept {
  std::optional<UringRing> ring;
  try {
    std::vector<int> fds;
    fds.reserve(files_.size());
    for (const Descriptor& file : files_) fds.push_back(file.get());
    ring.emplace(fds, arena_, static_cast<unsigned>(flights_.size()), wake_.get());
    started.set_value(ring->setup());
  } catch (...) {
    started.set_exception(std::current_exception());
    return;
  }
  run(*ring);
  ring.reset();
  files_.clear();
}

void UringWorker::wake() noexcept { (void)!eventfd_write(wake_.get(), 1); }

void UringWorker::push(std::span<std::list<Share>> shares) noexcept {
  bool wanted = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < shares.size(); ++i) {
      if (shares[i].empty()) continue;
      Device& device = devices_[i];
      const Share& share = shares[i].front();
      const size_t count = share.indices.size();
      device.totals.of(share.batch->op()).submitted.fetch_add(count, std::memory_order_relaxed);
      outstanding_ += count;
      device.waiting.push(shares[i]);
      // A device that is busy up to its limit takes more when something completes.
      wanted = wanted || device.room;
    }
    wanted = wanted && asleep_.exchange(false, std::memory_order_relaxed);
  }
  if (wanted) wake();
}

void UringWorker::stop() noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake();
}

void UringWorker::cancel_waiting() noexcept {
  for (Device& device : devices_) {
    SubmissionQueue cancelled;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      cancelled.swap(device.waiting);
    }
    uint64_t count = 0;
    for (Taken taken; cancelled.pop(taken); ++count) {
      device.totals.of(taken.batch->op()).add_ended(-ECANCELED, 0);
      taken.batch->complete(taken.index, -ECANCELED);
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    outstanding_ -= count;
  }
  wake();
}

bool UringWorker::wait_idle(Clock::time_point deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  return became_idle_.wait_until(lock, deadline, [this] { return outstanding_ == 0; });
}

void UringWorker::append_to(Statistics& all, size_t device, size_t ring) const {
  for (const Device& one : devices_) {
    one.totals.append_to(all, device);
    append(all, "in_flight_max", device, one.in_flight_max);
    ++device;
  }
  append(all, "ring_enters", ring, enters_);
  append(all, "ring_wakes", ring, wakes_);
  append(all, "ring_retries", ring, retries_);
  append(all, "ring_errors", ring, errors_);
  append(all, "ring_registered", ring, registered_);
  append(all, "ring_refused", ring, refused_);
}

void UringWorker::run(UringRing& ring) noexcept {
  while (take()) {
    report();
    const bool all_issued = issue(ring);
    wait(ring, all_issued);
    reap(ring);
  }
  report();
}

bool UringWorker::take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  outstanding_ -= std::exchange(freed_, 0);
  if (outstanding_ == 0) {
    became_idle_.notify_all();
    if (stopping_) return false;
  }
  for (bool any = true; any;) {
    any = false;
    for (size_t i = 0; i < devices_.size(); ++i) {
      Device& device = devices_[i];
      for (unsigned turn = 0; turn < kTurn; ++turn) {
        Taken taken;
        if (device.in_flight == queue_depth_ || !device.waiting.pop(taken)) break;
        start(i, std::move(taken));
        any = true;
      }
      device.room = device.in_flight < queue_depth_;
    }
  }
  full_ = std::none_of(devices_.begin(), devices_.end(),
                       [](const Device& device) { return device.room; });
  asleep_.store(true, std::memory_order_relaxed);
  return true;
}

void UringWorker::start(size_t device, Taken&& taken) {
  const uint32_t slot = free_.back();
  free_.pop_back();
  const uint32_t length = taken.batch->length(taken.index);
  flights_[slot] = {
      std::move(taken), 0, 0, length, Batch::kAlone, static_cast<uint16_t>(device), {}, {}};
  to_issue_.push_back(slot);
  bytes_taken_ += length;
  const unsigned in_flight = ++devices_[device].in_flight;
  devices_[device].totals.add_started(in_flight);
  auto& most = devices_[device].in_flight_max;
  if (in_flight > most.load(std::memory_order_relaxed)) {
    most.store(in_flight, std::memory_order_relaxed);
  }
}

void UringWorker::report() noexcept {
  for (size_t i = 0; i < ended_.size();) {
    // Neighbours mostly belong to one batch; its counter is touched once for all of them.
    Batch& batch = *ended_[i].taken.batch;
    size_t requests = 0;
    for (; i < ended_.size() && ended_[i].taken.batch.get() == &batch; ++i) {
      requests += batch.set(ended_[i].taken.index, ended_[i].result);
    }
    batch.end(requests);
  }
  ended_.clear();
}

bool UringWorker::issue(UringRing& ring) noexcept {
  if (!wake_armed_) wake_armed_ = ring.prepare_wake();
  const auto now = Clock::now();
  if (!later_.empty() && now >= retry_at_) {
    to_issue_.insert(to_issue_.end(), later_.begin(), later_.end());
    later_.clear();
  }
  size_t issued = 0;
  for (; issued < to_issue_.size(); ++issued) {
    const uint32_t slot = to_issue_[issued];
    Flight& flight = flights_[slot];
    const Batch& batch = *flight.taken.batch;
    const Request& request = batch.request(flight.taken.index);
    Piece piece{batch.op(),
                flight.device,
                request.offset + flight.from,
                request.buffer + flight.from,
                flight.length - flight.from,
                {}};
    if (batch.next(flight.taken.index) != Batch::kAlone) {
      const size_t count =
          memory_of(batch, flight.taken.index, flight.from, arena_.base, memory_[slot]);
      piece.memory = std::span<const iovec>(memory_[slot]).first(count);
    }
    if (!ring.prepare(piece, slot)) break;
    if (flight.began == Clock::time_point{}) flight.began = now;
  }
  registered_.store(ring.registered(), std::memory_order_relaxed);
  refused_.store(ring.refused(), std::memory_order_relaxed);
  to_issue_.erase(to_issue_.begin(), to_issue_.begin() + static_cast<std::ptrdiff_t>(issued));
  return wake_armed_ && to_issue_.empty();
}

void UringWorker::wait(UringRing& ring, bool all_issued) noexcept {
  const size_t in_flight = flights_.size() - free_.size() - later_.size();
  unsigned completions = 1;
  nanoseconds timeout{0};
  if (full_ && in_flight >= kManyInFlight) {
    const size_t most = std::min(in_flight / kBatchShare, kBatchMax);
    const uint64_t mean = std::max<uint64_t>(1, bytes_taken_ / (flights_.size() - free_.size()));
    completions = static_cast<unsigned>(std::clamp<uint64_t>(kBatchBytes / mean, 1, most));
    if (completions > 1) timeout = kBatchPause;
  }
  if (!later_.empty()) {
    completions = 1;
    timeout = kBusyPause;
  }
  if (!all_issued) completions = 0;
  enters_.fetch_add(1, std::memory_order_relaxed);
  const int error = ring.enter(completions, timeout);
  asleep_.store(false, std::memory_order_relaxed);
  if (error != 0) {
    // What was prepared stays prepared. A pause, because the reason may last (no memory).
    errors_.fetch_add(1, std::memory_order_relaxed);
    std::this_thread::sleep_for(kBusyPause);
  }
}

void UringWorker::reap(UringRing& ring) noexcept {
  const auto now = Clock::now();
  ring.drain([&](uint64_t tag, int32_t result, bool more) {
    if (tag == UringRing::kWakeTag) {
      wakes_.fetch_add(1, std::memory_order_relaxed);
      wake_armed_ = wake_armed_ && more;
    } else {
      on_completion(static_cast<uint32_t>(tag), result, now);
    }
  });
}

void UringWorker::on_completion(uint32_t slot, int32_t result, Clock::time_point now) {
  Flight& flight = flights_[slot];
  const uint32_t length = flight.length;
  if (result < 0) {
    // ECANCELED: the kernel could not start a thread for it; nobody else cancels.
    const bool busy = result == -EAGAIN || result == -EINTR || result == -ECANCELED;
    if (busy && flight.busy_since == Clock::time_point{}) flight.busy_since = now;
    if (busy && now - flight.busy_since < kBusyPatience) {
      if (later_.empty()) retry_at_ = now + kBusyPause;
      later_.push_back(slot);
    } else if (result == -EINVAL && flight.from % kAlign != 0) {
      // O_DIRECT cannot go on inside a block; after a transfer cut there, repeat that block.
      flight.from -= flight.from % static_cast<uint32_t>(kAlign);
      to_issue_.push_back(slot);
    } else if (flight.taken.batch->next(flight.taken.index) != Batch::kAlone) {
      // What one place on the device has is not the fault of its neighbours.
      try_alone(slot, flight.taken.index);
    } else {
      end(slot, result, now);
      return;
    }
  } else {
    const uint32_t reached = flight.from + static_cast<uint32_t>(result);
    // Without progress it is the end of the file.
    if (reached <= flight.moved || reached == length) {
      end(slot, static_cast<int32_t>(std::max(reached, flight.moved)), now);
      return;
    }
    flight.moved = flight.from = reached;
    to_issue_.push_back(slot);
  }
  retries_.fetch_add(1, std::memory_order_relaxed);
}

void UringWorker::try_alone(uint32_t slot, uint32_t index) {
  Flight& flight = flights_[slot];
  const Batch& batch = *flight.taken.batch;
  bytes_taken_ -= flight.length;
  flight.taken.index = index;
  flight.rest = flight.taken.batch->cut(index);
  flight.moved = flight.from = 0;
  flight.length = batch.request(index).length;
  flight.began = flight.busy_since = {};
  bytes_taken_ += flight.length;
  to_issue_.push_back(slot);
}

void UringWorker::end(uint32_t slot, int32_t result, Clock::time_point now) {
  Flight& flight = flights_[slot];
  Device& device = devices_[flight.device];
  const auto spent = std::chrono::duration_cast<nanoseconds>(now - flight.began);
  // Counted before report(), so that whoever sees the batch done sees it in the statistics too.
  device.totals.of(flight.taken.batch->op())
      .add_ended(result, static_cast<uint64_t>(spent.count()));
  if (flight.rest != Batch::kAlone) {
    ended_.push_back({flight.taken, result});
    device.totals.of(flight.taken.batch->op()).submitted.fetch_add(1, std::memory_order_relaxed);
    device.totals.add_started(device.in_flight);
    try_alone(slot, flight.rest);
    return;
  }
  --device.in_flight;
  ++freed_;
  bytes_taken_ -= flight.length;
  ended_.push_back({std::move(flight.taken), result});
  free_.push_back(slot);
}

}  // namespace ssdkv
