#include "attention/token_order.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

namespace ssdkv::attention {
namespace {

// Splits that wait: at each depth of the tree the second half of one.
constexpr int kMaxDepth = 64;

// Work space of one block and head.
struct Space {
  float* centred;      // [tokens][width]
  float* vectors;      // [2][width]
  float* projections;  // [tokens]
  float* ranked;       // [tokens]
  std::int32_t* held;  // [tokens]

  Space(std::byte* scratch, std::int64_t tokens, std::int64_t width)
      : centred(reinterpret_cast<float*>(scratch)),
        vectors(centred + tokens * width),
        projections(vectors + 2 * width),
        ranked(projections + tokens),
        held(reinterpret_cast<std::int32_t*>(ranked + tokens)) {}
};

// Moves the `left` members of the smallest projections to the front, equal ones by place; both
// parts keep the order that their members have.
void partition(std::int32_t* members, std::int64_t count, std::int64_t left, const Space& space) {
  float* const keys = space.projections;
  for (std::int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(keys[i])) keys[i] = std::numeric_limits<float>::max();
  }
  std::copy(keys, keys + count, space.ranked);
  std::nth_element(space.ranked, space.ranked + left - 1, space.ranked + count);
  const float pivot = space.ranked[left - 1];
  std::int64_t ties = left;
  for (std::int64_t i = 0; i < count; ++i) ties -= keys[i] < pivot ? 1 : 0;
  std::int64_t front = 0;
  std::int64_t back = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const bool first = keys[i] < pivot || (keys[i] == pivot && ties-- > 0);
    if (first) {
      members[front++] = members[i];
    } else {
      space.held[back++] = members[i];
    }
  }
  std::copy(space.held, space.held + back, members + front);
}

}  // namespace

std::int64_t order_scratch_bytes(std::int64_t tokens, std::int64_t width) {
  return 4 * (tokens * width + 2 * width + 3 * tokens);
}

void order_tokens(const SparseKernels& kernels, const TokenRows& rows, std::int64_t kept,
                  std::byte* scratch, std::int32_t* order) {
  const Space space(scratch, rows.tokens, rows.width);
  std::iota(order, order + rows.tokens, 0);
  std::pair<std::int64_t, std::int64_t> waiting[kMaxDepth];  // pages [begin, end)
  int depth = 0;
  waiting[depth++] = {kept, rows.tokens / rows.page_tokens};
  while (depth > 0) {
    const auto [begin, end] = waiting[--depth];
    const std::int64_t pages = end - begin;
    if (pages < 2) continue;
    const std::int64_t left = pages - pages / 2;
    const std::int64_t count = pages * rows.page_tokens;
    std::int32_t* const members = order + begin * rows.page_tokens;
    kernels.project(
        {rows.rows, rows.width, members, count, space.centred, space.vectors, space.projections});
    partition(members, count, left * rows.page_tokens, space);
    waiting[depth++] = {begin + left, end};
    waiting[depth++] = {begin, begin + left};
  }
}

}  // namespace ssdkv::attention
