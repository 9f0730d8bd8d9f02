// Python module vllm_ssdkv._io: everything that touches bytes on devices or in the arena.
#include <nanobind/nanobind.h>

#include "io/bindings.hpp"

NB_MODULE(_io, m) {
  m.doc() = "Native I/O engines, checksums, ciphers and copies of vllm_ssdkv.";
  ssdkv::bind_memory(m);
  ssdkv::bind_engines(m);
  ssdkv::bind_cipher(m);
}
