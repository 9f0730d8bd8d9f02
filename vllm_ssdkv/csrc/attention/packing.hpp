// Complete blocks of all layers, copied to slots, and what selectors must know of them.
#pragma once

#include <cstdint>

#include "attention/problem.hpp"
#include "attention/scoring.hpp"

namespace ssdkv::attention {

// A slot's pages lie `page_bytes` apart: pages of K and V ordered layer, head, group, and in its
// tail, which may be elsewhere, summary pages, then channel pages ordered layer. Summary and
// channel pages hold one stretch of bytes each (the channel pages of each layer one), cut into as
// many bytes as a page's K and V take. Summaries are records of as many bytes as a token's K and V
// take, ordered layer: with channel pages the sums of V of the layer's heads; without, records of
// its pages and, if wanted, the sums of V. Codes are one record of each head, of their own size.
// See docs/format.md.
//
// A row of the table of summaries holds the same without padding: summaries, and at `channels` the
// channels of each layer, if they are wanted.
//
// Where tokens are ordered, each head's go into its pages by likeness (token_order.hpp) before
// anything is made of them.
struct Packing {
  PageLayout layout;  // of the blocks
  std::int64_t layers;
  std::int64_t first_layer;  // number of the first of these layers in the slot
  std::int64_t blocks;
  const std::uint64_t* source;  // [layers][blocks]: address of the layer's part of the block
  const std::uint64_t* pages;   // [blocks]: address of these layers' first page; null: tails only
  const std::uint64_t* tail;    // [blocks]: address of the slot's tail, or of its row; 0: none
  std::int64_t page_bytes;
  std::int64_t tail_stride;   // from a payload of the tail to the next one
  std::int64_t channels;      // byte of the tail with the first layer's channels; -1: not wanted
  std::int64_t channel_step;  // bytes to those of the next layer
  bool row;                   // of the table: bytes that nothing is written to stay as they are
  std::int64_t summary_pages;
  std::int64_t channel_pages;     // of each layer; 0: summaries are records of pages
  PageRecord record;              // of a page, or of codes
  CodeShape codes;                // where it is of codes
  bool value_sums;                // behind the records of a layer's pages
  const std::uint8_t* ordered;    // [layers]: 1 where tokens are ordered; null: nowhere
  const std::int32_t* kept;       // [blocks]: first pages of each head that keep their tokens
  const std::uint64_t* features;  // [layers][blocks]: address of float [kv_heads][block_tokens]
                                  // [feature_width], by which tokens are alike; 0, null: by K
  std::int64_t feature_width;     // a multiple of 16
};

// Bytes that nothing is written to are zeroed: behind K and V in their pages and, but in rows,
// behind the last record and channel in the payload of theirs. Blocks until done, may be called
// from any thread, and needs no GIL. The same call writes the same bytes whatever the number of
// threads.
void pack_summarized(const Packing& packing, std::int64_t threads);

}  // namespace ssdkv::attention
