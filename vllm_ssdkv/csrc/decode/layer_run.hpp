// Attention of one layer for all rows of a step: over windows in HBM, pages that are chosen now,
// and contexts that are attended to whole, all of which lie in memory. Needs no GIL. One thread at
// a time runs layers of a plan.
#pragma once

#include <cstdint>

#include "attention/clock.hpp"
#include "attention/problem.hpp"
#include "decode/choice.hpp"
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
};

// Runs a layer, writes `out`, and charges the clock. Returns what was chosen, which lies in the
// plan until the next layer; nothing where nobody chooses.
ChosenPages run_layer(StepPlan& plan, const LayerOperands& operands,
                      attention::AttentionClock& clock);

}  // namespace ssdkv::decode
