#include "io/bindings.hpp"

#include <nanobind/stl/vector.h>

#include <chrono>
#include <stdexcept>
#include <utility>
#include <vector>

#include "base/interruptible.hpp"
#include "cache/frame_cache.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ssdkv {
namespace {

using SlotArray = ArrayIn<int64_t>;
using FrameArray = ArrayIn<int32_t>;

FrameState to_state(int state) {
  if (state < 0 || static_cast<size_t>(state) >= kFrameStates) {
    throw std::invalid_argument("no such frame state");
  }
  return static_cast<FrameState>(state);
}

ArrayOut<int32_t> take_within(FrameCache& cache, const SlotArray& slots, int state,
                              double timeout_s) {
  const FrameState wanted = to_state(state);
  const auto asked = span(slots);
  std::vector<int32_t> taken;
  wait_for(timeout_s, [&](Clock::time_point until) {
    taken = cache.take_until(asked, wanted, until);
    return !taken.empty() || asked.empty();
  });
  return to_numpy(std::move(taken));
}

}  // namespace

// All but take_within() keep the GIL: they are shorter than getting it back would take. No thread
// asks for the GIL while it holds the cache's mutex.
void bind_cache(nb::module_& m) {
  nb::class_<FrameCache>(m, "FrameCache")
      .def(nb::init<size_t, size_t, size_t>(), "frames"_a, "slots"_a, "shut"_a)
      .def("state", [](const FrameCache& cache,
                       int64_t frame) { return static_cast<int>(cache.state(frame)); })
      .def("frame_of", &FrameCache::frame_of, "slot"_a)
      .def(
          "count",
          [](const FrameCache& cache, const std::vector<int>& states) {
            std::vector<FrameState> wanted;
            wanted.reserve(states.size());
            for (const int state : states) wanted.push_back(to_state(state));
            return cache.count(wanted);
          },
          "states"_a)
      .def(
          "frames_of",
          [](const FrameCache& cache, const SlotArray& slots) {
            return to_numpy(cache.frames_of(span(slots)));
          },
          "slots"_a.noconvert())
      .def(
          "slots_of",
          [](const FrameCache& cache, const FrameArray& frames) {
            return to_numpy(cache.slots_of(span(frames)));
          },
          "frames"_a.noconvert())
      .def("spare", &FrameCache::spare)
      .def("evictions", &FrameCache::evictions)
      .def(
          "retain", [](FrameCache& cache, const SlotArray& slots) { cache.retain(span(slots)); },
          "slots"_a.noconvert())
      .def(
          "release",
          [](FrameCache& cache, const SlotArray& slots) {
            return to_numpy(cache.release(span(slots)));
          },
          "slots"_a.noconvert())
      .def(
          "referenced",
          [](const FrameCache& cache, const SlotArray& slots) {
            return to_numpy(cache.referenced(span(slots)));
          },
          "slots"_a.noconvert())
      .def(
          "borrow",
          [](FrameCache& cache, const SlotArray& slots) {
            return to_numpy(cache.borrow(span(slots)));
          },
          "slots"_a.noconvert())
      .def(
          "give_back",
          [](FrameCache& cache, const FrameArray& frames) { cache.give_back(span(frames)); },
          "frames"_a.noconvert())
      .def(
          "take",
          [](FrameCache& cache, const SlotArray& slots, int state, bool spare_contexts) {
            return to_numpy(cache.take(span(slots), to_state(state), spare_contexts));
          },
          "slots"_a.noconvert(), "state"_a, "spare_contexts"_a)
      .def("take_within", &take_within, "slots"_a.noconvert(), "state"_a, "timeout_s"_a)
      .def(
          "open", [](FrameCache& cache, const FrameArray& frames) { cache.open(span(frames)); },
          "frames"_a.noconvert())
      .def(
          "shut",
          [](FrameCache& cache, const FrameArray& frames) {
            return to_numpy(cache.shut(span(frames)));
          },
          "frames"_a.noconvert())
      .def(
          "start_writing",
          [](FrameCache& cache, const SlotArray& slots) {
            return to_numpy(cache.start_writing(span(slots)));
          },
          "slots"_a.noconvert())
      .def(
          "settle",
          [](FrameCache& cache, const FrameArray& frames, int state) {
            cache.settle(span(frames), to_state(state));
          },
          "frames"_a.noconvert(), "state"_a)
      .def(
          "abandon",
          [](FrameCache& cache, const FrameArray& frames) { cache.abandon(span(frames)); },
          "frames"_a.noconvert())
      .def(
          "forget", [](FrameCache& cache, const SlotArray& slots) { cache.forget(span(slots)); },
          "slots"_a.noconvert())
      .def("audit", &FrameCache::audit);
}

}  // namespace ssdkv
