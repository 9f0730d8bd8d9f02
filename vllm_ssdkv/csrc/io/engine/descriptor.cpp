#include "io/engine/descriptor.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace ssdkv {

Descriptor Descriptor::duplicate(int fd) {
  const int copy = fcntl(fd, F_DUPFD_CLOEXEC, 3);
  if (copy < 0) throw std::system_error(errno, std::generic_category(), "duplicating a descriptor");
  return Descriptor(copy);
}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = other.release();
  }
  return *this;
}

int Descriptor::release() noexcept { return std::exchange(fd_, -1); }

void Descriptor::close() noexcept {
  if (fd_ >= 0) ::close(release());
}

}  // namespace ssdkv
