#include <new>
#include <system_error>
#include <vector>

#include "io/engine/engine_bindings.hpp"
#include "io/engine/uring/uring_engine.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ssdkv {

void bind_uring(nb::module_& m) {
  nb::class_<UringRing::Setup>(m, "UringSetup")
      .def_ro("task_run", &UringRing::Setup::task_run)
      .def_ro("register_files_errno", &UringRing::Setup::register_files_errno)
      .def_ro("register_buffers_errno", &UringRing::Setup::register_buffers_errno);

  nb::class_<UringEngine> uring(m, "UringEngine");
  uring
      .def(
          "__init__",
          [](UringEngine* self, const std::vector<int>& fds, uint64_t arena_address,
             uint64_t arena_bytes, unsigned queue_depth) {
            try {
              new (self) UringEngine(fds, arena_address, arena_bytes, queue_depth);
            } catch (const std::system_error& error) {
              const nb::object arguments = nb::make_tuple(error.code().value(), error.what());
              PyErr_SetObject(PyExc_OSError, arguments.ptr());
              throw nb::python_error();
            }
          },
          "fds"_a, "arena_address"_a, "arena_bytes"_a, "queue_depth"_a)
      .def("setups", &UringEngine::setups);
  bind_protocol(uring);
}

}  // namespace ssdkv
