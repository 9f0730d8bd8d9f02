// Look-up of chosen pages: where each lies in DRAM.
#pragma once

#include <cstddef>
#include <cstdint>

#include "decode/step_plan.hpp"

namespace ssdkv::decode {

// Pages that some rows will probably choose in another layer.
struct GuessedPages {
  std::int64_t layer;
  std::int64_t count;       // of rows
  const std::int64_t* row;  // [count]: their numbers among those that choose
  ChosenPages lists;        // of these rows
};

// Writes address and position of each page that was chosen to the plan's work space. Takes places
// for pages without a frame, up to `room` distinct ones. Returns whether all lie in memory, none of
// them because it was read ahead, and all of `guess`, if any: else somebody has to read, for this
// layer or ahead. The places are the plan's until somebody takes `asked` out of its work space.
bool look_up(StepPlan& plan, std::int64_t layer, std::size_t room, const GuessedPages* guess);

// Gives back the places that are the plan's. Pages that nobody has read are nobody's then.
void give_back(StepPlan& plan);

}  // namespace ssdkv::decode
