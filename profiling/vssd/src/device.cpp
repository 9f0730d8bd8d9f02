#include "device.hpp"

#include <sys/prctl.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <optional>

namespace vssd {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::optional<double> number(const std::vector<std::string>& words, size_t index) {
  if (index >= words.size()) return std::nullopt;
  try {
    size_t used = 0;
    const double value = std::stod(words[index], &used);
    if (used != words[index].size() || !std::isfinite(value) || value < 0) return std::nullopt;
    return value;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

}  // namespace

Device::Device(uint64_t capacity, Model model)
    : capacity_(capacity), model_(model), thread_([this] { run(); }) {
  thread_.detach();  // devices live as long as the process
}

int Device::error(Op op, const std::string& path, uint64_t offset, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (dead_) return EIO;
  if (op == Op::write && full_) return ENOSPC;
  for (const BadRange& bad : bad_) {
    if (bad.path == path && offset < bad.offset + bad.bytes && bad.offset < offset + bytes) {
      return EIO;
    }
  }
  return 0;
}

void Device::submit(Op op, uint64_t bytes, std::function<void()> reply) {
  const std::lock_guard lock(mutex_);
  switch (op) {
    case Op::read:
      counters_.reads++;
      counters_.read_bytes += bytes;
      break;
    case Op::write:
      counters_.writes++;
      counters_.written_bytes += bytes;
      break;
    case Op::sync:
      counters_.syncs++;
      break;
  }
  const double start = std::max({now(), free_at_, stalled_until_});
  free_at_ = start + std::max(static_cast<double>(bytes) / model_.bandwidth, 1 / model_.iops);
  Due due{free_at_ + model_.latency, order_++, std::move(reply)};
  if (hung_) {
    held_.push_back(std::move(due));
    return;
  }
  const bool first = due_.empty() || due.at < due_.top().at;
  due_.push(std::move(due));
  if (first) changed_.notify_one();
}

bool Device::reserve(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto wanted = static_cast<int64_t>(used_) + bytes;
  if (bytes > 0 && (full_ || wanted > static_cast<int64_t>(capacity_))) return false;
  used_ = static_cast<uint64_t>(std::max<int64_t>(wanted, 0));
  return true;
}

bool Device::command(const std::vector<std::string>& words) {
  if (words.empty()) return false;
  const std::string& what = words[0];
  const auto value = number(words, 1);
  const std::lock_guard lock(mutex_);
  if (words.size() == 1) {
    if (what == "dead") return dead_ = true;
    if (what == "full") return full_ = true;
    if (what == "hang") return hung_ = true;
    if (what != "heal") return false;
    dead_ = full_ = hung_ = false;
    bad_.clear();
    for (; !due_.empty(); due_.pop()) held_.push_back(due_.top());
    const double at = now();  // what a hang or a stall holds back ends at once
    stalled_until_ = free_at_ = at;
    for (Due& due : held_) {
      due.at = at;
      due_.push(std::move(due));
    }
    held_.clear();
    changed_.notify_one();
    return true;
  }
  if (words.size() == 2 && value) {
    if (what == "stall") {
      stalled_until_ = now() + *value / 1e3;
      return true;
    }
    if (what == "latency") {
      model_.latency = *value / 1e6;
      return true;
    }
    if (*value <= 0) return false;
    if (what == "bandwidth") {
      model_.bandwidth = *value * 1e6;
      return true;
    }
    if (what == "iops") {
      model_.iops = *value;
      return true;
    }
    return false;
  }
  const auto offset = number(words, 2), bytes = number(words, 3);
  if (what != "eio" || words.size() != 4 || !offset || !bytes) return false;
  bad_.push_back({words[1], static_cast<uint64_t>(*offset), static_cast<uint64_t>(*bytes)});
  return true;
}

uint64_t Device::used() {
  const std::lock_guard lock(mutex_);
  return used_;
}

Counters Device::counters() {
  const std::lock_guard lock(mutex_);
  return counters_;
}

void Device::run() {
  prctl(PR_SET_TIMERSLACK, 1000);  // the default of 50 us would be part of every latency
  std::unique_lock lock(mutex_);
  for (;;) {
    if (due_.empty()) {
      changed_.wait(lock);
      continue;
    }
    const double left = due_.top().at - now();
    if (left > 3e-6) {
      changed_.wait_for(lock, std::chrono::duration<double>(left));
      continue;
    }
    const auto reply = due_.top().reply;
    due_.pop();
    lock.unlock();
    reply();
    lock.lock();
  }
}

}  // namespace vssd
