#include "base/parallel.hpp"

#include <unistd.h>

namespace ssdkv {
namespace {

constexpr unsigned kDefaultThreads = 4;  // a core copies 5 to 10 GB/s; four fill most sockets
constexpr unsigned kMaxThreads = 64;

}  // namespace

unsigned choose_threads(size_t total_bytes, size_t least_bytes, unsigned asked) {
  if (total_bytes < least_bytes) return 1;
  if (asked != 0) return std::min(asked, kMaxThreads);
  // Not hardware_concurrency(): it reports 1 inside a thread that is pinned to one core.
  const long cpus = sysconf(_SC_NPROCESSORS_ONLN);
  return std::clamp(static_cast<unsigned>(std::max(cpus, 1L)), 1U, kDefaultThreads);
}

}  // namespace ssdkv
