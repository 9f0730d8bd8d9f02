#pragma once

#include <nanobind/nanobind.h>

namespace ssdkv::decode {

// The classes of a step's plan, in the module of the attention kernels: a module of its own would
// have a second copy of them, with an instruction set of its own.
void bind_decode(nanobind::module_& module);

}  // namespace ssdkv::decode
