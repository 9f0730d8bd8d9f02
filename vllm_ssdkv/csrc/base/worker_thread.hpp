// Settings that every thread of this module gets, whoever started it.
#pragma once

#include <pthread.h>

#include <csignal>

namespace ssdkv {

// Let the calling thread run on every CPU that the cgroup allows. vLLM pins its main thread to one
// core and threads inherit that, so all I/O and copies would share the core that computes.
void use_all_cpus() noexcept;

// Block all signals while in scope: a thread started meanwhile keeps them blocked, so Python's
// handlers run on Python's own threads and our system calls are not interrupted.
class BlockSignals {
 public:
  BlockSignals() noexcept {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockSignals(const BlockSignals&) = delete;
  BlockSignals& operator=(const BlockSignals&) = delete;

 private:
  sigset_t before_{};
};

}  // namespace ssdkv
