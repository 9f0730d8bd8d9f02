// Attention of one layer for all rows of a step: over windows in HBM, pages that are chosen now,
// and contexts that are attended to whole. All of it lies in memory, but for chosen pages, which
// somebody else may have to read. Needs no GIL. One thread at a time runs layers of a plan.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/clock.hpp"
#include "attention/problem.hpp"
#include "decode/page_table.hpp"
#include "decode/step_plan.hpp"

namespace ssdkv::decode {

// Operands that differ from layer to layer.
struct LayerOperands {
  std::int64_t layer;
  attention::Vectors query;
  attention::Vectors out;
  std::uint64_t cache;        // address of block 0 in HBM
  std::int64_t block_stride;  // bytes from a block to the next
  float scale;
  std::int64_t sliding_window;  // of the keys in HBM; attention::kUnbounded: all
  const float* sinks;           // [query_heads]: logits of attention sinks; null: there are none
  attention::LogitShape shape;
  float value_scale;          // of V as stored
  std::size_t room;           // distinct pages outside frames that may be taken
  const GuessedPages* guess;  // to be in memory when the layer ends; null: nothing is
};

// Some of the pages that were chosen, now in memory: KV head h of row r has those from begin[i] up
// to end[i], i = r * kv_heads + h.
struct BroughtPages {
  std::int64_t count;
  const std::uint64_t* address;
  const std::int64_t* position;
  const std::int32_t* begin;
  const std::int32_t* end;
  const std::uint8_t* token_mask;  // as of ChosenPages
};

// Runs a layer, writes `out`, and charges the clock. What was chosen lies in the plan until the
// next layer. Returns false where it ends before the chosen pages, because somebody has to read.
bool run_layer(StepPlan& plan, const LayerOperands& operands, attention::AttentionClock& clock);

// Goes on with such a layer, by as many calls as together have all pages that were chosen.
void resume(StepPlan& plan, const LayerOperands& operands, const BroughtPages& brought,
            attention::AttentionClock& clock);

}  // namespace ssdkv::decode
