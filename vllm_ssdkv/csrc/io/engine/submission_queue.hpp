// Requests that wait for a device, and which of them is next.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "io/engine/batch.hpp"

namespace ssdkv {

// The share of one batch that goes to one device.
struct Share {
  std::shared_ptr<Batch> batch;
  std::vector<uint32_t> indices;
  size_t next = 0;
};

// One list per device, with one element or none.
using Shares = std::vector<std::list<Share>>;

// `joined`: requests that are neighbours on a device, one after the other in the batch's order of
// that device, become chains, of which a share has the first ones.
Shares split(const std::shared_ptr<Batch>& batch, size_t devices, bool joined);

// One request of a batch, or one chain.
struct Taken {
  std::shared_ptr<Batch> batch;
  uint32_t index = 0;
};

// First in, first out per direction. Reads go first, because somebody waits for them, but writes
// must not wait for ever: after 32 reads in a row one of them is let through. The caller locks.
class SubmissionQueue {
 public:
  // Takes the element of `share`; cannot fail, so a batch waits on all its devices or on none.
  void push(std::list<Share>& share) noexcept;
  bool empty() const { return queues_[0].empty() && queues_[1].empty(); }
  // False when nothing waits.
  bool pop(Taken& taken);
  void swap(SubmissionQueue& other) noexcept { queues_.swap(other.queues_); }

 private:
  std::array<std::list<Share>, 2> queues_;  // by Op
  unsigned reads_in_row_ = 0;               // while writes waited
};

}  // namespace ssdkv
