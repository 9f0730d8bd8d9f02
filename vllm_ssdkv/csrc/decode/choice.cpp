#include "decode/choice.hpp"

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "attention/attend.hpp"
#include "attention/isa.hpp"

namespace ssdkv::decode {
namespace {

template <typename T>
T* sized(std::vector<T>& values, std::int64_t count) {
  values.resize(static_cast<std::size_t>(count));
  return values.data();
}

// Some rows of a layer that choose by scores.
struct Asking {
  StepPlan& plan;
  std::int64_t layer;
  const ChoosingGroup& group;
  const ScoredPages& scored;
  float scale;
  const attention::State& state;
  std::int64_t heads;   // of queries
  const float* query;   // [rows][heads][head_size]
  const float* seen;    // [rows][heads]: log-sum-exp of the windows, where records are scored
  const float* logits;  // of all columns
  GroupWork& made;
};

// Columns that are ranked, their scores and masses.
struct Ranking {
  const std::int64_t* first_column;
  const float* score;
  const float* mass;
};

// The layer's records of all blocks.
const std::uint64_t* records_of(const Asking& a) {
  const std::int64_t offset = a.layer * a.scored.layer_bytes;
  const std::int64_t blocks = a.plan.choosing->blocks;
  std::uint64_t* const records = sized(a.plan.work.records, blocks);
  for (std::int64_t i = 0; i < blocks; ++i) {
    records[i] = a.scored.records[i] + static_cast<std::uint64_t>(offset);
  }
  return records;
}

// Scores pages by the logits of their records.
Ranking score_records(Asking& a) {
  const attention::PageLayout& layout = a.plan.hbm;
  WorkSpace& work = a.plan.work;
  const std::int64_t rows = a.group.count, columns = a.group.first_page[rows];
  float* const seen = sized(work.window_lse, rows * a.heads);
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int32_t token = a.plan.choosing->token[a.group.row[r]];
    attention::log_sum_exp(a.state, token, seen + r * a.heads);
  }
  a.seen = seen;
  attention::PageScoring scoring{};
  scoring.layout = layout;
  scoring.kind = a.scored.record;
  scoring.query_heads = a.heads;
  scoring.query = a.query;
  scoring.scale = a.scale;
  scoring.row_begin = a.group.row_begin;
  scoring.records = records_of(a);
  scoring.first_column = a.group.first_page;
  scoring.logits = sized(work.logits, columns * a.heads);
  scoring.codes = attention::code_shape(layout, a.scored.code_bits);
  attention::score_pages(scoring, rows, a.plan.threads);
  a.logits = scoring.logits;

  const attention::Weighting weighting{layout.kv_heads,
                                       a.heads,
                                       a.group.first_page,
                                       scoring.logits,
                                       static_cast<float>(layout.page_tokens),
                                       a.seen,
                                       sized(a.made.weights, columns * layout.kv_heads),
                                       sized(a.made.window_mass, rows * layout.kv_heads),
                                       sized(work.lse, rows * a.heads)};
  attention::weigh_columns(weighting, rows, a.plan.threads);
  return {a.group.first_page, weighting.weights, weighting.weights};
}

// Logits of all tokens by the channels in which the queries are largest.
void score_channels(Asking& a) {
  const attention::PageLayout& layout = a.plan.hbm;
  WorkSpace& work = a.plan.work;
  const std::int64_t rows = a.group.count, count = a.scored.channels;
  const attention::ChannelChoice chosen{layout.kv_heads,
                                        a.heads,
                                        layout.head_size,
                                        count,
                                        a.scale,
                                        a.query,
                                        sized(work.channels, rows * layout.kv_heads * count),
                                        sized(work.reduced, rows * a.heads * count)};
  attention::choose_channels(chosen, rows);
  std::int32_t* const window_begin = sized(work.window_begin, rows);
  for (std::int64_t r = 0; r < rows; ++r) {
    window_begin[r] = a.plan.window->rows.begin[a.plan.choosing->window[a.group.row[r]]];
  }
  attention::ChannelScoring scoring{};
  scoring.layout = layout;
  scoring.query_heads = a.heads;
  scoring.count = count;
  scoring.channels = chosen.channels;
  scoring.query = chosen.reduced;
  scoring.row_begin = a.group.row_begin;
  scoring.row_end = a.group.row_end;
  scoring.base = records_of(a);
  scoring.held = layout.head_size;
  scoring.place = chosen.channels;
  scoring.window_begin = window_begin;
  scoring.window = work.window.data();
  scoring.window_tokens = a.group.window_tokens;
  scoring.first_column = a.group.first_token;
  scoring.logits = sized(work.logits, a.group.first_token[rows] * a.heads);
  attention::score_channels(scoring, rows, a.plan.threads);
  a.logits = scoring.logits;
  a.plan.totals.channel_bytes += a.group.first_page[rows] * layout.page_tokens * count *
                                 layout.kv_heads * attention::item_bytes(layout.dtype);
}

// Scores pages, or tokens, by the logits of tokens.
Ranking score_tokens(Asking& a) {
  const attention::PageLayout& layout = a.plan.hbm;
  WorkSpace& work = a.plan.work;
  const std::int64_t rows = a.group.count;
  const bool by_token = a.scored.by_token;
  const std::int64_t* first = a.group.first_page;
  if (by_token) {
    std::int64_t* const tokens = sized(work.first_token, rows + 1);
    for (std::int64_t r = 0; r <= rows; ++r) tokens[r] = first[r] * layout.page_tokens;
    first = tokens;
  }
  const std::int64_t size = first[rows] * layout.kv_heads;
  a.made.weights.clear();
  float* const score = sized(by_token ? work.scores : a.made.weights, size);
  const attention::TokenScoring scoring{layout.kv_heads,
                                        a.heads,
                                        by_token ? 1 : layout.page_tokens,
                                        a.group.first_token,
                                        a.logits,
                                        first,
                                        score,
                                        by_token ? sized(work.masses, size) : score,
                                        sized(work.lse, rows * a.heads),
                                        sized(a.made.window_mass, rows * layout.kv_heads)};
  attention::score_tokens(scoring, rows, a.plan.threads);
  return {first, scoring.score, scoring.mass};
}

// In place of tokens, the pages that hold them, and which of their tokens these are.
void gather_pages(GroupWork& made, std::int64_t page_tokens) {
  const attention::ChosenColumns tokens = std::move(made.chosen);
  made.chosen = {{}, {0}, tokens.mass};
  std::vector<std::int32_t>& pages = made.chosen.columns;
  for (std::size_t list = 0; list + 1 < tokens.begin.size(); ++list) {
    std::int64_t latest = -1;
    for (std::int32_t i = tokens.begin[list]; i < tokens.begin[list + 1]; ++i) {
      const std::int64_t token = tokens.columns[static_cast<std::size_t>(i)];
      if (token / page_tokens != latest) {
        latest = token / page_tokens;
        pages.push_back(static_cast<std::int32_t>(latest));
        made.token_mask.resize(pages.size() * static_cast<std::size_t>(page_tokens));
      }
      const std::size_t page = made.token_mask.size() - static_cast<std::size_t>(page_tokens);
      made.token_mask[page + static_cast<std::size_t>(token % page_tokens)] = 1;
    }
    made.chosen.begin.push_back(static_cast<std::int32_t>(pages.size()));
  }
}

// Mass of what was chosen, by query head.
void cover(const Asking& a) {
  const attention::PageLayout& layout = a.plan.hbm;
  attention::Coverage coverage{};
  coverage.kv_heads = layout.kv_heads;
  coverage.query_heads = a.heads;
  coverage.logits = a.logits;
  coverage.lse = a.plan.work.lse.data();
  coverage.pages = a.made.chosen.columns.data();
  coverage.begin = a.made.chosen.begin.data();
  coverage.alpha = sized(a.made.alpha, a.group.count * a.heads);
  if (a.scored.record == attention::PageRecord::kChannels) {
    coverage.page_tokens = layout.page_tokens;
    coverage.first_token = a.group.first_token;
    coverage.window_tokens = a.group.window_tokens;
    coverage.token_mask = a.scored.by_token ? a.made.token_mask.data() : nullptr;
  } else {
    coverage.page_tokens = 1;
    coverage.first_token = a.group.first_page;
    coverage.column_tokens = static_cast<float>(layout.page_tokens);
    coverage.window_lse = a.seen;
  }
  attention::cover_pages(coverage, a.group.count, a.plan.threads);
}

void choose_scored(StepPlan& plan, std::int64_t layer, const ChoosingGroup& group,
                   const attention::Vectors& query, float scale, const attention::State& state,
                   GroupWork& made) {
  const ScoredPages& scored = *group.scored;
  const attention::Kernels& kernels = attention::active_kernels();
  const std::int64_t heads = query.heads;
  float* const queries = sized(plan.work.query, group.count * heads * query.head_size);
  for (std::int64_t r = 0; r < group.count; ++r) {
    const std::int32_t token = plan.choosing->token[group.row[r]];
    kernels.widen(query, token, queries + r * heads * query.head_size);
  }
  Asking asking{plan, layer, group, scored, scale, state, heads, queries, nullptr, nullptr, made};
  Ranking ranking{};
  if (scored.record == attention::PageRecord::kChannels) {
    score_channels(asking);
    ranking = score_tokens(asking);
  } else {
    ranking = score_records(asking);
  }
  const attention::ColumnChoice choice{
      plan.hbm.kv_heads, scored.sinks, scored.wanted > 0 ? scored.wanted : 1.0,
      scored.least,      scored.most,  ranking.first_column,
      ranking.score,     ranking.mass, made.window_mass.data()};
  made.chosen = attention::choose_columns(choice, group.count, plan.threads);
  for (const float mass : made.chosen.mass) {
    plan.totals.unmet += mass < static_cast<float>(scored.wanted);
  }
  made.token_mask.clear();
  if (scored.by_token) gather_pages(made, plan.hbm.page_tokens);
  if (scored.estimates) cover(asking);
}

ChosenPages pages_of(const ChoosingGroup& group, const GroupWork& made, std::int64_t lists) {
  if (group.listed != nullptr) {
    return {group.listed->begin[lists], group.listed->pages, group.listed->begin};
  }
  return {static_cast<std::int64_t>(made.chosen.columns.size()), made.chosen.columns.data(),
          made.chosen.begin.data(), group.scored->by_token ? made.token_mask.data() : nullptr};
}

// The lists of all groups, row after row.
ChosenPages merge(StepPlan& plan) {
  const ChoosingRows& rows = *plan.choosing;
  const std::int64_t heads = plan.hbm.kv_heads, page_tokens = plan.hbm.page_tokens;
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
  bool masked = false;
  each([&](std::int64_t to, std::int64_t list, const ChosenPages& part) {
    begin[to + 1] = part.begin[list + 1] - part.begin[list];
    masked = masked || part.token_mask != nullptr;
  });
  for (std::int64_t list = 0; list < rows.count * heads; ++list) begin[list + 1] += begin[list];
  const std::int64_t count = begin[rows.count * heads];
  std::int32_t* const pages = sized(work.pages, count);
  if (masked) work.token_mask.assign(static_cast<std::size_t>(count * page_tokens), 1);
  each([&](std::int64_t to, std::int64_t list, const ChosenPages& part) {
    const std::int64_t first = part.begin[list], last = part.begin[list + 1];
    std::copy(part.pages + first, part.pages + last, pages + begin[to]);
    if (part.token_mask == nullptr) return;
    std::copy(part.token_mask + first * page_tokens, part.token_mask + last * page_tokens,
              work.token_mask.data() + begin[to] * page_tokens);
  });
  return {count, pages, begin, masked ? work.token_mask.data() : nullptr};
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
