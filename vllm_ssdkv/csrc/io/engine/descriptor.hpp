// A descriptor of our own for a file that somebody else opened.
#pragma once

namespace ssdkv {

// Shares the file and its lock with the original, and stays valid when the caller closes that.
class Descriptor {
 public:
  Descriptor() = default;
  // Throws std::system_error.
  static Descriptor duplicate(int fd);
  explicit Descriptor(int owned) noexcept : fd_(owned) {}
  ~Descriptor() { close(); }
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept;

  int get() const { return fd_; }
  void close() noexcept;

 private:
  int release() noexcept;

  int fd_ = -1;
};

}  // namespace ssdkv
