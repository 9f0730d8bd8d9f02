#include "decode/choice.hpp"

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

}  // namespace

ChosenPages choose(StepPlan& plan, std::int64_t layer, const attention::Vectors& query, float scale,
                   const attention::State& state) {
  const ChoosingRows& rows = *plan.choosing;
  const std::int64_t lists = rows.count * plan.hbm.kv_heads;
  if (rows.listed != nullptr) {
    return {rows.listed->begin[lists], rows.listed->pages, rows.listed->begin};
  }
  const ScoredPages& scored = *rows.scored;
  const attention::Kernels& kernels = attention::active_kernels();
  WorkSpace& work = plan.work;
  const std::int64_t heads = query.heads, kv_heads = plan.hbm.kv_heads;
  const std::int64_t columns = rows.first_page[rows.count];
  float* const queries = sized(work.query, rows.count * heads * query.head_size);
  float* const seen = sized(work.window_lse, rows.count * heads);
  for (std::int64_t r = 0; r < rows.count; ++r) {
    kernels.widen(query, rows.token[r], queries + r * heads * query.head_size);
    attention::log_sum_exp(state, rows.token[r], seen + r * heads);
  }
  const std::int64_t offset = layer * scored.layer_bytes;
  std::uint64_t* const records = sized(work.records, static_cast<std::int64_t>(rows.blocks));
  for (std::int64_t i = 0; i < rows.blocks; ++i) {
    records[i] = scored.records[i] + static_cast<std::uint64_t>(offset);
  }

  attention::PageScoring scoring{};
  scoring.layout = plan.hbm;
  scoring.kind = scored.record;
  scoring.query_heads = heads;
  scoring.query = queries;
  scoring.scale = scale;
  scoring.row_begin = rows.row_begin;
  scoring.records = records;
  scoring.first_column = rows.first_page;
  scoring.logits = sized(work.logits, columns * heads);
  scoring.codes = attention::code_shape(plan.hbm, scored.code_bits);
  attention::score_pages(scoring, rows.count, plan.threads);

  const attention::Weighting weighting{kv_heads,
                                       heads,
                                       rows.first_page,
                                       scoring.logits,
                                       static_cast<float>(plan.hbm.page_tokens),
                                       seen,
                                       sized(work.weights, columns * kv_heads),
                                       sized(work.window_mass, lists),
                                       sized(work.lse, rows.count * heads)};
  attention::weigh_columns(weighting, rows.count, plan.threads);

  const attention::ColumnChoice choice{
      kv_heads,          scored.sinks,      scored.wanted > 0 ? scored.wanted : 1.0,
      scored.least,      scored.most,       rows.first_page,
      weighting.weights, weighting.weights, weighting.window_mass};
  work.chosen = attention::choose_columns(choice, rows.count, plan.threads);
  double missing = 0;
  for (const float mass : work.chosen.mass) {
    if (mass < 1.0F) missing += 1.0 - static_cast<double>(mass);
    plan.totals.unmet += mass < static_cast<float>(scored.wanted);
  }
  plan.totals.missing += missing;
  return {static_cast<std::int64_t>(work.chosen.columns.size()), work.chosen.columns.data(),
          work.chosen.begin.data()};
}

}  // namespace ssdkv::decode
