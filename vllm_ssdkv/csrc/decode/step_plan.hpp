// What is the same in every layer of a step: its rows, where their blocks lie, and how they choose
// pages. Views of memory that the caller keeps alive and unchanged, but for the work space.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "attention/mean_value.hpp"
#include "attention/problem.hpp"
#include "attention/sparse.hpp"
#include "cache/page_cache.hpp"

namespace ssdkv::decode {

// Rows of queries over blocks, each of which stays at its place for the whole step: block i of a
// layer is at base + place[i] * step. Blocks in HBM are numbered by `place`; those in DRAM are at
// the addresses of their frames, a layer's part `base` bytes behind them.
struct PlacedBlocks {
  attention::Rows rows;
  std::int64_t count;
  const std::uint64_t* place;
  const std::int64_t* position;  // of the first token of each, in its request
};

// Pages that summaries rank, or tokens: the first `sinks`, then those of the largest weight. Tokens
// are chosen with the pages that they lie in, whose other tokens are left out.
struct ScoredPages {
  attention::PageRecord record;
  std::int64_t code_bits;        // 0 where the record has no codes
  std::int64_t channels;         // that are looked at; 0 where the record is not kChannels
  const std::uint64_t* records;  // [blocks]: addresses in layer 0
  std::int64_t layer_bytes;      // from a layer's records to those of the next one
  std::int64_t sinks;
  const std::int32_t* least;  // [rows]: for each KV head
  const std::int32_t* most;   // [rows]: likewise
  // Mass that window and pages are to cover, with no more than `most` of them and no fewer than
  // `least`; 0: there are `most`.
  double wanted;
  bool by_token;
  bool estimates;  // whether what is not chosen counts as its mean V
};

// Pages that are the same whatever a query asks.
struct ListedPages {
  const std::int32_t* pages;
  const std::int32_t* begin;  // [rows * kv_heads + 1]
};

// Some of the rows that choose, all of them alike.
struct ChoosingGroup {
  std::int64_t count;
  const std::int32_t* row;        // [count]: numbers of the rows, ascending
  const std::int32_t* row_begin;  // [count]: of their blocks
  const std::int32_t* row_end;
  const std::int32_t* window_tokens;  // [count]
  const std::int64_t* first_page;     // [count + 1], columns as in attention/scoring.hpp
  const std::int64_t* first_token;    // [count + 1], likewise, the window's tokens last
  const ScoredPages* scored;          // either this
  const ListedPages* listed;          // or this; the other is null
};

// Rows of one query each that choose pages of their contexts.
struct ChoosingRows {
  std::int64_t count;
  const std::int64_t* window;      // [rows]: their numbers among the rows of windows
  const std::int32_t* token;       // [rows]: their queries
  const std::int64_t* position;    // [rows]: of these, in their requests
  const std::int32_t* row_begin;   // [rows]: of their blocks
  const std::int64_t* first_page;  // [rows + 1], likewise
  std::int64_t blocks;
  const std::uint64_t* frame;  // [blocks]: addresses; 0: it has none
  // Blocks of one slot, which several rows may share, have one number; null: no slot is shared.
  const std::int32_t* slot;
  std::int64_t slots;
  std::vector<ChoosingGroup> groups;  // each row is in one
  // Where pages of blocks without a frame are looked up; null: all blocks have one.
  PageCache* cache;
  const std::int64_t* stored;  // [blocks]: slots of the store
  // Sums of V of the rows whose rest is estimated, and the place of each row; null: there are none.
  const attention::ValueSums* means;
  const std::int64_t* mean_place;  // [rows]
};

// Pages of each row and KV head, numbered from the start of the row's context, ascending.
struct ChosenPages {
  std::int64_t count;
  const std::int32_t* pages;
  const std::int32_t* begin;                 // [rows * kv_heads + 1]
  const std::uint8_t* token_mask = nullptr;  // [count][page_tokens]; null: all tokens
};

// Sums over the layers that have run. Pages in several lists of a layer count once in `framed`
// and `held`, which leave out the layers that somebody had to read for.
struct ChoiceTotals {
  std::int64_t lists = 0;          // a row, layer and KV head has one
  std::int64_t selected = 0;       // pages in them
  std::int64_t tokens = 0;         // of these, that are attended to
  std::int64_t context = 0;        // pages that there were to choose from
  std::int64_t framed = 0;         // pages in them that lie in frames
  std::int64_t held = 0;           // pages in them that the cache has
  std::int64_t unmet = 0;          // lists that have not the mass that was wanted
  std::int64_t channel_bytes = 0;  // of K in the channels that were looked at
  double missing = 0;              // softmax mass outside windows and lists, by estimate
};

// What a group of rows that choose by scores has chosen, and by which ones.
struct GroupWork {
  std::vector<float> weights;  // of pages; empty where tokens are chosen
  std::vector<float> window_mass;
  attention::ChosenColumns chosen;       // pages
  std::vector<std::uint8_t> token_mask;  // of these; empty: all tokens
  std::vector<float> alpha;  // [rows][query_heads], where the rest is estimated: SparQ's alpha
};

// Grows with the largest layer; its content lasts for one of them.
struct WorkSpace {
  std::vector<float> maximum, denominator, accumulator;
  std::vector<float> query, window_lse, logits, lse, scores, masses;
  std::vector<float> reduced, value, mean;
  std::vector<std::int32_t> channels, window_begin;
  std::vector<std::int64_t> first_token;
  std::vector<std::uint64_t> window;  // addresses of the windows' blocks
  std::vector<std::uint64_t> records, base, address;
  std::vector<std::int64_t> position;
  std::vector<std::uint64_t> seen;  // a bit for each page of a slot and layer
  std::vector<GroupWork> groups;
  std::vector<std::int32_t> pages, begin;  // lists of all groups together
  std::vector<std::uint8_t> token_mask;
  std::vector<float> mass;
  ChosenPages chosen{};       // of all rows
  std::int64_t attended = 0;  // pages of these that have been attended to
  // Pages without a frame: which of those chosen, and where they are looked up.
  std::vector<std::int32_t> outside;
  std::vector<std::int64_t> slots, numbers;
  std::vector<std::uint64_t> no_frame;
  std::optional<AskedPages> asked;  // what was taken for them, until somebody else owns it
};

struct StepPlan {
  attention::PageLayout hbm;   // of a block in HBM
  attention::PageLayout slot;  // of a layer's part of a slot
  std::int64_t header_bytes;   // of a slot, before its first layer
  std::int64_t tokens;         // queries of the step
  std::int64_t threads;
  const PlacedBlocks* window;
  // [layers]: contexts that are attended to whole.
  std::vector<const PlacedBlocks*> streamed;
  const ChoosingRows* choosing;       // null: nobody chooses
  std::vector<std::uint8_t> chooses;  // [layers]: whether they do in this layer
  ChoiceTotals totals;
  WorkSpace work;

  // Bytes of a slot before a layer's pages.
  std::int64_t layer_offset(std::int64_t layer) const {
    return header_bytes +
           layer * slot.kv_heads * (slot.block_tokens / slot.page_tokens) * slot.page_stride;
  }
};

}  // namespace ssdkv::decode
