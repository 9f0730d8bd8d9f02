// Neighbours of a batch as one request of the engine: see vllm_ssdkv/store/joined.py.
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "io/bindings.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ssdkv {
namespace {

using Joined = std::tuple<ArrayOut<uint16_t>, ArrayOut<uint64_t>, ArrayOut<uint32_t>,
                          ArrayOut<uint64_t>, ArrayOut<int64_t>, ArrayOut<int64_t>>;

Joined join_requests(const ArrayIn<uint16_t>& device, const ArrayIn<uint64_t>& offset,
                     const ArrayIn<uint32_t>& length, const ArrayIn<uint64_t>& buffer,
                     size_t most) {
  const size_t count = device.shape(0);
  if (offset.shape(0) != count || length.shape(0) != count || buffer.shape(0) != count) {
    throw std::invalid_argument("the arrays of requests differ in length");
  }
  if (most == 0) throw std::invalid_argument("a request has one part at least");
  std::vector<uint16_t> devices;
  std::vector<uint64_t> offsets, buffers;
  std::vector<uint32_t> lengths;
  std::vector<int64_t> run(count), begin(count);
  for (size_t i = 0; i < count; ++i) {
    const bool follows = i % most != 0 && device.data()[i] == device.data()[i - 1] &&
                         offset.data()[i] == offset.data()[i - 1] + length.data()[i - 1] &&
                         buffer.data()[i] == buffer.data()[i - 1] + length.data()[i - 1];
    if (!follows) {
      devices.push_back(device.data()[i]);
      offsets.push_back(offset.data()[i]);
      buffers.push_back(buffer.data()[i]);
      lengths.push_back(0);
    }
    run[i] = static_cast<int64_t>(lengths.size()) - 1;
    begin[i] = lengths.back();
    lengths.back() += length.data()[i];
  }
  return {to_numpy(std::move(devices)), to_numpy(std::move(offsets)), to_numpy(std::move(lengths)),
          to_numpy(std::move(buffers)), to_numpy(std::move(run)),     to_numpy(std::move(begin))};
}

ArrayOut<int32_t> part_results(const ArrayIn<int32_t>& results, const ArrayIn<int64_t>& run,
                               const ArrayIn<int64_t>& begin, const ArrayIn<uint32_t>& length) {
  const size_t count = run.shape(0);
  if (begin.shape(0) != count || length.shape(0) != count) {
    throw std::invalid_argument("the arrays of parts differ in length");
  }
  std::vector<int32_t> parts(count);
  for (size_t i = 0; i < count; ++i) {
    const auto request = static_cast<size_t>(run.data()[i]);
    if (request >= results.shape(0)) throw std::invalid_argument("a part of no request");
    const int64_t result = results.data()[request];
    const int64_t mine =
        std::clamp<int64_t>(result - begin.data()[i], 0, int64_t{length.data()[i]});
    parts[i] = static_cast<int32_t>(result < 0 ? result : mine);
  }
  return to_numpy(std::move(parts));
}

}  // namespace

void bind_joined(nb::module_& m) {
  m.def("join_requests", &join_requests, "device"_a, "offset"_a, "length"_a, "buffer"_a, "most"_a);
  m.def("part_results", &part_results, "results"_a, "run"_a, "begin"_a, "length"_a);
}

}  // namespace ssdkv
