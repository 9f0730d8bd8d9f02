// Waiting that Ctrl-C ends.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <chrono>

#include "base/unlocked.hpp"
#include "io/engine/batch.hpp"

namespace ssdkv {

// Time that Ctrl-C may go unnoticed while the main thread waits.
inline constexpr std::chrono::milliseconds kSignalPoll{100};

// Calls step(until) without the GIL, again and again, until it returns true or time is up; whether
// it returned true. Signals are handled in between.
template <class Step>
bool wait_for(double timeout_s, const Step& step) {
  const auto deadline = deadline_after(timeout_s);
  for (;;) {
    const auto until = std::min(deadline, Clock::now() + kSignalPoll);
    {
      const Unlocked unlocked;
      if (step(until)) return true;
    }
    if (until == deadline) return false;
    if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
  }
}

}  // namespace ssdkv
