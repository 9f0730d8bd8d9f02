// Pages for a device that lacks them in the middle of a step: it asks and is answered through
// memory that both reach, while the host has no part in the step.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "cache/page_cache.hpp"
#include "io/engine/batch.hpp"
#include "io/slot/stripes.hpp"

namespace ssdkv {

// Words before the pages. A request has its ticket, the number of its pages, and a key for each:
// its row times `blocks`, plus its block, times `layer_pages`, plus its number in the layer; a
// negative one asks for nothing. A reply has the ticket, the number of pages that did not come, and
// the address of each page; 0: it is lost. Tickets are written last. A layer of a step has the
// ticket step * layers + layer + 1.
inline constexpr size_t kMailHead = 2;

// There are two of each, for steps in turn.
struct Mailbox {
  int64_t* requests;  // [2, kMailHead + most]
  int64_t* replies;   // likewise
  int64_t most;       // pages
  int64_t layers;
  int64_t blocks;
  int64_t layer_pages;
};

// Digests of slots of running contexts: `row_of` a slot, -1 where they are not known. With openings
// pages are encrypted.
struct DigestTable {
  const int32_t* row_of;    // [slots]
  const uint64_t* opening;  // [rows, opening_words]
  const uint64_t* marks;    // [rows, pages, mark_words]
  size_t opening_words;
  size_t mark_words;
};

struct StoredPages {
  PageLayout places;     // of the page cache
  uint64_t arena;        // address of what the engine reads into
  size_t pages;          // of a slot
  size_t payload_bytes;  // of a page
  DigestTable digests;
};

// Pages that the fast lane has not brought, for somebody who knows copies and devices.
struct SlowRead {
  std::vector<int64_t> keys;  // of PageCache
  std::vector<int32_t> places;
};

// What became of a page of such a read. Whoever reads keeps the place of the last kind.
enum class Slow : uint8_t { kMissing = 0, kGood = 1, kHeld = 2 };

// A read that has missed its deadline: requests of the engine, and places that it may write to.
struct OverdueRead {
  std::shared_ptr<Batch> batch;
  std::vector<uint16_t> device;
  std::vector<uint32_t> length;
  std::vector<int32_t> places;
};

// Outcome of the requests of a step.
struct Served {
  uint64_t held = 0;                 // distinct pages that the cache had
  uint64_t read = 0;                 // that were read
  uint64_t slow = 0;                 // of these, by the slow lane
  uint64_t lost = 0;                 // pages without an answer
  std::vector<uint64_t> bytes;       // that the fast lane has read from each device
  std::vector<int32_t> places;       // that the device still reads, taken
  std::vector<OverdueRead> overdue;  // of this step
};

// One thread takes requests in the order of their tickets. Between arm() and disarm() it alone uses
// the page cache; other functions but next() and answer() are the caller's, one at a time.
class MissService {
 public:
  using Submit = std::function<std::shared_ptr<Batch>(const RequestArrays&)>;

  // Without `submit` the slow lane reads everything. Seconds: from a request until what the fast
  // lane has not brought is lost, and half of what the slow lane has.
  MissService(PageCache& cache, const Mailbox& mail, const StoredPages& stored, Submit submit,
              double deadline_s);
  ~MissService();
  MissService(const MissService&) = delete;
  MissService& operator=(const MissService&) = delete;

  // Begins a step whose rows have these slots; without `stripes` the slow lane reads everything.
  // Returns what tickets of the step are counted from; 0: the service has ended.
  int64_t arm(std::vector<std::span<const int64_t>> rows, std::shared_ptr<const Stripes> stripes);

  // Ends it, after the request that is being answered.
  Served disarm();

  // Requests that have been answered so far.
  uint64_t answered() const { return answered_.load(std::memory_order_relaxed); }

  // The slow lane, one thread: waits for work, nothing at the deadline, and says what became of its
  // pages and which devices they are from.
  std::optional<SlowRead> next(Clock::time_point deadline);
  void answer(std::span<const uint8_t> states, std::span<const uint16_t> devices);

  // Ends the thread. Requests are not answered any more.
  void close();

 private:
  struct Read;

  void run() noexcept;
  bool look();
  void serve(const int64_t* request, size_t count, int64_t* reply);
  void bring(AskedPages& asked);
  void read_fast(Read& read);
  void read_slowly(Read& read);
  bool right(int64_t key, int32_t place) const;
  uint64_t address(int32_t place) const;
  void settle();
  int64_t* of_step(int64_t* mail) const;

  PageCache& cache_;
  const Mailbox mail_;
  const StoredPages stored_;
  const Submit submit_;
  const double deadline_s_;
  const pid_t owner_;

  std::mutex turn_;  // held while the thread looks for a request, and answers one
  std::condition_variable changed_;
  std::atomic<bool> wanted_{false};  // somebody else waits for the turn
  bool closing_ = false;
  int64_t step_ = 0, base_ = 0, latest_ = 0;  // base_: 0 without a step
  bool late_ = false;                         // a request of the step was: nothing more is read
  std::vector<std::span<const int64_t>> rows_;
  std::shared_ptr<const Stripes> stripes_;
  std::vector<int32_t> taken_;  // for the latest request
  Served served_;
  std::vector<OverdueRead> overdue_;
  std::atomic<uint64_t> answered_{0};

  std::mutex lane_;  // of what follows
  std::condition_variable work_, done_;
  bool ends_ = false;
  std::optional<SlowRead> queued_, under_way_;
  bool awaited_ = false;  // by the thread
  std::vector<uint8_t> states_;
  std::vector<uint16_t> devices_;
  std::vector<int32_t> returned_;  // places of reads that nobody waited for

  std::thread thread_;
};

}  // namespace ssdkv
