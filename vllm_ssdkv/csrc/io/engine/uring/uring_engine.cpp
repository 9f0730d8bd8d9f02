#include "io/engine/uring/uring_engine.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <future>
#include <span>
#include <stdexcept>
#include <string>

#include "base/worker_thread.hpp"

namespace ssdkv {
namespace {

constexpr unsigned kMaxQueueDepth = 1024;
constexpr size_t kDevicesPerRing = 8;

void serve(const std::shared_ptr<UringWorker>& worker, size_t ring,
           std::promise<UringRing::Setup> started) noexcept {
  use_all_cpus();
  const std::string name = "ssdkv-uring-" + std::to_string(ring);  // at most 15 characters
  (void)pthread_setname_np(pthread_self(), name.c_str());
  worker->serve(started);
}

}  // namespace

UringEngine::UringEngine(const std::vector<int>& fds, uint64_t arena_address, uint64_t arena_bytes,
                         unsigned queue_depth)
    : owner_(getpid()), devices_(fds.size()), arena_bytes_(arena_bytes) {
  if (fds.empty() || fds.size() > UINT16_MAX) throw std::invalid_argument("1 to 65535 devices");
  if (queue_depth == 0 || queue_depth > kMaxQueueDepth) {
    throw std::invalid_argument("queue_depth must be 1 to " + std::to_string(kMaxQueueDepth));
  }
  if (arena_address == 0 || arena_address % kAlign != 0) {
    throw std::invalid_argument("the arena must begin at a multiple of 4096");
  }
  const ArenaRange arena{reinterpret_cast<std::byte*>(arena_address), arena_bytes};
  const BlockSignals quiet;
  try {
    for (size_t first = 0; first < fds.size(); first += kDevicesPerRing) {
      const size_t last = std::min(fds.size(), first + kDevicesPerRing);
      const std::vector<int> mine(fds.begin() + static_cast<std::ptrdiff_t>(first),
                                  fds.begin() + static_cast<std::ptrdiff_t>(last));
      auto worker = std::make_shared<UringWorker>(mine, arena, queue_depth);
      std::promise<UringRing::Setup> promise;
      auto started = promise.get_future();
      std::thread thread(serve, worker, workers_.size(), std::move(promise));
      try {
        setups_.push_back(started.get());
      } catch (...) {
        thread.join();
        throw;
      }
      workers_.push_back(std::move(worker));
      threads_.push_back(std::move(thread));
    }
  } catch (...) {
    close(0.0);  // joins the others: all are idle
    throw;
  }
}

UringEngine::~UringEngine() { close(0.0); }

bool UringEngine::forked() const noexcept { return getpid() != owner_; }

std::shared_ptr<Batch> UringEngine::submit(Op op, const RequestArrays& arrays, bool joined) {
  if (forked()) throw std::invalid_argument("the engine is closed: it belongs to the parent");
  auto batch = std::make_shared<Batch>(op, check_requests(arrays, devices_, arena_bytes_));
  // Everything that may fail comes before the first push.
  Shares shares = split(batch, devices_, joined);
  const std::span<std::list<Share>> all(shares);
  const std::lock_guard<std::mutex> lock(submit_mutex_);
  if (closed_) throw std::invalid_argument("the engine is closed");
  for (size_t ring = 0; ring < workers_.size(); ++ring) {
    const size_t first = ring * kDevicesPerRing;
    workers_[ring]->push(all.subspan(first, std::min(kDevicesPerRing, devices_ - first)));
  }
  return batch;
}

Statistics UringEngine::statistics() const {
  Statistics all;
  for (size_t ring = 0; ring < workers_.size(); ++ring) {
    workers_[ring]->append_to(all, ring * kDevicesPerRing, ring);
  }
  return all;
}

bool UringEngine::close(double timeout_s) {
  if (forked()) {
    // No thread to wait for; and a mutex may be locked for ever by one that the fork left behind.
    for (std::thread& thread : threads_) thread.detach();
    threads_.clear();
    return true;
  }
  {
    const std::lock_guard<std::mutex> lock(submit_mutex_);
    closed_ = true;
  }
  const std::lock_guard<std::mutex> lock(close_mutex_);
  const auto deadline = deadline_after(timeout_s);
  for (const auto& worker : workers_) worker->stop();
  bool all = true;
  for (size_t ring = 0; ring < workers_.size(); ++ring) {
    // Past the deadline this only looks, so one slow device costs the others nothing.
    const bool idle = workers_[ring]->wait_idle(deadline);
    if (!idle) workers_[ring]->cancel_waiting();
    all = all && idle;
    std::thread& thread = threads_[ring];
    if (!thread.joinable()) continue;
    if (idle) {
      thread.join();
    } else {
      thread.detach();
    }
  }
  return all;
}

}  // namespace ssdkv
