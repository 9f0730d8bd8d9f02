// Python face of reading ahead: many lists in one call. Arguments are checked here.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <iterator>
#include <tuple>
#include <utility>
#include <vector>

#include "attention/arguments.hpp"
#include "attention/next_best.hpp"
#include "attention/openmp_team.hpp"
#include "base/arrays.hpp"
#include "base/unlocked.hpp"

namespace ssdkv::attention {
namespace {

using Numbers = Vector<std::int32_t>;
using Values = Vector<float>;

// Below this many pages another thread costs more than it brings.
constexpr std::size_t kTaskPages = 512;

// Calls work(list) for each list, on a team where there are pages for one. The GIL is free.
template <class Work>
void for_lists(std::size_t lists, std::size_t pages, std::int64_t threads, const Work& work) {
  const Unlocked unlocked;
  const std::size_t tasks = std::min(lists, pages / kTaskPages + 1);
  for_tasks(extent(tasks), threads, 0, [&](std::int64_t task, std::byte*) {
    const auto number = static_cast<std::size_t>(task);
    for (std::size_t i = number * lists / tasks; i < (number + 1) * lists / tasks; ++i) work(i);
  });
}

void check_lists(const Numbers& begin, std::size_t count) {
  const std::size_t edges = begin.shape(0);
  require(edges > 0 && begin.data()[0] == 0 && begin.data()[edges - 1] == extent(count),
          "the lists' edges do not fit their pages");
  require(std::is_sorted(begin.data(), begin.data() + edges), "a list has a negative length");
}

template <class T>
std::span<const T> part(const Vector<T>& values, const Numbers& begin, std::size_t list) {
  const std::int32_t* edge = begin.data() + list;
  return {values.data() + edge[0], static_cast<std::size_t>(edge[1] - edge[0])};
}

template <class T>
void append(std::vector<T>& all, const std::vector<T>& more) {
  all.insert(all.end(), more.begin(), more.end());
}

std::tuple<ArrayOut<std::int32_t>, ArrayOut<float>, ArrayOut<std::int32_t>> py_count_choices(
    const Numbers& pages, const Values& counts, const Numbers& begin, const Numbers& chosen,
    const Numbers& chosen_begin, std::int64_t threads) {
  require(threads > 0, "threads must be positive");
  check_lists(begin, pages.shape(0));
  check_lists(chosen_begin, chosen.shape(0));
  require(counts.shape(0) == pages.shape(0) && begin.shape(0) == chosen_begin.shape(0),
          "the lists differ in number");
  std::vector<CountedPages> lists(begin.shape(0) - 1);
  for_lists(lists.size(), pages.shape(0) + chosen.shape(0), threads, [&](std::size_t i) {
    lists[i] =
        count_choice(part(pages, begin, i), part(counts, begin, i), part(chosen, chosen_begin, i));
  });
  CountedPages all;
  std::vector<std::int32_t> edges{0};
  for (const CountedPages& list : lists) {
    append(all.pages, list.pages);
    append(all.counts, list.counts);
    edges.push_back(static_cast<std::int32_t>(all.pages.size()));
  }
  return {to_numpy(std::move(all.pages)), to_numpy(std::move(all.counts)),
          to_numpy(std::move(edges))};
}

std::pair<ArrayOut<std::int32_t>, ArrayOut<std::int32_t>> py_unite(const Numbers& pages,
                                                                   const Numbers& begin,
                                                                   const Numbers& others,
                                                                   const Numbers& others_begin) {
  check_lists(begin, pages.shape(0));
  check_lists(others_begin, others.shape(0));
  require(begin.shape(0) == others_begin.shape(0), "the lists differ in number");
  std::vector<std::int32_t> all;
  std::vector<std::int32_t> edges{0};
  for (std::size_t i = 0; i + 1 < begin.shape(0); ++i) {
    const auto one = part(pages, begin, i);
    const auto other = part(others, others_begin, i);
    std::set_union(one.begin(), one.end(), other.begin(), other.end(), std::back_inserter(all));
    edges.push_back(static_cast<std::int32_t>(all.size()));
  }
  return {to_numpy(std::move(all)), to_numpy(std::move(edges))};
}

std::pair<ArrayOut<std::int32_t>, ArrayOut<std::int32_t>> py_best_by_ranks(
    const Numbers& pages, const Values& score, const Numbers& begin, const Numbers& counted,
    const Values& counts, const Numbers& counted_begin, const Numbers& most, std::int64_t threads) {
  require(threads > 0, "threads must be positive");
  check_lists(begin, pages.shape(0));
  check_lists(counted_begin, counted.shape(0));
  require(score.shape(0) == pages.shape(0) && counts.shape(0) == counted.shape(0) &&
              begin.shape(0) == counted_begin.shape(0) && begin.shape(0) == most.shape(0) + 1,
          "the lists differ in number");
  std::vector<std::vector<std::int32_t>> lists(begin.shape(0) - 1);
  for_lists(lists.size(), pages.shape(0), threads, [&](std::size_t i) {
    lists[i] =
        best_by_ranks(part(pages, begin, i), part(score, begin, i), part(counted, counted_begin, i),
                      part(counts, counted_begin, i), most.data()[i]);
  });
  std::vector<std::int32_t> best;
  std::vector<std::int32_t> edges{0};
  for (const std::vector<std::int32_t>& list : lists) {
    append(best, list);
    edges.push_back(static_cast<std::int32_t>(best.size()));
  }
  return {to_numpy(std::move(best)), to_numpy(std::move(edges))};
}

}  // namespace

void bind_next_best(nb::module_& module) {
  module.def("count_choices", &py_count_choices, nb::arg("pages").noconvert(),
             nb::arg("counts").noconvert(), nb::arg("begin").noconvert(),
             nb::arg("chosen").noconvert(), nb::arg("chosen_begin").noconvert(), nb::arg("threads"),
             "Decayed counts of choices after one more token.");
  module.def("unite", &py_unite, nb::arg("pages").noconvert(), nb::arg("begin").noconvert(),
             nb::arg("others").noconvert(), nb::arg("others_begin").noconvert(),
             "Lists of pages with those of other lists, and their edges.");
  module.def("best_by_ranks", &py_best_by_ranks, nb::arg("pages").noconvert(),
             nb::arg("score").noconvert(), nb::arg("begin").noconvert(),
             nb::arg("counted").noconvert(), nb::arg("counts").noconvert(),
             nb::arg("counted_begin").noconvert(), nb::arg("most").noconvert(), nb::arg("threads"),
             "Pages with the lowest sum of their ranks by score and by count.");
}

}  // namespace ssdkv::attention
