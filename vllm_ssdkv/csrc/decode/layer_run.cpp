#include "decode/layer_run.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <vector>

#include "attention/attend.hpp"
#include "attention/isa.hpp"
#include "attention/mean_value.hpp"
#include "decode/choice.hpp"
#include "decode/page_table.hpp"

namespace ssdkv::decode {
namespace {

using Part = attention::AttentionClock::Part;

attention::State state_of(StepPlan& plan, const LayerOperands& o) {
  WorkSpace& work = plan.work;
  return {plan.tokens,
          o.query.heads,
          plan.hbm.head_size,
          work.maximum.data(),
          work.denominator.data(),
          work.accumulator.data(),
          o.shape,
          o.value_scale};
}

// State of the step's queries that have seen no key but the sinks of their heads.
attention::State empty_state(StepPlan& plan, const LayerOperands& o) {
  WorkSpace& work = plan.work;
  const auto heads = static_cast<std::size_t>(o.query.heads);
  const auto queries = static_cast<std::size_t>(plan.tokens) * heads;
  const auto head_size = static_cast<std::size_t>(plan.hbm.head_size);
  if (o.sinks == nullptr) {
    work.maximum.assign(queries, -std::numeric_limits<float>::infinity());
    work.denominator.assign(queries, 0.0F);
  } else {
    work.maximum.resize(queries);
    for (std::size_t i = 0; i < queries; ++i) work.maximum[i] = o.sinks[i % heads];
    work.denominator.assign(queries, 1.0F);
  }
  work.accumulator.assign(queries * head_size, 0.0F);
  return state_of(plan, o);
}

attention::Problem problem_of(StepPlan& plan, const LayerOperands& o) {
  return {plan.hbm, state_of(plan, o), {}, {}, o.query, o.scale};
}

// Attends to blocks of the layout of `problem`, at base + place * step; writes their addresses.
void attend_blocks(const StepPlan& plan, const PlacedBlocks& blocks, attention::Problem problem,
                   std::uint64_t base, std::uint64_t step, std::vector<std::uint64_t>& address) {
  address.resize(static_cast<std::size_t>(blocks.count));
  for (std::size_t i = 0; i < address.size(); ++i) address[i] = base + blocks.place[i] * step;
  problem.rows = blocks.rows;
  problem.pages = {blocks.count, address.data(), blocks.position, nullptr};
  attention::attend(attention::active_kernels(), problem, plan.threads);
}

void attend_pages(StepPlan& plan, const LayerOperands& o, const BroughtPages& brought) {
  const ChoosingRows& rows = *plan.choosing;
  const std::vector<std::int32_t> ones(static_cast<std::size_t>(rows.count), 1);
  attention::Problem problem = problem_of(plan, o);
  problem.layout = plan.slot;
  problem.layout.block_tokens = plan.slot.page_tokens;
  problem.rows = {rows.count,    rows.token,  ones.data(), rows.position,
                  brought.begin, brought.end, true};
  problem.pages = {brought.count, brought.address, brought.position, brought.token_mask};
  attention::attend(attention::active_kernels(), problem, plan.threads);
}

bool chooses(const StepPlan& plan, std::int64_t layer) {
  return plan.choosing != nullptr && plan.chooses[static_cast<std::size_t>(layer)] != 0;
}

// V of a row's query token, [kv_heads][head_size], from the last block of the row's window.
void newest_value(const StepPlan& plan, std::int64_t row, float* to) {
  const attention::PageLayout& layout = plan.hbm;
  const std::int64_t token = plan.choosing->position[row] % layout.block_tokens;
  const std::int64_t item = attention::item_bytes(layout.dtype);
  const std::int64_t vector = layout.head_size * item;
  const std::int64_t page = token / layout.page_tokens * layout.page_stride +
                            (layout.page_tokens + token % layout.page_tokens) * vector;
  const std::int32_t last = plan.window->rows.end[plan.choosing->window[row]] - 1;
  auto* const block =
      reinterpret_cast<std::byte*>(plan.work.window[static_cast<std::size_t>(last)]);
  // Each KV head is one that has a token for itself.
  const attention::Vectors values{block + page,
                                  layout.dtype,
                                  layout.block_tokens / layout.page_tokens * layout.page_stride,
                                  layout.kv_heads,
                                  1,
                                  layout.head_size};
  for (std::int64_t head = 0; head < layout.kv_heads; ++head) {
    attention::active_kernels().widen(values, head, to + head * layout.head_size);
  }
}

// Mixes outputs with the mean V of what their rows have not chosen.
void estimate_rest(StepPlan& plan, const LayerOperands& o) {
  const ChoosingRows& rows = *plan.choosing;
  const attention::State state = state_of(plan, o);
  WorkSpace& work = plan.work;
  work.value.resize(static_cast<std::size_t>(plan.hbm.kv_heads * plan.hbm.head_size));
  work.mean.resize(work.value.size());
  for (std::size_t g = 0; g < rows.groups.size(); ++g) {
    const ChoosingGroup& group = rows.groups[g];
    if (group.scored == nullptr || !group.scored->estimates) continue;
    const bool of_tokens = group.scored->record == attention::PageRecord::kChannels;
    for (std::int64_t r = 0; r < group.count; ++r) {
      const float* const alpha = work.groups[g].alpha.data() + r * o.query.heads;
      if (std::any_of(alpha, alpha + o.query.heads, [](float x) { return std::isnan(x); }))
        continue;
      const std::int64_t row = group.row[r];
      newest_value(plan, row, work.value.data());
      attention::add_value(*rows.means, rows.mean_place[row], o.layer, rows.position[row],
                           work.value.data(), work.mean.data());
      // Masses by logits of pages count the sinks already: their windows' log-sum-exp has them.
      attention::compensate(state, rows.token[row], plan.hbm.kv_heads, alpha, work.mean.data(),
                            of_tokens ? o.sinks : nullptr);
    }
  }
}

// Tokens that are attended to.
std::int64_t tokens_of(const StepPlan& plan, const ChosenPages& chosen) {
  const std::int64_t tokens = chosen.count * plan.hbm.page_tokens;
  if (chosen.token_mask == nullptr) return tokens;
  return std::accumulate(chosen.token_mask, chosen.token_mask + tokens, std::int64_t{0});
}

// Gives back the places of a layer's pages.
struct Lease {
  explicit Lease(StepPlan& of) : plan(of) {}
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  ~Lease() { give_back(plan); }

  StepPlan& plan;
};

// All behind the chosen pages.
void end_layer(StepPlan& plan, const LayerOperands& o, attention::AttentionClock& clock) {
  if (chooses(plan, o.layer) && plan.choosing->means != nullptr) {
    estimate_rest(plan, o);
    clock.lap(Part::kMerge);
  }
  const PlacedBlocks& contexts = *plan.streamed[static_cast<std::size_t>(o.layer)];
  if (contexts.count > 0) {
    attention::Problem streamed = problem_of(plan, o);
    streamed.layout = plan.slot;
    attend_blocks(plan, contexts, streamed, static_cast<std::uint64_t>(plan.layer_offset(o.layer)),
                  1, plan.work.base);
    clock.lap(Part::kAttend);
  }
  attention::finish(attention::active_kernels(), {state_of(plan, o), o.out, nullptr}, plan.threads);
  clock.lap(Part::kMerge);
}

}  // namespace

bool run_layer(StepPlan& plan, const LayerOperands& o, attention::AttentionClock& clock) {
  clock.start();
  const attention::State state = empty_state(plan, o);
  attention::Problem window = problem_of(plan, o);
  window.sliding_window = o.sliding_window;
  WorkSpace& work = plan.work;
  attend_blocks(plan, *plan.window, window, o.cache, static_cast<std::uint64_t>(o.block_stride),
                work.window);
  clock.lap(Part::kAttend);

  work.chosen = {};
  if (chooses(plan, o.layer)) {
    work.chosen = choose(plan, o.layer, o.query, o.scale, state);
    clock.lap(Part::kSelect);
    ChoiceTotals& totals = plan.totals;
    totals.lists += plan.choosing->count * plan.hbm.kv_heads;
    totals.selected += work.chosen.count;
    totals.tokens += tokens_of(plan, work.chosen);
    totals.context += plan.choosing->first_page[plan.choosing->count] * plan.hbm.kv_heads;
    const bool here = look_up(plan, o.layer, o.room, o.guess);
    clock.lap(Part::kFetch);
    if (!here) {
      work.attended = 0;
      return false;
    }
    const Lease lease(plan);
    attend_pages(plan, o,
                 {work.chosen.count, work.address.data(), work.position.data(), work.chosen.begin,
                  work.chosen.begin + 1, work.chosen.token_mask});
    clock.lap(Part::kAttend);
  }
  end_layer(plan, o, clock);
  return true;
}

void resume(StepPlan& plan, const LayerOperands& o, const BroughtPages& brought,
            attention::AttentionClock& clock) {
  attend_pages(plan, o, brought);
  clock.lap(Part::kAttend);
  plan.work.attended += brought.count;
  if (plan.work.attended == plan.work.chosen.count) end_layer(plan, o, clock);
}

}  // namespace ssdkv::decode
