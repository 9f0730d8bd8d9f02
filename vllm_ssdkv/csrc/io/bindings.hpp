// The parts of this module's Python bindings.
#pragma once

#include <nanobind/nanobind.h>

#include "base/arrays.hpp"

namespace ssdkv {

void bind_cache(nanobind::module_& m);
void bind_page_cache(nanobind::module_& m);
void bind_memory(nanobind::module_& m);
void bind_engines(nanobind::module_& m);
void bind_cipher(nanobind::module_& m);
void bind_stripes(nanobind::module_& m);
void bind_arrival_verifier(nanobind::module_& m);
void bind_coalesced(nanobind::module_& m);
void bind_miss_service(nanobind::module_& m);
#if SSDKV_URING
void bind_uring(nanobind::module_& m);
#endif

}  // namespace ssdkv
