// Every native engine through the same tests, from many threads. A new one needs one line in
// kEngines.
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <stdexcept>
#include <system_error>

#include "io/engine/file.hpp"
#include "io/engine/threads/threads_engine.hpp"
#if SSDKV_URING
#include "io/engine/uring/uring_engine.hpp"
#endif
#include "suite.hpp"

namespace ssdkv::test {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kDevices = 3;
constexpr double kPatience = 60.0;

// What the tests need of an engine.
class Engine {
 public:
  virtual ~Engine() = default;
  virtual std::shared_ptr<Batch> submit(Op op, const RequestArrays& arrays,
                                        bool joined = false) = 0;
  virtual std::vector<std::pair<std::string, uint64_t>> statistics() const = 0;
  virtual bool close(double timeout_s) = 0;
};

template <class Native>
class Wrapped : public Engine {
 public:
  template <class... Args>
  explicit Wrapped(const Args&... args) : native_(args...) {}
  std::shared_ptr<Batch> submit(Op op, const RequestArrays& arrays, bool joined) override {
    return native_.submit(op, arrays, joined);
  }
  std::vector<std::pair<std::string, uint64_t>> statistics() const override {
    return native_.statistics();
  }
  bool close(double timeout_s) override { return native_.close(timeout_s); }

 private:
  Native native_;
};

// Memory that begins at a page, and ends where the next byte is not mapped.
class Memory {
 public:
  explicit Memory(size_t nbytes) : nbytes_(nbytes) {
    void* all =
        mmap(nullptr, nbytes + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(all != MAP_FAILED, "memory");
    data_ = static_cast<std::byte*>(all);
    check(mprotect(data_ + nbytes, kPage, PROT_NONE) == 0, "a guard page");
  }
  ~Memory() { munmap(data_, nbytes_ + kPage); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::byte* data() { return data_; }
  size_t size() const { return nbytes_; }
  void fill(size_t offset, size_t nbytes, uint64_t seed) {
    Random random(seed);
    for (size_t i = 0; i < nbytes; i += sizeof(uint64_t)) {
      const uint64_t value = random(UINT64_MAX);
      std::memcpy(data_ + offset + i, &value, sizeof(value));
    }
  }

 private:
  size_t nbytes_;
  std::byte* data_;
};

// Files without a name, on the disk of the current directory. Direct I/O where it is possible.
class Devices {
 public:
  explicit Devices(size_t nbytes) {
    for (size_t i = 0; i < kDevices; ++i) {
      const std::string name = "native_tests." + std::to_string(getpid()) + "." + std::to_string(i);
      int fd = open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_DIRECT, 0600);
      if (fd < 0) fd = open(name.c_str(), O_RDWR | O_CREAT, 0600);
      check(fd >= 0, "a file");
      std::filesystem::remove(name);
      check(preallocate(fd, nbytes) == 0 || ftruncate(fd, static_cast<off_t>(nbytes)) == 0, "room");
      fds.push_back(fd);
    }
  }
  ~Devices() {
    for (const int fd : fds) close(fd);
  }
  Devices(const Devices&) = delete;
  Devices& operator=(const Devices&) = delete;

  std::vector<int> fds;
};

using Make = std::unique_ptr<Engine> (*)(const std::vector<int>& fds, std::byte* arena,
                                         size_t arena_bytes, unsigned queue_depth);

// A read of the first page of memory by the first device, that does not end before release().
struct Hang {
  int fd;  // of the device
  std::function<void()> release;
};

struct Kind {
  const char* name;
  Make make;
  Hang (*hang)(Memory& memory, const Devices& devices);
};

// The first touch of the memory hangs until release().
Hang hung_memory(Memory& memory, const Devices& devices) {
  const int maker = open("/dev/userfaultfd", O_RDWR | O_CLOEXEC);
  if (maker < 0) skip("/dev/userfaultfd: " + std::string(std::strerror(errno)));
  const int fd = ioctl(maker, USERFAULTFD_IOC_NEW, O_CLOEXEC | O_NONBLOCK);
  close(maker);
  uffdio_api api{};
  api.api = UFFD_API;
  uffdio_register range{};
  range.range = {reinterpret_cast<uint64_t>(memory.data()), kPage};
  range.mode = UFFDIO_REGISTER_MODE_MISSING;
  if (fd < 0 || ioctl(fd, UFFDIO_API, &api) != 0 || ioctl(fd, UFFDIO_REGISTER, &range) != 0) {
    skip("userfaultfd: " + std::string(std::strerror(errno)));
  }
  return {devices.fds[0], [fd] { close(fd); }};
}

#if SSDKV_URING
// io_uring reads a pipe as if it were a device: a request that the kernel has and does not end. (It
// would touch memory as above in the one thread that serves all devices.)
Hang hung_pipe(Memory&, const Devices&) {
  int ends[2];
  check(pipe(ends) == 0, "a pipe");
  return {ends[0], [writer = ends[1]] {
            const std::vector<char> page(kPage);
            check(write(writer, page.data(), kPage) == kPage, "a page comes");
          }};
}
#endif

template <class Native>
std::unique_ptr<Engine> make(const std::vector<int>& fds, std::byte* arena, size_t nbytes,
                             unsigned queue_depth) {
  try {
    return std::make_unique<Wrapped<Native>>(fds, reinterpret_cast<uint64_t>(arena),
                                             uint64_t{nbytes}, queue_depth);
  } catch (const std::system_error& error) {
    skip(error.what());  // a kernel without io_uring, say
  }
}

const Kind kEngines[] = {
    {"threads", make<ThreadsEngine>, hung_memory},
#if SSDKV_URING
    {"uring", make<UringEngine>, hung_pipe},
#endif
};

struct Requests {
  std::vector<uint16_t> device;
  std::vector<uint64_t> offset;
  std::vector<uint32_t> length;
  std::vector<uint64_t> buffer;

  void add(size_t to, size_t from, size_t pages, size_t memory) {
    device.push_back(static_cast<uint16_t>(to));
    offset.push_back(from * kPage);
    length.push_back(static_cast<uint32_t>(pages * kPage));
    buffer.push_back(memory * kPage);
  }
  RequestArrays arrays() const {
    return {device.data(), offset.data(), length.data(), buffer.data(), device.size()};
  }
};

bool all(const std::vector<int32_t>& results, const std::vector<uint32_t>& lengths) {
  return std::equal(results.begin(), results.end(), lengths.begin(), lengths.end(),
                    [](int32_t got, uint32_t asked) { return got == static_cast<int32_t>(asked); });
}

uint64_t total(const Engine& engine, const std::string& what) {
  uint64_t sum = 0;
  for (const auto& [name, value] : engine.statistics()) {
    if (name.rfind(what + ".", 0) == 0) sum += value;
  }
  return sum;
}

// Every thread writes its own part of files and memory, reads it back elsewhere, and compares.
void many_threads(const Kind& kind) {
  constexpr size_t kThreads = 4, kPages = 48, kRounds = 12;
  Memory memory(kThreads * 2 * kPages * kPage);
  Devices devices(kThreads * kPages * kPage);
  const auto engine = kind.make(devices.fds, memory.data(), memory.size(), 4);
  std::atomic<bool> over{false};
  std::atomic<uint64_t> bytes{0};
  in_threads(kThreads + 1, [&](unsigned thread) {
    if (thread == kThreads) {
      while (!over.load()) {
        check(total(*engine, "read_requests") <= total(*engine, "read_submitted"),
              "ended <= begun");
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      return;
    }
    Random random(thread);
    const size_t written = thread * 2 * kPages, read = written + kPages;
    for (size_t round = 0; round < kRounds; ++round) {
      memory.fill(written * kPage, kPages * kPage, 1000 * thread + round);
      Requests out, in;
      for (size_t at = 0; at < kPages;) {
        const size_t pages = std::min(kPages - at, 1 + random(5));
        const size_t device = random(kDevices);
        out.add(device, thread * kPages + at, pages, written + at);
        in.add(device, thread * kPages + at, pages, read + at);
        at += pages;
      }
      auto batch = engine->submit(Op::kWrite, out.arrays(), round % 2 == 0);
      check(batch->wait_until(deadline_after(kPatience)), "writes end");
      check(all(batch->results(), out.length), "writes are whole");
      batch = engine->submit(Op::kRead, in.arrays(), round % 3 == 0);
      check(batch->wait_until(deadline_after(kPatience)), "reads end");
      check(all(batch->results(), in.length), "reads are whole");
      check(std::memcmp(memory.data() + written * kPage, memory.data() + read * kPage,
                        kPages * kPage) == 0,
            "what was written is read");
      bytes.fetch_add(kPages * kPage);
    }
    if (thread == 0) over.store(true);
  });
  check(total(*engine, "read_bytes") == bytes.load(), "bytes are counted");
  check(total(*engine, "write_bytes") == bytes.load(), "bytes are counted");
  check(total(*engine, "read_errors") == 0, "no errors");
  check(engine->close(kPatience), "it ends");
  check(engine->close(0.0), "and has ended");
}

// One batch of all devices, waited for and looked at by several threads at once.
void many_waiters(const Kind& kind) {
  constexpr size_t kPages = 256;
  Memory memory(kPages * kPage);
  Devices devices(kPages * kPage);
  const auto engine = kind.make(devices.fds, memory.data(), memory.size(), 2);
  Requests reads;
  for (size_t i = 0; i < kPages; ++i) reads.add(i % kDevices, i, 1, i);
  for (int round = 0; round < 10; ++round) {
    const auto batch = engine->submit(Op::kRead, reads.arrays());
    in_threads(4, [&](unsigned thread) {
      while (!batch->done()) {
        (void)batch->results();
        (void)batch->wait_until(deadline_after(thread * 0.001));
      }
      check(all(batch->results(), reads.length), "every waiter sees all results");
    });
  }
  check(engine->close(kPatience), "it ends");
}

void failures(const Kind& kind) {
  Memory memory(8 * kPage);
  Devices devices(4 * kPage);
  const std::string name = "native_tests." + std::to_string(getpid()) + ".ro";
  check(close(open(name.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600)) == 0, "a file");
  const int read_only = open(name.c_str(), O_RDONLY);
  check(read_only >= 0, "a file that cannot be written");
  std::filesystem::remove(name);
  auto fds = devices.fds;
  fds.push_back(read_only);
  const auto engine = kind.make(fds, memory.data(), memory.size(), 2);
  close(read_only);  // the engine has descriptors of its own

  Requests reads;
  reads.add(0, 2, 4, 0);  // two pages, then the end of the file
  reads.add(1, 0, 1, 4);
  reads.add(2, 100, 1, 5);  // far behind the end
  auto batch = engine->submit(Op::kRead, reads.arrays());
  check(batch->wait_until(deadline_after(kPatience)), "reads end");
  check(batch->results() == std::vector<int32_t>{2 * kPage, kPage, 0}, "short reads are short");
  Requests writes;
  writes.add(3, 0, 1, 0);
  writes.add(0, 0, 1, 1);
  batch = engine->submit(Op::kWrite, writes.arrays());
  check(batch->wait_until(deadline_after(kPatience)), "writes end");
  check(batch->results() == std::vector<int32_t>{-EBADF, kPage}, "a failure hits nobody else");
  check(total(*engine, "write_errors") == 1, "it is counted");
  batch = engine->submit(Op::kRead, Requests().arrays());
  check(batch->done() && batch->results().empty(), "an empty batch is done");

  for (const auto& [device, offset, pages, buffer] :
       {std::array<size_t, 4>{4, 0, 1, 0}, {0, 0, 0, 0}, {0, 0, 1, 8}, {0, 0, 9, 0}}) {
    Requests bad = reads;
    bad.add(device, offset, pages, buffer);
    check_throws<std::invalid_argument>([&] { (void)engine->submit(Op::kRead, bad.arrays()); },
                                        "a bad request is refused");
  }
  check(engine->close(kPatience), "it ends");
  check_throws<std::invalid_argument>([&] { (void)engine->submit(Op::kRead, reads.arrays()); },
                                      "a closed engine takes nothing");
}

// Closing in the middle of it: every batch that was accepted ends, whole or cancelled.
void close_under_load(const Kind& kind) {
  constexpr size_t kThreads = 3, kAhead = 6,
                   kPages = 16;  // threads, batches of each, pages of those
  for (int round = 0; round < 8; ++round) {
    Memory memory(kThreads * kAhead * kPages * kPage);
    Devices devices(kPages * kPage);
    const auto engine = kind.make(devices.fds, memory.data(), memory.size(), 3);
    in_threads(kThreads + 1, [&](unsigned thread) {
      if (thread == kThreads) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2 * round));
        check(engine->close(kPatience), "it ends");
        return;
      }
      std::vector<std::shared_ptr<Batch>> batches;
      const auto end = [&batches](size_t which) {
        check(batches[which]->wait_until(deadline_after(kPatience)), "an accepted batch ends");
        for (const int32_t result : batches[which]->results()) {
          check(result == kPage || result == -ECANCELED, "whole or cancelled");
        }
      };
      size_t ended = 0;
      try {
        for (;; ++ended) {
          while (batches.size() < ended + kAhead) {
            const size_t first = (thread * kAhead + batches.size() % kAhead) * kPages;
            Requests reads;
            for (size_t i = 0; i < kPages; ++i) reads.add(i % kDevices, i, 1, first + i);
            batches.push_back(engine->submit(Op::kRead, reads.arrays()));
          }
          end(ended);
        }
      } catch (const std::invalid_argument&) {
        // Closed: what the loop is for.
      }
      for (; ended < batches.size(); ++ended) end(ended);
    });
  }
}

// A read that hangs in the kernel outlives its engine, and comes back to memory that still exists.
void hung_device(const Kind& kind) {
  Memory memory(16 * kPage);
  Devices devices(16 * kPage);
  const Hang hang = kind.hang(memory, devices);
  auto engine = kind.make({hang.fd, devices.fds[1]}, memory.data(), memory.size(), 1);
  Requests hangs, waits, other;
  hangs.add(0, 0, 1, 0);
  waits.add(0, 0, 1, 8);
  other.add(1, 0, 1, 9);
  const auto hung = engine->submit(Op::kRead, hangs.arrays());
  check(!hung->wait_until(deadline_after(0.2)), "it hangs");
  const auto beside = engine->submit(Op::kRead, other.arrays());
  check(beside->wait_until(deadline_after(kPatience)), "other devices go on");
  const auto behind = engine->submit(Op::kRead, waits.arrays());
  check(!engine->close(0.1), "close notices");
  check(behind->wait_until(deadline_after(kPatience)), "what waited has ended");
  check(behind->results() == std::vector<int32_t>{-ECANCELED}, "cancelled");
  check(hung->results() == std::vector<int32_t>{Batch::kPending}, "what hangs has not");
  engine.reset();
  hang.release();
  check(hung->wait_until(deadline_after(kPatience)), "it comes back");
  check(hung->results() == std::vector<int32_t>{kPage}, "and was read");
}

}  // namespace

Tests engine_tests() {
  Tests tests;
  const std::pair<const char*, void (*)(const Kind&)> all_of_them[] = {
      {"many threads", many_threads},  {"many waiters", many_waiters},
      {"failures", failures},          {"close under load", close_under_load},
      {"a device hangs", hung_device},
  };
  for (const Kind& kind : kEngines) {
    for (const auto& [name, run] : all_of_them) {
      tests.push_back(
          {"engine " + std::string(kind.name) + ": " + name, [run = run, &kind] { run(kind); }});
    }
  }
  return tests;
}

}  // namespace ssdkv::test
