#include <nanobind/stl/tuple.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "io/bindings.hpp"
#include "io/engine/coalesced.hpp"
#include "io/engine/engine_bindings.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ssdkv {
namespace {

using Joined = std::tuple<ArrayOut<uint16_t>, ArrayOut<uint64_t>, ArrayOut<uint32_t>,
                          ArrayOut<uint64_t>, ArrayOut<int64_t>, ArrayOut<int64_t>>;

Joined coalesce_requests(const ArrayIn<uint16_t>& device, const ArrayIn<uint64_t>& offset,
                         const ArrayIn<uint32_t>& length, const ArrayIn<uint64_t>& buffer,
                         size_t most) {
  CoalescedRequests found = coalesce(request_arrays(device, offset, length, buffer), most);
  return {to_numpy(std::move(found.device)),        to_numpy(std::move(found.offset)),
          to_numpy(std::move(found.length)),        to_numpy(std::move(found.buffer)),
          to_numpy(std::move(found.parts.request)), to_numpy(std::move(found.parts.begin))};
}

ArrayOut<int32_t> part_results(const ArrayIn<int32_t>& results, const ArrayIn<int64_t>& request,
                               const ArrayIn<int64_t>& begin, const ArrayIn<uint32_t>& length) {
  const size_t count = request.shape(0);
  if (begin.shape(0) != count || length.shape(0) != count) {
    throw std::invalid_argument("the arrays of parts differ in length");
  }
  std::vector<int32_t> parts(count);
  for (size_t i = 0; i < count; ++i) {
    const auto of = static_cast<size_t>(request.data()[i]);
    if (of >= results.shape(0)) throw std::invalid_argument("a part of no request");
    parts[i] = part_result(results.data()[of], begin.data()[i], length.data()[i]);
  }
  return to_numpy(std::move(parts));
}

}  // namespace

void bind_coalesced(nb::module_& m) {
  m.def("coalesce_requests", &coalesce_requests, "device"_a, "offset"_a, "length"_a, "buffer"_a,
        "most"_a);
  m.def("part_results", &part_results, "results"_a, "request"_a, "begin"_a, "length"_a);
}

}  // namespace ssdkv
