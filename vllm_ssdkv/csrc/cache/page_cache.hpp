// Single pages by place of the page cache. Tables only: the bytes lie in the arena,
// which this class never looks at.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <vector>

#include "cache/page_order.hpp"

namespace ssdkv {

inline constexpr int32_t kNoPlace = -1;

// Pages that a step asked for. *Entries* are distinct pages that lie in no frame: `held` ones that
// have a place, then those to be read, ascending, as far as there was room.
struct AskedPages {
  std::vector<int32_t> which;   // entry of each page asked for; kNoPlace: it lies in a frame
  std::vector<int64_t> keys;    // of each entry
  std::vector<int32_t> places;  // of each entry, taken; kNoPlace: there was no room
  size_t held = 0;
  size_t framed = 0;  // distinct pages that lie in frames
  size_t coming = 0;  // of those held, the ones that are being read for somebody else
  size_t guessed =
      0;  // of those held, the ones that were read ahead and are asked for now at first
};

struct FoundPages {
  std::vector<uint64_t> address;  // absolute; 0 where the page did not come
  std::vector<uint8_t> here;      // whether it did
};

struct PageLayout {
  uint64_t address;       // of the first place
  uint64_t page_bytes;    // from one place to the next, and from one page of a slot to the next
  uint64_t header_bytes;  // of a slot, before its first page
};

// A place is free, holds a page, or one is *coming*: it is being read. It is *taken* by all who use
// it, and by its read; the places of others may be given away. A *closed* one is out of use. Not
// thread-safe. Time of a call grows with the pages it is about.
//
// Throws std::out_of_range for slots, pages and places that do not exist, and changes nothing then.
class PageCache {
 public:
  PageCache(const PageLayout& layout, size_t places, size_t slots, size_t pages, PagePolicy policy);

  size_t places() const { return table_.size(); }
  int64_t key(int64_t slot, int64_t page) const { return slot * pages_ + page; }

  // Pages (slot, number within the slot) that queries need; `frames` is not 0 where the slot's
  // frame is borrowed. Held pages are taken, and places for the others.
  AskedPages acquire(std::span<const int64_t> slots, std::span<const int64_t> pages,
                     std::span<const uint64_t> frames);

  // Pages that queries may soon need: of those without a place up to `limit` get one, as many for
  // each list of pages begin[i] .. begin[i + 1] as for the others, as long as it has any. Nothing
  // that is held is touched. Entries are those to be read alone, all with a place. A page in
  // several lists counts once. If `devices`, of each page, is not empty, device d reads quota[d] at
  // most.
  AskedPages prefetch(std::span<const int64_t> slots, std::span<const int64_t> pages,
                      std::span<const uint64_t> frames, std::span<const int32_t> begin,
                      size_t limit, std::span<const uint16_t> devices,
                      std::span<const int64_t> quota);

  // Reads into taken places have ended: where they are `good` the place holds its page from now on,
  // elsewhere it is nobody's. They stay taken.
  void complete(std::span<const int64_t> keys, std::span<const int32_t> places,
                std::span<const uint8_t> good, std::span<const uint16_t> devices);

  // Places of the pages that acquire() answered, after their reads have ended.
  FoundPages find(std::span<const int64_t> pages, std::span<const uint64_t> frames,
                  std::span<const int32_t> which, std::span<const int64_t> keys,
                  std::span<const int32_t> places) const;

  // Mask of these pages that are held; they stay as they are.
  std::vector<uint8_t> holds(std::span<const int64_t> slots, std::span<const int64_t> pages) const;

  // One call per use; kNoPlace is skipped.
  void release(std::span<const int32_t> places);
  void forget(std::span<const int64_t> slots);
  void step(std::span<const double> costs) { order_->step(costs); }

  // Runs of `length` places, one from each of `firsts`. close() takes those out of use that nobody
  // has taken, whatever they hold, and says which these are; open() gives closed ones back.
  // held_in() counts the pages of each, -1 where a place is taken.
  std::vector<uint8_t> close(std::span<const int32_t> firsts, int32_t length);
  void open(std::span<const int32_t> firsts, int32_t length);
  std::vector<int32_t> held_in(std::span<const int32_t> firsts, int32_t length) const;

  size_t held() const { return held_; }
  size_t taken() const { return taken_; }
  size_t closed() const { return closed_; }
  uint64_t evictions() const { return evictions_; }  // pages that made room for others
  uint64_t asked() const { return asked_; }          // entries of all answers of acquire()

 private:
  struct Place {
    int64_t key = -1;
    int32_t users = 0;
    int32_t entry = 0;  // in the answer of the call `stamp`
    uint64_t stamp = 0;
    bool coming = false;
    bool guessed = false;
    bool closed = false;
    bool listed = false;  // in free_, where closed ones stay until their turn comes
  };
  struct Missing {
    int64_t key;
    int32_t asked;  // index of the page asked for
    int32_t rank;   // within its list
  };
  struct Free {
    void operator()(int32_t* memory) const { std::free(memory); }
  };

  Place& at(int32_t place) { return table_[static_cast<size_t>(place)]; }
  const Place& at(int32_t place) const { return table_[static_cast<size_t>(place)]; }
  int32_t& place_of(int64_t key) { return place_of_[static_cast<size_t>(key)]; }
  void check(std::span<const int64_t> slots, std::span<const int64_t> pages) const;
  void check(std::span<const int64_t> slots, std::span<const int64_t> pages,
             std::span<const uint64_t> frames) const;
  void check_places(std::span<const int32_t> places) const;
  void check_runs(std::span<const int32_t> firsts, int32_t length) const;
  void use(int32_t place);
  void list(int32_t place);  // it is free
  void drop(int32_t place);  // it holds nothing any more
  std::vector<int32_t> take(size_t count);
  void bring(AskedPages& asked, bool guessed);  // places for the entries from `held` on
  size_t count_framed(std::vector<int64_t> keys) const;

  const PageLayout layout_;
  const int64_t slots_;
  const int64_t pages_;
  std::vector<Place> table_;
  // Place + 1 of each page of the store; the system gives memory only to what is written.
  std::unique_ptr<int32_t[], Free> place_of_;
  std::unique_ptr<PageOrder> order_;  // of places that nobody uses, free ones apart
  std::vector<int32_t> free_;
  uint64_t stamp_ = 0;
  size_t held_ = 0;
  size_t taken_ = 0;
  size_t closed_ = 0;
  uint64_t evictions_ = 0;
  uint64_t asked_ = 0;
};

}  // namespace ssdkv
