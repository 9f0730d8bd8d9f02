// Choice of a layer's pages: from queries and summaries to lists of pages.
#pragma once

#include <cstdint>

#include "attention/problem.hpp"
#include "decode/step_plan.hpp"

namespace ssdkv::decode {

// The pages that the plan's rows choose in a layer. `state` has seen their windows, whose blocks
// are at the addresses in the plan's work space. What is returned lies in the plan, until the next
// layer.
ChosenPages choose(StepPlan& plan, std::int64_t layer, const attention::Vectors& query, float scale,
                   const attention::State& state);

}  // namespace ssdkv::decode
