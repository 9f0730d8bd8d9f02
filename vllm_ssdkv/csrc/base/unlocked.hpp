// Work that needs no interpreter.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

namespace ssdkv {

// Without the GIL for as long as it lives. While an interpreter ends, Python before 3.14 ends a
// thread that asks for the GIL by unwinding its stack, which nanobind's frames do not let through:
// the process would be aborted. Such a thread stays here until the process is gone.
class Unlocked {
 public:
  Unlocked() : state_{PyEval_SaveThread()} {}
  ~Unlocked() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {                        // must not be left
      nanobind::set_leak_warnings(false);  // what this thread refers to is no leak
      for (;;) pause();
    }
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace ssdkv
