// The calls behind the Python functions: they cut a call into tasks and run them on a team of
// threads. Arguments are checked by the bindings, not here. Every call blocks until done, may be
// made from any thread, and needs no GIL.
#pragma once

#include <cstdint>

#include "attention/problem.hpp"

namespace ssdkv::attention {

// Pages of a list per head that are attended to as one partial state, from the list's first page
// on. A list that is attended to in several calls gives the same bits if each call but the last has
// whole parts.
inline constexpr std::int64_t kSplitPages = 8;

void attend(const Kernels& kernels, const Problem& problem, std::int64_t rows,
            std::int64_t threads);

void finish(const Kernels& kernels, const Output& output, std::int64_t tokens,
            std::int64_t threads);

// States of an online softmax, one for each query and head, as Problem has them.
struct States {
  float* maximum;
  float* denominator;
  float* accumulator;
};
struct ConstStates {
  const float* maximum;
  const float* denominator;
  const float* accumulator;
};

// Folds `part`, over further keys, into `states`, on this thread.
void merge(const States& states, const ConstStates& part, std::int64_t count,
           std::int64_t head_size);

}  // namespace ssdkv::attention
