// A small persistent thread pool. Not OpenMP: the host process loads its own OpenMP runtime, and
// two of them fight.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ssdkv::attention {

// Called once per task index; `scratch` belongs to the calling thread until it returns. Must not
// throw.
using PoolWork = void (*)(void* context, std::int64_t task, std::byte* scratch);

// Runs tasks 0..tasks-1 on up to `threads` threads, the caller among them, and returns when all
// have ended.
//
// Any thread may call. While one call holds the pool, a second runs all of its tasks on its own
// thread: waiting would be slower. Helpers sleep between calls, ignore signals and may run on every
// CPU that the process may use, whatever the CPU that the caller is pinned to. A child of fork()
// gets a fresh pool.
//
// Throws std::bad_alloc or std::system_error, before any task has started.
void run_tasks(std::int64_t tasks, std::int64_t threads, std::size_t scratch_bytes, PoolWork work,
               void* context);

}  // namespace ssdkv::attention
