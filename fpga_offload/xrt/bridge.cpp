// XRT's C++ API behind a few C functions, for ctypes: a card, buffers of its memory, runs of its
// kernels. Built by `make fpga` into build/fpga/libssdkv_xrt.so.
//
// Each function that can fail returns 0 or -1, and ssdkv_xrt_error() has the reason, which belongs
// to the calling thread. A card is used by one thread at a time.

#include <xrt/experimental/xrt_xclbin.h>
#include <xrt/xrt_bo.h>
#include <xrt/xrt_device.h>
#include <xrt/xrt_kernel.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>

namespace {

thread_local std::string last_error;

struct Card {
  Card(unsigned index, const std::string& path) : device(index), uuid(device.load_xclbin(path)) {}

  xrt::kernel& kernel(const std::string& name) {
    auto found = kernels.find(name);
    if (found == kernels.end()) {
      found = kernels.emplace(name, xrt::kernel(device, uuid, name)).first;
    }
    return found->second;
  }

  xrt::device device;
  xrt::uuid uuid;
  std::map<std::string, xrt::kernel> kernels;
};

template <typename Work>
int guarded(Work&& work) {
  try {
    work();
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
  } catch (...) {
    last_error = "an error of an unknown type";
  }
  return -1;
}

// Copies a text with its end, or says how much room it needs.
void copy_text(const std::string& text, char* out, std::size_t room) {
  if (text.size() >= room) {
    throw std::length_error("the answer has " + std::to_string(text.size()) + " bytes");
  }
  std::memcpy(out, text.c_str(), text.size() + 1);
}

}  // namespace

extern "C" {

// One argument of a run: a number, or a buffer in place of it.
struct ssdkv_xrt_argument {
  void* buffer;
  std::uint64_t value;
  std::uint32_t bytes;  // of the value: 4 or 8
};

// Of these functions, as the host that calls them wants it.
std::uint32_t ssdkv_xrt_version() { return 2; }

const char* ssdkv_xrt_error() { return last_error.c_str(); }

// What a file of kernels says of itself, without a card: "kernel NAME" lines, each with its
// "argument NAME OFFSET SIZE" lines behind it.
int ssdkv_xrt_inspect(const char* path, char* out, std::size_t room) {
  return guarded([&] {
    std::string text;
    for (const auto& kernel : xrt::xclbin(path).get_kernels()) {
      text += "kernel " + kernel.get_name() + "\n";
      for (const auto& argument : kernel.get_args()) {
        text += "argument " + argument.get_name() + " " + std::to_string(argument.get_offset()) +
                " " + std::to_string(argument.get_size()) + "\n";
      }
    }
    copy_text(text, out, room);
  });
}

// Opens a card and loads the kernels into it.
int ssdkv_xrt_open(unsigned index, const char* path, void** card) {
  return guarded([&] { *card = new Card(index, path); });
}

void ssdkv_xrt_close(void* card) { delete static_cast<Card*>(card); }

int ssdkv_xrt_name(void* card, char* out, std::size_t room) {
  return guarded([&] {
    copy_text(static_cast<Card*>(card)->device.get_info<xrt::info::device::name>(), out, room);
  });
}

// Memory of the card that an argument of a kernel can reach, mapped into this process. With `peer`
// other devices of the PCIe bus read and write it too, and it needs no sync.
int ssdkv_xrt_buffer(void* card, const char* kernel, int argument, std::uint64_t bytes, int peer,
                     void** buffer, void** mapped, std::uint64_t* address) {
  return guarded([&] {
    auto* on = static_cast<Card*>(card);
    const auto group = on->kernel(kernel).group_id(argument);
    const auto flags = peer != 0 ? xrt::bo::flags::p2p : xrt::bo::flags::normal;
    auto made =
        std::make_unique<xrt::bo>(on->device, bytes, flags, static_cast<xrt::memory_group>(group));
    *mapped = made->map();
    *address = made->address();
    *buffer = made.release();
  });
}

void ssdkv_xrt_release(void* buffer) { delete static_cast<xrt::bo*>(buffer); }

int ssdkv_xrt_sync(void* buffer, int to_card, std::uint64_t bytes, std::uint64_t offset) {
  return guarded([&] {
    const auto way = to_card != 0 ? XCL_BO_SYNC_BO_TO_DEVICE : XCL_BO_SYNC_BO_FROM_DEVICE;
    static_cast<xrt::bo*>(buffer)->sync(way, bytes, offset);
  });
}

// Runs a kernel and waits. `state` is XRT's, 4 where it ended well. A run that does not end in time
// stays: its memory must not be freed while the card may write to it.
int ssdkv_xrt_run(void* card, const char* kernel, const ssdkv_xrt_argument* arguments, int count,
                  std::uint32_t timeout_ms, std::uint32_t* state) {
  return guarded([&] {
    auto run = std::make_unique<xrt::run>(static_cast<Card*>(card)->kernel(kernel));
    for (int i = 0; i < count; ++i) {
      const auto& argument = arguments[i];
      if (argument.buffer != nullptr) {
        run->set_arg(i, *static_cast<xrt::bo*>(argument.buffer));
      } else if (argument.bytes == 8) {
        run->set_arg(i, argument.value);
      } else {
        run->set_arg(i, static_cast<std::uint32_t>(argument.value));
      }
    }
    run->start();
    const auto ended = run->wait(std::chrono::milliseconds(timeout_ms));
    *state = static_cast<std::uint32_t>(ended);
    if (ended != ERT_CMD_STATE_COMPLETED && ended != ERT_CMD_STATE_ERROR &&
        ended != ERT_CMD_STATE_ABORT) {
      static_cast<void>(run.release());
    }
  });
}

}  // extern "C"
