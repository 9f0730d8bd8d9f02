// Runs the tasks of a call on the host's own OpenMP team. A pool beside it would fight for the
// cores: between parallel regions torch's threads spin for a while instead of sleeping, and a
// decode step is a few hundred regions with a few microseconds between them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ssdkv::attention {

// Called once per task index; `scratch` belongs to the calling thread until it returns. Must not
// throw.
using TeamWork = void (*)(void* context, std::int64_t task, std::byte* scratch);

// Whether the process has an OpenMP runtime that other libraries can call; torch brings one.
// Without it, and in a child of fork(), where a team's threads do not live on, calls run on their
// caller's thread alone.
bool team_available();

// Runs tasks 0..tasks-1 on up to `threads` threads, the caller among them, and returns when all
// have ended. Any thread may call; each has a team of its own.
//
// Throws std::bad_alloc before any task has started.
void run_tasks(std::int64_t tasks, std::int64_t threads, std::size_t scratch_bytes, TeamWork work,
               void* context);

// The same with body(task, scratch).
template <typename Body>
void for_tasks(std::int64_t tasks, std::int64_t threads, std::size_t scratch_bytes,
               const Body& body) {
  run_tasks(
      tasks, threads, scratch_bytes,
      [](void* opaque, std::int64_t task, std::byte* scratch) {
        (*static_cast<const Body*>(opaque))(task, scratch);
      },
      const_cast<Body*>(&body));
}

}  // namespace ssdkv::attention
