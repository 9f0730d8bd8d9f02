// Shifts the wall clock of the process that preloads it, by the seconds (an int64) in the file
// that SSDKV_TEST_CLOCK names. Clocks that only ever go on are left alone: no host shifts those.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>

namespace {

int64_t shift() {
  static const int64_t zero = 0;
  static const volatile int64_t* const seconds = [] {
    const char* path = std::getenv("SSDKV_TEST_CLOCK");
    const int fd = path == nullptr ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    void* mapped = MAP_FAILED;
    if (fd >= 0) {
      mapped = mmap(nullptr, sizeof zero, PROT_READ, MAP_SHARED, fd, 0);
      close(fd);
    }
    return mapped == MAP_FAILED ? &zero : static_cast<const volatile int64_t*>(mapped);
  }();
  return *seconds;
}

}  // namespace

extern "C" {

int clock_gettime(clockid_t clock, timespec* now) {
  const long failed = syscall(SYS_clock_gettime, clock, now);
  if (failed == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
    now->tv_sec += shift();
  return static_cast<int>(failed);
}

int gettimeofday(timeval* now, void* /*zone*/) {
  timespec exact{};
  clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return 0;
}

time_t time(time_t* into) {
  timespec exact{};
  clock_gettime(CLOCK_REALTIME, &exact);
  if (into != nullptr) *into = exact.tv_sec;
  return exact.tv_sec;
}
}
