// Common part of the engines' Python bindings.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>

#include "base/unlocked.hpp"
#include "io/bindings.hpp"
#include "io/engine/counters.hpp"
#include "io/engine/request.hpp"

namespace ssdkv {

RequestArrays request_arrays(const ArrayIn<uint16_t>& device, const ArrayIn<uint64_t>& offset,
                             const ArrayIn<uint32_t>& length, const ArrayIn<uint64_t>& buffer);

Op to_op(int op);

nanobind::dict to_dict(const Statistics& statistics);

// submit(), statistics() and close() of an engine.
template <class Engine>
void bind_protocol(nanobind::class_<Engine>& engine) {
  using namespace nanobind::literals;
  engine
      .def(
          "submit",
          [](Engine& self, int op, const ArrayIn<uint16_t>& device, const ArrayIn<uint64_t>& offset,
             const ArrayIn<uint32_t>& length, const ArrayIn<uint64_t>& buffer, bool joined) {
            return self.submit(to_op(op), request_arrays(device, offset, length, buffer), joined);
          },
          "op"_a, "device"_a.noconvert(), "offset"_a.noconvert(), "length"_a.noconvert(),
          "buffer"_a.noconvert(), "joined"_a = false)
      .def("statistics", [](const Engine& self) { return to_dict(self.statistics()); })
      .def("close", &Engine::close, "timeout_s"_a, nanobind::call_guard<Unlocked>());
}

}  // namespace ssdkv
