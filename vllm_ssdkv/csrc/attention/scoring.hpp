// Plain descriptions of what page selection computes. No code lives here, for the reason given in
// problem.hpp.
//
// Columns are what is scored: pages or tokens of a row. Row r has columns(r) = first_column[r + 1]
// - first_column[r] of them; a table with one line per head holds column c of head h of row r at
// first_column[r] * heads + h * columns(r) + c.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/codes.hpp"
#include "attention/problem.hpp"

namespace ssdkv::attention {

// What is kept of pages' K: of each page [2][head_size] numbers of its dtype, or of all pages of a
// head one record.
enum class PageRecord {
  kBounds,    // minimum, then maximum, of each channel
  kSpread,    // mean, then variance, of each channel
  kCodes,     // see codes.hpp
  kChannels,  // all of it, channel-major: scored token by token, by ChannelScoring
};

// Summaries of blocks that leave; all addresses are absolute, one per block, any of the
// targets may be null.
struct Summaries {
  PageLayout layout;
  const std::uint64_t* source;     // the layer's part of the block
  const std::uint64_t* bounds;     // [kv_heads][groups][2][head_size]: min, max over a page's K
  const std::uint64_t* spread;     // the same: mean, variance
  const std::uint64_t* channels;   // [kv_heads][head_size][block_tokens]: K
  const std::uint64_t* value_sum;  // float [kv_heads][head_size]: V summed over the tokens
  const std::uint64_t* codes;      // [kv_heads]: records of this shape
  CodeShape code_shape;
};

// Logits of queries [rows][query_heads][head_size] against the page records of their rows' blocks.
struct PageScoring {
  PageLayout layout;
  PageRecord kind;
  std::int64_t query_heads;
  const float* query;
  float scale;
  const std::int32_t* row_begin;  // [rows]: of the row's blocks
  const std::uint64_t* records;   // [blocks], as in Summaries
  const std::int64_t* first_column;
  float* logits;  // columns are the row's pages
  CodeShape codes;
};

// Approximate logits from some channels: the row's context from channel-major K, then its window
// from token-major blocks.
struct ChannelScoring {
  PageLayout layout;
  std::int64_t query_heads;
  std::int64_t count;            // channels per KV head
  const std::int32_t* channels;  // [rows][kv_heads][count]
  const float* query;            // [rows][query_heads][count]: those channels, scaled
  const std::int32_t* row_begin;
  const std::int32_t* row_end;
  // [blocks]: channel-major K, [kv_heads][held][block_tokens]; `place` says which of the `held`
  // channels each of `channels` is. All of them, as in Summaries, or those that were chosen.
  const std::uint64_t* base;
  std::int64_t held;
  const std::int32_t* place;  // [rows][kv_heads][count]
  const std::int32_t* window_begin;
  const std::uint64_t* window;        // [window blocks]: token-major
  const std::int32_t* window_tokens;  // [rows]
  const std::int64_t* first_column;
  float* logits;  // columns are the row's tokens
};

// Logits of the query heads of each KV head, turned into one weight per column.
struct Weighting {
  std::int64_t kv_heads;
  std::int64_t query_heads;
  const std::int64_t* first_column;
  const float* logits;
  float column_tokens;      // tokens that a column stands for
  const float* window_lse;  // [rows][query_heads], or null
  float* weights;           // per KV head
  float* window_mass;       // [rows][kv_heads]
  float* lse;               // [rows][query_heads]: of all that is weighed
};

// Approximate logits of tokens turned into scores and masses of context pages or tokens.
struct TokenScoring {
  std::int64_t kv_heads;
  std::int64_t query_heads;
  std::int64_t page_tokens;  // 1: a column of the result is a token
  const std::int64_t* first_token;
  const float* logits;               // columns are tokens, the window's last
  const std::int64_t* first_column;  // of the context's columns
  float* score;                      // per KV head: sum over query heads; of pages the mass
  float* mass;                       // per KV head: mean over query heads of softmax, page summed
  float* lse;                        // [rows][query_heads]
  float* window_mass;                // [rows][kv_heads]
};

// Softmax mass of chosen pages and of the window, by logits of tokens, the window's last; or by
// those of pages, as if these were single tokens.
struct Coverage {
  std::int64_t kv_heads;
  std::int64_t query_heads;
  std::int64_t page_tokens;  // columns of a page
  const std::int64_t* first_token;
  const std::int32_t* window_tokens;  // [rows]; null: columns have none of it
  const float* logits;
  const float* lse;  // [rows][query_heads]: of all tokens
  const std::int32_t* pages;
  const std::int32_t* begin;          // [rows * kv_heads + 1]
  const std::uint8_t* token_mask;     // [pages][page_tokens], or null
  float* alpha;                       // [rows][query_heads]
  float column_tokens = 1;            // tokens that a column stands for
  const float* window_lse = nullptr;  // [rows][query_heads], where columns have no window; or null
};

// Rows of some tokens of a block, and how far each lies along the direction in which they vary
// most, from their mean.
struct Projection {
  const float* rows;  // [tokens][width]
  std::int64_t width;
  const std::int32_t* members;  // [count]: tokens
  std::int64_t count;           // at least 1
  float* centred;               // [count][width], work space
  float* vectors;               // [2][width], likewise
  float* projections;           // [count]
};

// The entry points of one instruction set. Ranges are of what a task works on; `scratch` is
// 64-byte aligned and has the bytes stated.
struct SparseKernels {
  void (*page_record)(const PageLayout&, PageRecord kind, const std::byte* page, std::byte* to);
  // K of one head of a block, from its first page on, channel-major: [head_size][block_tokens].
  void (*channels)(const PageLayout&, const std::byte* pages, std::byte* to);
  // V of one head of a block, from its first page on, summed over the tokens: float [head_size].
  void (*value_sum)(const PageLayout&, const std::byte* pages, std::byte* to);
  // K of one head of a block, from its first page on, as rows [block_tokens][width] with zeros
  // behind each head's channels; width is a multiple of 16.
  void (*key_rows)(const PageLayout&, const std::byte* pages, std::int64_t width, float* rows);
  void (*project)(const Projection&);
  // K of one head of a block, from its first page on, as codes; encode_scratch() bytes.
  void (*encode)(const PageLayout&, const CodeShape&, const std::byte* pages, std::byte* scratch,
                 std::byte* record);
  // As page_logits, from codes of whole blocks; scoring_scratch() bytes.
  void (*code_logits)(const PageScoring&, std::int64_t row, std::int64_t head,
                      std::int64_t block_begin, std::int64_t block_end, std::byte* scratch);
  // 4 * group * (head_size + 15) bytes.
  void (*page_logits)(const PageScoring&, std::int64_t row, std::int64_t head,
                      std::int64_t page_begin, std::int64_t page_end, std::byte* scratch);
  void (*channel_logits)(const ChannelScoring&, std::int64_t row, std::int64_t head,
                         std::int64_t block_begin, std::int64_t block_end);
  // 4 * count * 64 bytes.
  void (*window_logits)(const ChannelScoring&, std::int64_t row, std::int64_t head,
                        std::byte* scratch);
  void (*weigh)(const Weighting&, std::int64_t row, std::int64_t head);
  void (*score_tokens)(const TokenScoring&, std::int64_t row, std::int64_t head);
  void (*cover)(const Coverage&, std::int64_t row, std::int64_t head);
};

}  // namespace ssdkv::attention
