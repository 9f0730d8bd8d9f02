#include "io/engine/threads/threads_engine.hpp"

#include <pthread.h>
#include <unistd.h>

#include <stdexcept>
#include <string>

#include "base/worker_thread.hpp"

namespace ssdkv {
namespace {

constexpr unsigned kMaxQueueDepth = 1024;

void worker(const std::shared_ptr<DeviceQueue>& queue, size_t device) noexcept {
  use_all_cpus();
  const std::string name = "ssdkv-io-" + std::to_string(device);  // at most 15 characters
  (void)pthread_setname_np(pthread_self(), name.c_str());
  queue->serve();
}

}  // namespace

ThreadsEngine::ThreadsEngine(const std::vector<int>& fds, uint64_t arena_address,
                             uint64_t arena_bytes, unsigned queue_depth)
    : owner_(getpid()), arena_bytes_(arena_bytes), threads_(fds.size()) {
  if (fds.empty() || fds.size() > UINT16_MAX) throw std::invalid_argument("1 to 65535 devices");
  if (queue_depth == 0 || queue_depth > kMaxQueueDepth) {
    throw std::invalid_argument("queue_depth must be 1 to " + std::to_string(kMaxQueueDepth));
  }
  if (arena_address == 0 || arena_address % kAlign != 0) {
    throw std::invalid_argument("the arena must begin at a multiple of 4096");
  }
  auto* const arena = reinterpret_cast<std::byte*>(arena_address);
  for (const int fd : fds) queues_.push_back(std::make_shared<DeviceQueue>(fd, arena));
  const BlockSignals quiet;
  for (size_t device = 0; device < fds.size(); ++device) {
    threads_[device].reserve(queue_depth);
    const auto& queue = queues_[device];
    for (unsigned i = 0; i < queue_depth; ++i) {
      try {
        threads_[device].emplace_back([queue, device] { worker(queue, device); });
      } catch (...) {
        close(0.0);  // joins the others: all are idle
        throw;
      }
    }
  }
}

ThreadsEngine::~ThreadsEngine() { close(0.0); }

bool ThreadsEngine::forked() const noexcept { return getpid() != owner_; }

std::shared_ptr<Batch> ThreadsEngine::submit(Op op, const RequestArrays& arrays, bool joined) {
  if (forked()) throw std::invalid_argument("the engine is closed: it belongs to the parent");
  auto batch = std::make_shared<Batch>(op, check_requests(arrays, queues_.size(), arena_bytes_));
  // Everything that may fail comes before the first push.
  Shares shares = split(batch, queues_.size(), joined);
  const std::lock_guard<std::mutex> lock(submit_mutex_);
  if (closed_) throw std::invalid_argument("the engine is closed");
  for (size_t device = 0; device < shares.size(); ++device) {
    if (!shares[device].empty()) queues_[device]->push(shares[device]);
  }
  return batch;
}

Statistics ThreadsEngine::statistics() const {
  Statistics all;
  for (size_t i = 0; i < queues_.size(); ++i) queues_[i]->totals().append_to(all, i);
  return all;
}

bool ThreadsEngine::close(double timeout_s) {
  if (forked()) {
    // No thread to wait for; and a mutex may be locked for ever by one that the fork left behind.
    for (auto& threads : threads_) {
      for (std::thread& thread : threads) thread.detach();
      threads.clear();
    }
    return true;
  }
  {
    const std::lock_guard<std::mutex> lock(submit_mutex_);
    closed_ = true;
  }
  const std::lock_guard<std::mutex> lock(close_mutex_);
  const auto deadline = deadline_after(timeout_s);
  for (const auto& queue : queues_) queue->stop();
  bool all = true;
  for (size_t device = 0; device < queues_.size(); ++device) {
    // Past the deadline this only looks, so one slow device costs the others nothing.
    const bool idle = queues_[device]->wait_idle(deadline);
    if (!idle) queues_[device]->cancel_waiting();
    for (std::thread& thread : threads_[device]) {
      if (idle) {
        thread.join();
      } else {
        thread.detach();
      }
    }
    threads_[device].clear();
    if (idle) queues_[device]->release();
    all = all && idle;
  }
  return all;
}

}  // namespace ssdkv
