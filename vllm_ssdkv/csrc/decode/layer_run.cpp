#include "decode/layer_run.hpp"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <vector>

#include "attention/attend.hpp"
#include "attention/isa.hpp"
#include "decode/page_table.hpp"

namespace ssdkv::decode {
namespace {

using Part = attention::AttentionClock::Part;

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
  return {plan.tokens,         o.query.heads,           plan.hbm.head_size,
          work.maximum.data(), work.denominator.data(), work.accumulator.data()};
}

// Attends to blocks of the layout of `problem`, at base + place * step.
void attend_blocks(StepPlan& plan, const PlacedBlocks& blocks, attention::Problem problem,
                   std::uint64_t base, std::uint64_t step) {
  std::vector<std::uint64_t>& address = plan.work.base;
  address.resize(static_cast<std::size_t>(blocks.count));
  for (std::size_t i = 0; i < address.size(); ++i) address[i] = base + blocks.place[i] * step;
  problem.rows = blocks.rows;
  problem.pages = {blocks.count, address.data(), blocks.position, nullptr};
  attention::attend(attention::active_kernels(), problem, plan.threads);
}

// Attends to the pages that look_up() has found.
void attend_pages(StepPlan& plan, const ChosenPages& chosen, attention::Problem problem) {
  const ChoosingRows& rows = *plan.choosing;
  const std::vector<std::int32_t> ones(static_cast<std::size_t>(rows.count), 1);
  problem.layout = plan.slot;
  problem.layout.block_tokens = plan.slot.page_tokens;
  problem.rows = {rows.count,   rows.token,       ones.data(), rows.position,
                  chosen.begin, chosen.begin + 1, true};
  problem.pages = {chosen.count, plan.work.address.data(), plan.work.position.data(), nullptr};
  attention::attend(attention::active_kernels(), problem, plan.threads);
}

}  // namespace

ChosenPages run_layer(StepPlan& plan, const LayerOperands& o, attention::AttentionClock& clock) {
  clock.start();
  const attention::State state = empty_state(plan, o);
  const attention::Problem problem{plan.hbm, state, {}, {}, o.query, o.scale};
  attention::Problem window = problem;
  window.sliding_window = o.sliding_window;
  attend_blocks(plan, *plan.window, window, o.cache, static_cast<std::uint64_t>(o.block_stride));
  clock.lap(Part::kAttend);

  const auto layer = static_cast<std::size_t>(o.layer);
  ChosenPages chosen{};
  if (plan.choosing != nullptr && plan.chooses[layer] != 0) {
    chosen = choose(plan, o.layer, o.query, o.scale, state);
    clock.lap(Part::kSelect);
    ChoiceTotals& totals = plan.totals;
    totals.framed += look_up(plan, o.layer, chosen);
    totals.lists += plan.choosing->count * plan.hbm.kv_heads;
    totals.selected += chosen.count;
    totals.context += plan.choosing->first_page[plan.choosing->count] * plan.hbm.kv_heads;
    clock.lap(Part::kFetch);
    attend_pages(plan, chosen, problem);
    clock.lap(Part::kAttend);
  }

  const PlacedBlocks& contexts = *plan.streamed[layer];
  if (contexts.count > 0) {
    attention::Problem streamed = problem;
    streamed.layout = plan.slot;
    attend_blocks(plan, contexts, streamed, static_cast<std::uint64_t>(plan.layer_offset(o.layer)),
                  1);
    clock.lap(Part::kAttend);
  }
  attention::finish(attention::active_kernels(), {state, o.out, nullptr}, plan.threads);
  clock.lap(Part::kMerge);
  return chosen;
}

}  // namespace ssdkv::decode
