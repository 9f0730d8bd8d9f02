#include "decode/layer_run.hpp"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <vector>

#include "attention/attend.hpp"
#include "attention/isa.hpp"
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

void attend_pages(StepPlan& plan, const LayerOperands& o, const BroughtPages& brought) {
  const ChoosingRows& rows = *plan.choosing;
  const std::vector<std::int32_t> ones(static_cast<std::size_t>(rows.count), 1);
  attention::Problem problem = problem_of(plan, o);
  problem.layout = plan.slot;
  problem.layout.block_tokens = plan.slot.page_tokens;
  problem.rows = {rows.count,    rows.token,  ones.data(), rows.position,
                  brought.begin, brought.end, true};
  problem.pages = {brought.count, brought.address, brought.position, nullptr};
  attention::attend(attention::active_kernels(), problem, plan.threads);
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
  const PlacedBlocks& contexts = *plan.streamed[static_cast<std::size_t>(o.layer)];
  if (contexts.count > 0) {
    attention::Problem streamed = problem_of(plan, o);
    streamed.layout = plan.slot;
    attend_blocks(plan, contexts, streamed, static_cast<std::uint64_t>(plan.layer_offset(o.layer)),
                  1);
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
  attend_blocks(plan, *plan.window, window, o.cache, static_cast<std::uint64_t>(o.block_stride));
  clock.lap(Part::kAttend);

  WorkSpace& work = plan.work;
  work.chosen = {};
  if (plan.choosing != nullptr && plan.chooses[static_cast<std::size_t>(o.layer)] != 0) {
    work.chosen = choose(plan, o.layer, o.query, o.scale, state);
    clock.lap(Part::kSelect);
    ChoiceTotals& totals = plan.totals;
    totals.lists += plan.choosing->count * plan.hbm.kv_heads;
    totals.selected += work.chosen.count;
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
                  work.chosen.begin + 1});
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
