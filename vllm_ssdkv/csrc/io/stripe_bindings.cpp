#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "io/bindings.hpp"
#include "io/stripes.hpp"

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

// Ranges of slots with the tables that stripe them. Immutable.
class Stripes {
 public:
  Stripes(std::vector<std::shared_ptr<const StripeTable>> tables, const I64& first,
          const I64& slots, const I64& table_of, const I64& begin, size_t devices)
      : tables_(std::move(tables)), begin_(to_vector(begin)) {
    const size_t n = first.shape(0);
    bool fits = slots.shape(0) == n && table_of.shape(0) == n && begin_.size() == n * devices;
    for (const auto& table : tables_) fits = fits && table->row_units.size() == devices;
    for (size_t i = 0; fits && i < n; ++i) {
      fits = table_of.data()[i] >= 0 && static_cast<size_t>(table_of.data()[i]) < tables_.size() &&
             first.data()[i] >= end_ && slots.data()[i] >= 0 &&
             slots.data()[i] <= std::numeric_limits<int64_t>::max() - first.data()[i];
      if (!fits) break;
      end_ = first.data()[i] + slots.data()[i];
      ranges_.push_back({first.data()[i], slots.data()[i],
                         tables_[static_cast<size_t>(table_of.data()[i])].get(),
                         begin_.data() + i * devices});
    }
    if (!fits) throw std::invalid_argument("the tables of a placement do not fit its devices");
  }

  Requests extents(const I64& slots, const I64& offsets, int64_t length, int64_t copy,
                   bool merged) const {
    return to_tuple(find_slots(ranges_, span(slots), span(offsets), length, copy, merged));
  }

 private:
  const std::vector<std::shared_ptr<const StripeTable>> tables_;
  const std::vector<int64_t> begin_;
  std::vector<StripedRange> ranges_;
  int64_t end_ = 0;
};

}  // namespace

void bind_stripes(nb::module_& m) {
  nb::class_<StripeTable>(m, "StripeTable")
      .def(
          "__init__",
          [](StripeTable* self, const I64& device, const I64& place, const I64& row_units,
             int64_t lanes, int64_t copies, int64_t unit_bytes, int64_t slot_bytes,
             int64_t first_byte, int64_t merge_units) {
            const int64_t rows = lanes * copies;
            const int64_t units = rows > 0 ? static_cast<int64_t>(device.shape(0)) / rows : 0;
            StripeTable table{lanes,
                              copies,
                              units,
                              unit_bytes,
                              slot_bytes,
                              first_byte,
                              merge_units,
                              to_vector(device),
                              to_vector(place),
                              to_vector(row_units)};
            table.check();
            new (self) StripeTable(std::move(table));
          },
          "device"_a.noconvert(), "place"_a.noconvert(), "row_units"_a.noconvert(), "lanes"_a,
          "copies"_a, "unit_bytes"_a, "slot_bytes"_a, "first_byte"_a, "merge_units"_a);

  nb::class_<Stripes>(m, "Stripes")
      .def(nb::init<std::vector<std::shared_ptr<const StripeTable>>, const I64&, const I64&,
                    const I64&, const I64&, size_t>(),
           "tables"_a, "first"_a.noconvert(), "slots"_a.noconvert(), "table_of"_a.noconvert(),
           "begin"_a.noconvert(), "devices"_a)
      .def("extents", &Stripes::extents, "slots"_a.noconvert(), "offsets"_a.noconvert(), "length"_a,
           "copy"_a, "merged"_a);
}

}  // namespace ssdkv
