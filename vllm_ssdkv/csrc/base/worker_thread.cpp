#include "base/worker_thread.hpp"

#include <sched.h>

#include <cstring>

namespace ssdkv {

void use_all_cpus() noexcept {
  // The kernel intersects the mask with the cpuset, so asking for everything is always legal. A
  // refusal (a sandbox without the call) only costs speed.
  cpu_set_t all;
  std::memset(&all, 0xff, sizeof(all));
  (void)sched_setaffinity(0, sizeof(all), &all);
}

}  // namespace ssdkv
