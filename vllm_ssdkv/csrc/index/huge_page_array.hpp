// A large array of zeros: pages that do not exist before they are touched, huge where that works.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>
#include <type_traits>

namespace ssdkv {

// What is looked up at random misses the TLB at every access when pages have 4 KiB.
template <class T>
class HugePageArray {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

 public:
  // n elements whose bytes are all zero. Throws std::bad_alloc.
  explicit HugePageArray(size_t n) : size_(n) {
    if (n == 0) return;
    if (n > SIZE_MAX / sizeof(T)) throw std::bad_alloc();
    void* const mapped =
        mmap(nullptr, nbytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    (void)madvise(mapped, nbytes(), MADV_HUGEPAGE);  // a kernel without them only is slower
    data_ = static_cast<T*>(mapped);
  }
  ~HugePageArray() {
    if (data_ != nullptr) munmap(data_, nbytes());
  }
  HugePageArray(const HugePageArray&) = delete;
  HugePageArray& operator=(const HugePageArray&) = delete;

  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }
  T* data() { return data_; }
  const T* data() const { return data_; }
  size_t size() const { return size_; }
  size_t nbytes() const { return size_ * sizeof(T); }

 private:
  const size_t size_;
  T* data_ = nullptr;
};

}  // namespace ssdkv
