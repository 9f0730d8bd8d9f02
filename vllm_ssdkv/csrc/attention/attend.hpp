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

void attend(const Kernels& kernels, const Problem& problem, std::int64_t threads);

void finish(const Kernels& kernels, const Output& output, std::int64_t threads);

// Log-sum-exp of the logits that a query token has seen, [query_heads]; -inf where it saw no key.
void log_sum_exp(const State& state, std::int64_t token, float* to);

// Folds `part`, of the same queries over further keys, into `state`, on this thread.
void merge(const State& state, const State& part);

}  // namespace ssdkv::attention
