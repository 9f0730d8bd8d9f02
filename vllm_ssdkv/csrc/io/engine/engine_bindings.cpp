#include "io/engine/engine_bindings.hpp"

#include <chrono>
#include <vector>

#include "base/interruptible.hpp"
#include "base/unlocked.hpp"
#include "io/engine/batch.hpp"
#include "io/engine/file.hpp"
#include "io/engine/threads/threads_engine.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ssdkv {
namespace {

bool wait(Batch& batch, double timeout_s) {
  // A wait that is over already would cost a system call, and the GIL.
  if (batch.done() || !(timeout_s > 0)) return batch.done();
  const auto step = [&](Clock::time_point until) { return batch.wait_until(until); };
  return wait_for(timeout_s, step) || batch.done();
}

}  // namespace

RequestArrays request_arrays(const ArrayIn<uint16_t>& device, const ArrayIn<uint64_t>& offset,
                             const ArrayIn<uint32_t>& length, const ArrayIn<uint64_t>& buffer) {
  const size_t n = device.shape(0);
  if (offset.shape(0) != n || length.shape(0) != n || buffer.shape(0) != n) {
    throw std::invalid_argument("device, offset, length and buffer differ in length");
  }
  return {device.data(), offset.data(), length.data(), buffer.data(), n};
}

Op to_op(int op) {
  if (op != 0 && op != 1) throw std::invalid_argument("op must be 0 (read) or 1 (write)");
  return static_cast<Op>(op);
}

nb::dict to_dict(const Statistics& statistics) {
  nb::dict out;
  for (const auto& [name, value] : statistics) out[name.c_str()] = value;
  return out;
}

void bind_engines(nb::module_& m) {
  nb::class_<Batch>(m, "Batch")
      .def("done", &Batch::done)
      .def("wait", &wait, "timeout_s"_a)
      .def("notify", &Batch::notify, "eventfd"_a)
      .def("results", [](const Batch& batch) { return to_numpy(batch.results()); });

  nb::class_<ThreadsEngine> threads(m, "ThreadsEngine");
  threads.def(nb::init<const std::vector<int>&, uint64_t, uint64_t, unsigned>(), "fds"_a,
              "arena_address"_a, "arena_bytes"_a, "queue_depth"_a);
  bind_protocol(threads);

  m.def(
      "check_requests",
      [](const ArrayIn<uint16_t>& device, const ArrayIn<uint64_t>& offset,
         const ArrayIn<uint32_t>& length, const ArrayIn<uint64_t>& buffer, size_t devices,
         uint64_t arena_bytes) {
        (void)check_requests(request_arrays(device, offset, length, buffer), devices, arena_bytes);
      },
      "device"_a.noconvert(), "offset"_a.noconvert(), "length"_a.noconvert(),
      "buffer"_a.noconvert(), "devices"_a, "arena_bytes"_a);

  m.def("preallocate", &preallocate, "fd"_a, "nbytes"_a, nb::call_guard<Unlocked>(),
        "fallocate(2) of the first nbytes; returns 0 or an errno.");
}

}  // namespace ssdkv
