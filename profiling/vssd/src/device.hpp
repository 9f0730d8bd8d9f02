// One virtual SSD: a clock that says when each request ends, and faults that change how.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <queue>
#include <string>
#include <thread>
#include <vector>

namespace vssd {

struct Model {
  double bandwidth;  // bytes per second, reads and writes together
  double latency;    // seconds from the end of a transfer to the end of its request
  double iops;       // requests per second
};

enum class Op { read, write, sync };

struct Counters {
  uint64_t reads = 0, writes = 0, syncs = 0, read_bytes = 0, written_bytes = 0;
};

// Thread-safe. Replies run on the device's own thread, in the order in which they are due, so a
// slow or hung device delays no other.
class Device {
 public:
  Device(uint64_t capacity, Model model);
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // errno that a request on `[offset, offset + bytes)` of a file ends with; 0 for none.
  int error(Op op, const std::string& path, uint64_t offset, uint64_t bytes);

  // Runs `reply` when the model says that the request ends; never, while the device hangs.
  void submit(Op op, uint64_t bytes, std::function<void()> reply);

  // Takes (or with a negative number gives back) space; false when the device is too small.
  bool reserve(int64_t bytes);

  // A control command for this device, without its number; false when it is not understood.
  // `corrupt` is not among them: it changes bytes, which belong to the tree.
  bool command(const std::vector<std::string>& words);

  uint64_t capacity() const { return capacity_; }
  uint64_t used();
  Counters counters();

 private:
  struct Due {
    double at;
    uint64_t order;
    std::function<void()> reply;
    bool operator<(const Due& other) const {
      return at != other.at ? at > other.at : order > other.order;
    }
  };
  struct BadRange {
    std::string path;
    uint64_t offset, bytes;
  };

  void run();

  const uint64_t capacity_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Model model_;
  double free_at_ = 0;
  double stalled_until_ = 0;
  bool hung_ = false, dead_ = false, full_ = false;
  std::vector<BadRange> bad_;
  std::priority_queue<Due> due_;
  std::vector<Due> held_;
  uint64_t used_ = 0, order_ = 0;
  Counters counters_;
  std::thread thread_;
};

}  // namespace vssd
