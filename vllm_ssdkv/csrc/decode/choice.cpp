#include "decode/choice.hpp"

#include <algorithm>
#include <cstddef>

#include "attention/attend.hpp"
#include "attention/isa.hpp"

namespace ssdkv::decode {
namespace {

template <typename T>
T* sized(std::vector<T>& values, std::int64_t count) {
  values.resize(static_cast<std::size_t>(count));
  return values.data();
}

// The layer's records of all blocks.
const std::uint64_t* records_of(StepPlan& plan, const ScoredPages& scored, std::int64_t layer) {
  const std::int64_t offset = layer * scored.layer_bytes;
  std::uint64_t* const records = sized(plan.work.records, plan.choosing->blocks);
  for (std::int64_t i = 0; i < plan.choosing->blocks; ++i) {
    records[i] = scored.records[i] + static_cast<std::uint64_t>(offset);
  }
  return records;
}

void choose_scored(StepPlan& plan, std::int64_t layer, const ChoosingGroup& group,
                   const attention::Vectors& query, float scale, const attention::State& state,
                   GroupWork& made) {
  const ScoredPages& scored = *group.scored;
  const attention::Kernels& kernels = attention::active_kernels();
  WorkSpace& work = plan.work;
  const std::int64_t heads = query.heads, kv_heads = plan.hbm.kv_heads;
  const std::int64_t columns = group.first_page[group.count];
  float* const queries = sized(work.query, group.count * heads * query.head_size);
  float* const seen = sized(work.window_lse, group.count * heads);
  for (std::int64_t r = 0; r < group.count; ++r) {
    const std::int32_t token = plan.choosing->token[group.row[r]];
    kernels.widen(query, token, queries + r * heads * query.head_size);
    attention::log_sum_exp(state, token, seen + r * heads);
  }

  attention::PageScoring scoring{};
  scoring.layout = plan.hbm;
  scoring.kind = scored.record;
  scoring.query_heads = heads;
  scoring.query = queries;
  scoring.scale = scale;
  scoring.row_begin = group.row_begin;
  scoring.records = records_of(plan, scored, layer);
  scoring.first_column = group.first_page;
  scoring.logits = sized(work.logits, columns * heads);
  scoring.codes = attention::code_shape(plan.hbm, scored.code_bits);
  attention::score_pages(scoring, group.count, plan.threads);

  const attention::Weighting weighting{kv_heads,
                                       heads,
                                       group.first_page,
                                       scoring.logits,
                                       static_cast<float>(plan.hbm.page_tokens),
                                       seen,
                                       sized(made.weights, columns * kv_heads),
                                       sized(made.window_mass, group.count * kv_heads),
                                       sized(work.lse, group.count * heads)};
  attention::weigh_columns(weighting, group.count, plan.threads);

  const attention::ColumnChoice choice{
      kv_heads,          scored.sinks,      scored.wanted > 0 ? scored.wanted : 1.0,
      scored.least,      scored.most,       group.first_page,
      weighting.weights, weighting.weights, weighting.window_mass};
  made.chosen = attention::choose_columns(choice, group.count, plan.threads);
  for (const float mass : made.chosen.mass) {
    plan.totals.unmet += mass < static_cast<float>(scored.wanted);
  }
}

ChosenPages pages_of(const ChoosingGroup& group, const GroupWork& made, std::int64_t lists) {
  if (group.listed != nullptr) {
    return {group.listed->begin[lists], group.listed->pages, group.listed->begin};
  }
  return {static_cast<std::int64_t>(made.chosen.columns.size()), made.chosen.columns.data(),
          made.chosen.begin.data()};
}

// The lists of all groups, row after row.
ChosenPages merge(StepPlan& plan) {
  const ChoosingRows& rows = *plan.choosing;
  const std::int64_t heads = plan.hbm.kv_heads;
  WorkSpace& work = plan.work;
  if (rows.groups.size() == 1) {
    return pages_of(rows.groups[0], work.groups[0], rows.count * heads);
  }
  const auto each = [&](const auto& visit) {  // list of all, list of the group, its pages
    for (std::size_t g = 0; g < rows.groups.size(); ++g) {
      const ChoosingGroup& group = rows.groups[g];
      const ChosenPages part = pages_of(group, work.groups[g], group.count * heads);
      for (std::int64_t list = 0; list < group.count * heads; ++list) {
        visit(group.row[list / heads] * heads + list % heads, list, part);
      }
    }
  };
  std::int32_t* const begin = sized(work.begin, rows.count * heads + 1);
  begin[0] = 0;
  each([&](std::int64_t to, std::int64_t list, const ChosenPages& part) {
    begin[to + 1] = part.begin[list + 1] - part.begin[list];
  });
  for (std::int64_t list = 0; list < rows.count * heads; ++list) begin[list + 1] += begin[list];
  std::int32_t* const pages = sized(work.pages, begin[rows.count * heads]);
  each([&](std::int64_t to, std::int64_t list, const ChosenPages& part) {
    std::copy(part.pages + part.begin[list], part.pages + part.begin[list + 1], pages + begin[to]);
  });
  return {begin[rows.count * heads], pages, begin};
}

// Added in the order of the rows, whatever the groups.
double missing_mass(StepPlan& plan) {
  const std::int64_t heads = plan.hbm.kv_heads;
  plan.work.mass.assign(static_cast<std::size_t>(plan.choosing->count * heads), 1.0F);
  for (std::size_t g = 0; g < plan.choosing->groups.size(); ++g) {
    const ChoosingGroup& group = plan.choosing->groups[g];
    if (group.scored == nullptr) continue;
    for (std::int64_t list = 0; list < group.count * heads; ++list) {
      plan.work.mass[static_cast<std::size_t>(group.row[list / heads] * heads + list % heads)] =
          plan.work.groups[g].chosen.mass[static_cast<std::size_t>(list)];
    }
  }
  double missing = 0;
  for (const float mass : plan.work.mass) {
    if (mass < 1.0F) missing += 1.0 - static_cast<double>(mass);
  }
  return missing;
}

}  // namespace

ChosenPages choose(StepPlan& plan, std::int64_t layer, const attention::Vectors& query, float scale,
                   const attention::State& state) {
  const std::vector<ChoosingGroup>& groups = plan.choosing->groups;
  plan.work.groups.resize(groups.size());
  for (std::size_t g = 0; g < groups.size(); ++g) {
    if (groups[g].scored == nullptr) continue;
    choose_scored(plan, layer, groups[g], query, scale, state, plan.work.groups[g]);
  }
  plan.totals.missing += missing_mass(plan);
  return merge(plan);
}

}  // namespace ssdkv::decode
