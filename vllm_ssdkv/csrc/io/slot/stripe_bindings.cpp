#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "io/bindings.hpp"
#include "io/slot/striped_extents.hpp"
#include "io/slot/stripes.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ssdkv {
namespace {

using I64 = ArrayIn<int64_t>;
using Requests = std::tuple<ArrayOut<uint16_t>, ArrayOut<uint64_t>, ArrayOut<uint32_t>,
                            ArrayOut<int64_t>, ArrayOut<uint64_t>>;

std::vector<int64_t> to_vector(const I64& array) {
  return {array.data(), array.data() + array.shape(0)};
}

Requests to_tuple(SlotRequests found) {
  return {to_numpy(std::move(found.device)), to_numpy(std::move(found.offset)),
          to_numpy(std::move(found.length)), to_numpy(std::move(found.slot_index)),
          to_numpy(std::move(found.buffer))};
}

std::tuple<ArrayOut<uint16_t>, ArrayOut<uint64_t>, ArrayOut<uint32_t>, ArrayOut<uint64_t>> to_tuple(
    const CoalescedRequests& requests) {
  return {to_numpy(requests.device), to_numpy(requests.offset), to_numpy(requests.length),
          to_numpy(requests.buffer)};
}

std::tuple<ArrayOut<int64_t>, ArrayOut<int64_t>, ArrayOut<uint32_t>> parts_of(
    const StripedExtents& found) {
  const Parts& parts = found.requests().parts;
  return {to_numpy(parts.request), to_numpy(parts.begin), to_numpy(found.pieces().length)};
}

}  // namespace

void bind_stripes(nb::module_& m) {
  nb::class_<StripeTable>(m, "StripeTable")
      .def(
          "__init__",
          [](StripeTable* self, const I64& start, const I64& device, const I64& place,
             const I64& row_bytes, int64_t lanes, int64_t copies, int64_t slot_bytes,
             int64_t first_byte, int64_t merge_units) {
            StripeTable table{lanes,
                              copies,
                              slot_bytes,
                              first_byte,
                              merge_units,
                              to_vector(start),
                              to_vector(device),
                              to_vector(place),
                              to_vector(row_bytes)};
            table.check();
            new (self) StripeTable(std::move(table));
          },
          "start"_a.noconvert(), "device"_a.noconvert(), "place"_a.noconvert(),
          "row_bytes"_a.noconvert(), "lanes"_a, "copies"_a, "slot_bytes"_a, "first_byte"_a,
          "merge_units"_a);

  nb::class_<Stripes>(m, "Stripes")
      .def(
          "__init__",
          [](Stripes* self, std::vector<std::shared_ptr<const StripeTable>> tables,
             const I64& first, const I64& slots, const I64& table_of, const I64& begin,
             size_t devices) {
            new (self) Stripes(std::move(tables), span(first), span(slots), span(table_of),
                               to_vector(begin), devices);
          },
          "tables"_a, "first"_a.noconvert(), "slots"_a.noconvert(), "table_of"_a.noconvert(),
          "begin"_a.noconvert(), "devices"_a)
      .def(
          "extents",
          [](const Stripes& self, const I64& slots, const I64& offsets, int64_t length,
             int64_t copy, bool merged, int64_t cut) {
            return to_tuple(self.find(span(slots), span(offsets), length, copy, merged, cut));
          },
          "slots"_a.noconvert(), "offsets"_a.noconvert(), "length"_a, "copy"_a, "merged"_a,
          "cut"_a = 0);

  nb::class_<StripedExtents>(m, "StripedExtents")
      .def(
          "__init__",
          [](StripedExtents* self, const Stripes& stripes, const I64& slots, const I64& offsets,
             int64_t length, const ArrayIn<uint64_t>& places, bool merged, size_t most,
             const ArrayIn<uint64_t>& tails, int64_t cut) {
            new (self) StripedExtents(stripes, span(slots), span(offsets), length, span(places),
                                      merged, most, span(tails), cut);
          },
          "stripes"_a, "slots"_a.noconvert(), "offsets"_a.noconvert(), "length"_a,
          "places"_a.noconvert(), "merged"_a, "most"_a, "tails"_a.noconvert(), "cut"_a)
      .def("requests", [](const StripedExtents& self) { return to_tuple(self.requests()); })
      .def("parts", [](const StripedExtents& self) { return parts_of(self); })
      .def("extents", [](const StripedExtents& self) { return to_tuple(self.pieces()); })
      .def("nbytes", [](const StripedExtents& self) { return to_numpy(self.bytes_per_device()); })
      .def(
          "whole",
          [](const StripedExtents& self, const ArrayIn<int32_t>& results) {
            return self.whole(span(results));
          },
          "results"_a.noconvert());
}

}  // namespace ssdkv
