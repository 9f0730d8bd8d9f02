#include "io/engine/submission_queue.hpp"

namespace ssdkv {
namespace {

constexpr size_t kReads = static_cast<size_t>(Op::kRead);
constexpr size_t kWrites = static_cast<size_t>(Op::kWrite);
constexpr unsigned kReadsPerWrite = 32;

// The latest chain of a device.
struct Chain {
  uint64_t end = 0;  // on the device
  uint32_t bytes = 0;
  uint32_t requests = 0;
  uint32_t last = 0;

  // Whether the request goes on with it; else it begins the next one.
  bool take(const Request& request) {
    const bool follows = requests > 0 && requests < kMaxJoined && request.offset == end &&
                         uint64_t{bytes} + request.length <= kMaxJoinedBytes;
    bytes = (follows ? bytes : 0) + request.length;
    requests = (follows ? requests : 0) + 1;
    end = request.offset + request.length;
    return follows;
  }
};

}  // namespace

Shares split(const std::shared_ptr<Batch>& batch, size_t devices, bool joined) {
  std::vector<size_t> counts(devices);
  for (size_t i = 0; i < batch->size(); ++i) ++counts[batch->request(i).device];
  Shares shares(devices);
  for (size_t device = 0; device < devices; ++device) {
    if (counts[device] == 0) continue;
    shares[device].push_back({batch, {}});
    shares[device].front().indices.reserve(counts[device]);
  }
  std::vector<Chain> chains(joined ? devices : 0);
  for (uint32_t i = 0; i < batch->size(); ++i) {
    const Request& request = batch->request(i);
    if (joined && chains[request.device].take(request)) {
      batch->join(chains[request.device].last, i);
    } else {
      shares[request.device].front().indices.push_back(i);
    }
    if (joined) chains[request.device].last = i;
  }
  return shares;
}

void SubmissionQueue::push(std::list<Share>& share) noexcept {
  auto& queue = queues_[static_cast<size_t>(share.front().batch->op())];
  queue.splice(queue.end(), share);
}

bool SubmissionQueue::pop(Taken& taken) {
  const bool reads = !queues_[kReads].empty();
  const bool writes = !queues_[kWrites].empty();
  if (!reads && !writes) return false;
  const bool write = writes && (!reads || reads_in_row_ >= kReadsPerWrite);
  reads_in_row_ = write || !writes ? 0 : reads_in_row_ + 1;
  auto& queue = queues_[write ? kWrites : kReads];
  Share& share = queue.front();
  taken = {share.batch, share.indices[share.next]};
  if (++share.next == share.indices.size()) queue.pop_front();
  return true;
}

}  // namespace ssdkv
