// Python module vllm_ssdkv._io: devices, the arena's bytes, the tables of its frames, and counters.
#include <nanobind/nanobind.h>

#include "io/bindings.hpp"
#include "metrics/counters.hpp"

NB_MODULE(_io, m) {
  m.doc() =
      "Native I/O engines, page cache, checksums, ciphers, copies and counters of vllm_ssdkv.";
  ssdkv::bind_cache(m);
  ssdkv::bind_page_cache(m);
  ssdkv::bind_memory(m);
  ssdkv::bind_cipher(m);
  ssdkv::bind_engines(m);
  ssdkv::bind_stripes(m);
  ssdkv::bind_arrival_verifier(m);
  ssdkv::bind_coalesced(m);
  ssdkv::bind_counters(m);
#if SSDKV_URING
  ssdkv::bind_uring(m);
#endif
  ssdkv::bind_miss_service(m);
  m.attr("has_uring") = bool{SSDKV_URING};
}
