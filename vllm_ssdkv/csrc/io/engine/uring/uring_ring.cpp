#include "io/engine/uring/uring_ring.hpp"

#include <poll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>

namespace ssdkv {
namespace {

// Of memory that is registered in one piece. The kernel takes up to 1 GiB, and 16384 pieces.
constexpr uint64_t kChunk = uint64_t{64} << 20;

struct TaskRun {
  unsigned flags;
  const char* name;
};

// Completions run in the thread that waits for them (6.1), or at least without interrupting it
// (5.19). SQPOLL is left out on purpose: its kernel thread costs more CPU than the calls it saves.
constexpr std::array<TaskRun, 3> kTaskRuns{{
    {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, "DEFER_TASKRUN"},
    {IORING_SETUP_COOP_TASKRUN, "COOP_TASKRUN"},
    {0, "default"},
}};

[[noreturn]] void fail(int error, const char* what) {
  throw std::system_error(error, std::generic_category(), what);
}

}  // namespace

void UringRing::set_up(unsigned depth) {
  int result = 0;
  for (const TaskRun& task_run : kTaskRuns) {
    io_uring_params params{};
    params.flags = IORING_SETUP_CQSIZE | IORING_SETUP_CLAMP | task_run.flags;
    params.cq_entries = 2 * (depth + 1);
    setup_.task_run = task_run.name;
    result = io_uring_queue_init_params(depth + 1, &ring_, &params);
    if (result != -EINVAL) break;
  }
  if (result < 0) fail(-result, "io_uring_setup");
  // The newest of the features that this class relies on: polls that stay armed came with it.
  if ((ring_.features & IORING_FEAT_RSRC_TAGS) == 0) {
    io_uring_queue_exit(&ring_);
    fail(ENOSYS, "io_uring of a kernel before 5.13");
  }
}

UringRing::UringRing(const std::vector<int>& files, ArenaRange arena, unsigned depth, int wake_fd)
    : files_(files), arena_(arena), wake_fd_(wake_fd) {
  set_up(depth);
  setup_.register_files_errno =
      -io_uring_register_files(&ring_, files_.data(), static_cast<unsigned>(files_.size()));
  for (uint64_t from = 0; from < arena_.bytes; from += kChunk) {
    const uint64_t bytes = std::min(kChunk, arena_.bytes - from);
    chunks_.push_back({{arena_.base + from, bytes}, bytes, false});
  }
  const std::vector<iovec> empty(chunks_.size());
  setup_.register_buffers_errno =
      -io_uring_register_buffers(&ring_, empty.data(), static_cast<unsigned>(empty.size()));
  // What cannot start without blocking goes to kernel threads. There must be one per request, or a
  // hung device would take them all and stop the others.
  std::array<unsigned, 2> workers{depth, depth};
  (void)io_uring_register_iowq_max_workers(&ring_, workers.data());
}

UringRing::~UringRing() {
  // Closing the ring does this too, but later, in the background: the lock of a data file would
  // outlive the engine for a moment.
  if (setup_.register_files_errno == 0) (void)io_uring_unregister_files(&ring_);
  if (setup_.register_buffers_errno == 0) (void)io_uring_unregister_buffers(&ring_);
  io_uring_queue_exit(&ring_);
}

bool UringRing::use_registered(const Piece& piece) noexcept {
  const uint64_t index = piece.buffer / kChunk;
  if (index != (piece.buffer + piece.length - 1) / kChunk) return false;
  Chunk& chunk = chunks_[index];
  if (chunk.to_move > 0) {
    chunk.to_move -= std::min<uint64_t>(chunk.to_move, piece.length);
    if (chunk.to_move == 0) register_chunk(index);
  }
  return chunk.registered;
}

void UringRing::register_chunk(size_t index) noexcept {
  if (setup_.register_buffers_errno != 0) return;
  const __u64 tag = 0;
  const int done = io_uring_register_buffers_update_tag(&ring_, static_cast<unsigned>(index),
                                                        &chunks_[index].memory, &tag, 1);
  chunks_[index].registered = done == 1;
  ++(done == 1 ? registered_ : refused_);
}

bool UringRing::prepare(const Piece& piece, uint64_t tag) noexcept {
  const bool fixed_buffer = piece.memory.empty() && use_registered(piece);
  io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
  if (sqe == nullptr) return false;
  const bool fixed_file = setup_.register_files_errno == 0;
  const int file = fixed_file ? piece.file : files_[piece.file];
  std::byte* const memory = arena_.base + piece.buffer;
  if (!piece.memory.empty()) {
    const auto stretches = static_cast<unsigned>(piece.memory.size());
    if (piece.op == Op::kRead) {
      io_uring_prep_readv(sqe, file, piece.memory.data(), stretches, piece.offset);
    } else {
      io_uring_prep_writev(sqe, file, piece.memory.data(), stretches, piece.offset);
    }
  } else if (fixed_buffer) {
    const auto index = static_cast<int>(piece.buffer / kChunk);
    if (piece.op == Op::kRead) {
      io_uring_prep_read_fixed(sqe, file, memory, piece.length, piece.offset, index);
    } else {
      io_uring_prep_write_fixed(sqe, file, memory, piece.length, piece.offset, index);
    }
  } else if (piece.op == Op::kRead) {
    io_uring_prep_read(sqe, file, memory, piece.length, piece.offset);
  } else {
    io_uring_prep_write(sqe, file, memory, piece.length, piece.offset);
  }
  if (fixed_file) sqe->flags |= IOSQE_FIXED_FILE;
  sqe->user_data = tag;
  return true;
}

bool UringRing::prepare_wake() noexcept {
  io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
  if (sqe == nullptr) return false;
  io_uring_prep_poll_multishot(sqe, wake_fd_, POLLIN);
  sqe->user_data = kWakeTag;
  return true;
}

int UringRing::enter(unsigned completions, std::chrono::nanoseconds timeout) noexcept {
  int result = 0;
  if (completions == 0) {
    result = io_uring_submit_and_get_events(&ring_);
  } else if (timeout.count() == 0) {
    result = io_uring_submit_and_wait(&ring_, completions);
  } else {
    io_uring_cqe* cqe = nullptr;
    __kernel_timespec limit{timeout.count() / 1000000000, timeout.count() % 1000000000};
    result = io_uring_submit_and_wait_timeout(&ring_, &cqe, completions, &limit, nullptr);
  }
  return result >= 0 || result == -ETIME || result == -EINTR ? 0 : result;
}

}  // namespace ssdkv
