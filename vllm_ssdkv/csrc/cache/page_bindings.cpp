#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "base/unlocked.hpp"
#include "cache/page_cache.hpp"
#include "cache/page_lookup.hpp"
#include "cache/row_pins.hpp"
#include "io/bindings.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ssdkv {
namespace {

PagePolicy to_policy(const std::string& name) {
  if (name == "lru") return PagePolicy::kRecent;
  if (name == "frequency") return PagePolicy::kFrequent;
  if (name == "decay") return PagePolicy::kDecayed;
  throw std::invalid_argument("no such policy: " + name);
}

nb::tuple to_tuple(AskedPages asked) {
  return nb::make_tuple(to_numpy(std::move(asked.which)), to_numpy(std::move(asked.keys)),
                        to_numpy(std::move(asked.places)), asked.held, asked.framed, asked.coming,
                        asked.guessed);
}

}  // namespace

// What takes time with the pages of a step frees the GIL.
void bind_page_cache(nb::module_& m) {
  nb::class_<PageCache>(m, "PageCache")
      .def(
          "__init__",
          [](PageCache* cache, uint64_t address, uint64_t page_bytes, uint64_t header_bytes,
             size_t places, size_t slots, size_t pages, const std::string& policy) {
            const PageLayout layout{address, page_bytes, header_bytes};
            new (cache) PageCache(layout, places, slots, pages, to_policy(policy));
          },
          "address"_a, "page_bytes"_a, "header_bytes"_a, "places"_a, "slots"_a, "pages"_a,
          "policy"_a)
      .def(
          "acquire",
          [](PageCache& cache, const ArrayIn<int64_t>& slots, const ArrayIn<int64_t>& pages,
             const ArrayIn<uint64_t>& frames) {
            AskedPages asked;
            {
              const Unlocked unlocked;
              asked = cache.acquire(span(slots), span(pages), span(frames));
            }
            return to_tuple(std::move(asked));
          },
          "slots"_a.noconvert(), "pages"_a.noconvert(), "frames"_a.noconvert())
      .def(
          "prefetch",
          [](PageCache& cache, const ArrayIn<int64_t>& slots, const ArrayIn<int64_t>& pages,
             const ArrayIn<uint64_t>& frames, const ArrayIn<int32_t>& begin, size_t limit,
             const ArrayIn<uint16_t>& devices, const ArrayIn<int64_t>& quota) {
            AskedPages asked;
            {
              const Unlocked unlocked;
              asked = cache.prefetch(span(slots), span(pages), span(frames), span(begin), limit,
                                     span(devices), span(quota));
            }
            return nb::make_tuple(to_numpy(std::move(asked.keys)),
                                  to_numpy(std::move(asked.places)));
          },
          "slots"_a.noconvert(), "pages"_a.noconvert(), "frames"_a.noconvert(),
          "begin"_a.noconvert(), "limit"_a, "devices"_a.noconvert(), "quota"_a.noconvert())
      .def(
          "complete",
          [](PageCache& cache, const ArrayIn<int64_t>& keys, const ArrayIn<int32_t>& places,
             const ArrayIn<uint8_t>& good, const ArrayIn<uint16_t>& devices) {
            cache.complete(span(keys), span(places), span(good), span(devices));
          },
          "keys"_a.noconvert(), "places"_a.noconvert(), "good"_a.noconvert(),
          "devices"_a.noconvert())
      .def(
          "find",
          [](const PageCache& cache, const ArrayIn<int64_t>& pages, const ArrayIn<uint64_t>& frames,
             const ArrayIn<int32_t>& which, const ArrayIn<int64_t>& keys,
             const ArrayIn<int32_t>& places) {
            FoundPages found;
            {
              const Unlocked unlocked;
              found = cache.find(span(pages), span(frames), span(which), span(keys), span(places));
            }
            return nb::make_tuple(to_numpy(std::move(found.address)),
                                  to_numpy(std::move(found.here)));
          },
          "pages"_a.noconvert(), "frames"_a.noconvert(), "which"_a.noconvert(),
          "keys"_a.noconvert(), "places"_a.noconvert())
      .def(
          "holds",
          [](const PageCache& cache, const ArrayIn<int64_t>& slots, const ArrayIn<int64_t>& pages) {
            std::vector<uint8_t> held;
            {
              const Unlocked unlocked;
              held = cache.holds(span(slots), span(pages));
            }
            return to_numpy(std::move(held));
          },
          "slots"_a.noconvert(), "pages"_a.noconvert())
      .def(
          "release",
          [](PageCache& cache, const ArrayIn<int32_t>& places) { cache.release(span(places)); },
          "places"_a.noconvert())
      .def(
          "forget",
          [](PageCache& cache, const ArrayIn<int64_t>& slots) { cache.forget(span(slots)); },
          "slots"_a.noconvert())
      .def(
          "step", [](PageCache& cache, const ArrayIn<double>& costs) { cache.step(span(costs)); },
          "costs"_a.noconvert())
      .def(
          "held_in",
          [](const PageCache& cache, const ArrayIn<int32_t>& firsts, int32_t length) {
            return to_numpy(cache.held_in(span(firsts), length));
          },
          "firsts"_a.noconvert(), "length"_a)
      .def(
          "close",
          [](PageCache& cache, const ArrayIn<int32_t>& firsts, int32_t length) {
            return to_numpy(cache.close(span(firsts), length));
          },
          "firsts"_a.noconvert(), "length"_a)
      .def(
          "open",
          [](PageCache& cache, const ArrayIn<int32_t>& firsts, int32_t length) {
            cache.open(span(firsts), length);
          },
          "firsts"_a.noconvert(), "length"_a)
      .def("held", &PageCache::held)
      .def("taken", &PageCache::taken)
      .def("closed", &PageCache::closed)
      .def("evictions", &PageCache::evictions)
      .def("asked", &PageCache::asked);

  m.def(
      "locate",
      [](const ArrayIn<int32_t>& first, const ArrayIn<int64_t>& slots,
         const ArrayIn<uint64_t>& frames, const ArrayIn<int32_t>& pages,
         const ArrayIn<int32_t>& begin, int64_t heads, int64_t groups, int64_t page_tokens,
         int64_t first_page) {
        LocatedPages found;
        {
          const Unlocked unlocked;
          found = locate({span(first), span(slots), span(frames)},
                         {heads, groups, page_tokens, first_page}, span(pages), span(begin));
        }
        return nb::make_tuple(to_numpy(std::move(found.slots)), to_numpy(std::move(found.pages)),
                              to_numpy(std::move(found.frames)),
                              to_numpy(std::move(found.position)),
                              to_numpy(std::move(found.blocks)));
      },
      "first"_a.noconvert(), "slots"_a.noconvert(), "frames"_a.noconvert(), "pages"_a.noconvert(),
      "begin"_a.noconvert(), "heads"_a, "groups"_a, "page_tokens"_a, "first_page"_a);

  m.def(
      "pin_rows",
      [](const ArrayIn<int64_t>& slots, const ArrayIn<int32_t>& row_of, ArrayInOut<int32_t> pins,
         ArrayInOut<int64_t> used, int64_t now) {
        return to_numpy(pin_rows(span(slots), span(row_of), span(pins), span(used), now));
      },
      "slots"_a.noconvert(), "row_of"_a.noconvert(), "pins"_a.noconvert(), "used"_a.noconvert(),
      "now"_a);
  m.def(
      "unpin_rows",
      [](const ArrayIn<int32_t>& rows, ArrayInOut<int32_t> pins) {
        unpin_rows(span(rows), span(pins));
      },
      "rows"_a.noconvert(), "pins"_a.noconvert());
}

}  // namespace ssdkv
