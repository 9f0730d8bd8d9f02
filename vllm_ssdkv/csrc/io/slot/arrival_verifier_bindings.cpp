#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "base/interruptible.hpp"
#include "base/unlocked.hpp"
#include "io/bindings.hpp"
#include "io/engine/batch.hpp"
#include "io/slot/arrival_verifier.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ssdkv {
namespace {

using U8 = ArrayIn<uint8_t>;
using I32 = ArrayIn<int32_t>;
using U32 = ArrayIn<uint32_t>;
using I64 = ArrayIn<int64_t>;
using U64 = ArrayIn<uint64_t>;

const std::byte* bytes_of(const U8& array) {
  return reinterpret_cast<const std::byte*>(array.data());
}

void check_rows(const U8& fixed, size_t n, const SlotShape& shape) {
  if (fixed.shape(0) != n * shape.header.fixed_bytes) {
    throw std::invalid_argument("not one beginning of a header per slot");
  }
}

void check_addresses(const U64& addresses) {
  for (const uint64_t address : span(addresses)) {
    if (address == 0) throw std::invalid_argument("an address is zero");
  }
}

ArrayOut<uint8_t> right_headers(const U64& addresses, const U8& fixed, const SlotShape& shape) {
  const size_t n = addresses.shape(0);
  check_rows(fixed, n, shape);
  check_addresses(addresses);
  std::vector<uint8_t> right(n);
  {
    const Unlocked unlocked;
    for (size_t i = 0; i < n; ++i) {
      const auto* header = reinterpret_cast<const std::byte*>(addresses.data()[i]);
      const std::byte* wanted = bytes_of(fixed) + i * shape.header.fixed_bytes;
      right[i] = right_header(header, wanted, shape.header) ? 1 : 0;
    }
  }
  return to_numpy(std::move(right));
}

struct Stretches {
  std::vector<Stretch> all;
};

std::vector<Stretch> to_stretches(const U64& offsets, const U64& sizes, const U64& bases,
                                  const U64& steps) {
  const size_t n = offsets.shape(0);
  if (sizes.shape(0) != n || bases.shape(0) != n || steps.shape(0) != n) {
    throw std::invalid_argument("the arrays differ in length");
  }
  check_addresses(bases);
  std::vector<Stretch> all;
  all.reserve(n);
  for (size_t i = 0; i < n; ++i) {
    all.push_back({offsets.data()[i], sizes.data()[i], bases.data()[i], steps.data()[i]});
  }
  return all;
}

// With the beginnings of the headers, to which the native one only points.
class PyArrivalVerifier {
 public:
  PyArrivalVerifier(const SlotShape& shape, const U64& addresses, const U8& fixed,
                    const U64& blocks, const I64& slot_of, const U64& begins, const U32& lengths,
                    const Stretches& stretches, size_t first, size_t step)
      : fixed_(bytes_of(fixed), bytes_of(fixed) + fixed.shape(0)),
        verifier_(shape, slots(shape, addresses, fixed, blocks), parts(slot_of, begins, lengths),
                  stretches.all, {first, step}) {}

  bool follow(Batch& batch, double timeout_s) {
    return wait_for(timeout_s,
                    [&](Clock::time_point until) { return verifier_.follow(batch, until); });
  }

  void take(const I32& results) {
    const auto given = span(results);
    const Unlocked unlocked;
    verifier_.take(given);
  }

  ArrayOut<uint8_t> states() const {
    std::vector<uint8_t> found;
    for (const ArrivalVerifier::State state : verifier_.states())
      found.push_back(static_cast<uint8_t>(state));
    return to_numpy(std::move(found));
  }

  ArrayOut<int64_t> wrong_pages() const {
    std::vector<int64_t> found;
    for (const auto& [slot, page] : verifier_.wrong_pages())
      found.insert(found.end(), {slot, page});
    return to_numpy(std::move(found));
  }

 private:
  static std::vector<ArrivalVerifier::Part> parts(const I64& slot_of, const U64& begins,
                                                  const U32& lengths) {
    const size_t n = slot_of.shape(0);
    if (begins.shape(0) != n || lengths.shape(0) != n) {
      throw std::invalid_argument("the arrays differ in length");
    }
    std::vector<ArrivalVerifier::Part> found;
    found.reserve(n);
    for (size_t i = 0; i < n; ++i) {
      found.push_back({slot_of.data()[i], begins.data()[i], lengths.data()[i]});
    }
    return found;
  }

  std::vector<ArrivalVerifier::Slot> slots(const SlotShape& shape, const U64& addresses,
                                           const U8& fixed, const U64& blocks) const {
    const size_t n = addresses.shape(0);
    check_rows(fixed, n, shape);
    check_addresses(addresses);
    if (blocks.shape(0) != n) throw std::invalid_argument("the arrays differ in length");
    std::vector<ArrivalVerifier::Slot> found;
    found.reserve(n);
    for (size_t i = 0; i < n; ++i) {
      const std::byte* wanted = fixed_.data() + i * shape.header.fixed_bytes;
      found.push_back({addresses.data()[i], wanted, blocks.data()[i]});
    }
    return found;
  }

  const std::vector<std::byte> fixed_;
  ArrivalVerifier verifier_;
};

}  // namespace

void bind_arrival_verifier(nb::module_& m) {
  nb::class_<SlotShape>(m, "SlotShape")
      .def(
          "__init__",
          [](SlotShape* self, size_t header_bytes, size_t fixed_bytes, size_t used_bytes,
             size_t pages, size_t page_bytes, size_t payload_bytes) {
            const SlotShape shape{
                {header_bytes, fixed_bytes, used_bytes}, pages, page_bytes, payload_bytes};
            shape.header.check();
            new (self) SlotShape(shape);
          },
          "header_bytes"_a, "fixed_bytes"_a, "used_bytes"_a, "pages"_a, "page_bytes"_a,
          "payload_bytes"_a);
  nb::class_<Stretches>(m, "Stretches")
      .def(
          "__init__",
          [](Stretches* self, const U64& offsets, const U64& sizes, const U64& bases,
             const U64& steps) {
            new (self) Stretches{to_stretches(offsets, sizes, bases, steps)};
          },
          "offsets"_a.noconvert(), "sizes"_a.noconvert(), "bases"_a.noconvert(),
          "steps"_a.noconvert());
  m.def("right_headers", &right_headers, "addresses"_a.noconvert(), "fixed"_a.noconvert(),
        "shape"_a);
  nb::class_<PyArrivalVerifier>(m, "ArrivalVerifier")
      .def(nb::init<const SlotShape&, const U64&, const U8&, const U64&, const I64&, const U64&,
                    const U32&, const Stretches&, size_t, size_t>(),
           "shape"_a, "addresses"_a.noconvert(), "fixed"_a.noconvert(), "blocks"_a.noconvert(),
           "slot_of"_a.noconvert(), "begins"_a.noconvert(), "lengths"_a.noconvert(), "stretches"_a,
           "first"_a, "step"_a)
      .def("follow", &PyArrivalVerifier::follow, "batch"_a, "timeout_s"_a)
      .def("take", &PyArrivalVerifier::take, "results"_a.noconvert())
      .def("states", &PyArrivalVerifier::states)
      .def("wrong_pages", &PyArrivalVerifier::wrong_pages);
}

}  // namespace ssdkv
