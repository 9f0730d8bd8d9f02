// Look-up of chosen pages: where each lies in DRAM.
#pragma once

#include <cstdint>

#include "decode/choice.hpp"
#include "decode/step_plan.hpp"

namespace ssdkv::decode {

// Writes address and position of each page to the plan's work space. Returns how many distinct
// pages there are.
std::int64_t look_up(StepPlan& plan, std::int64_t layer, const ChosenPages& chosen);

}  // namespace ssdkv::decode
