// The C ABI of fpga_offload/generated/ssdkv_fpga.h over the verilated kernels of one shape,
// `attend` and, where it is built, `sparf`: a model of the host's AXI4-Lite writes, and of memory
// behind the AXI4 ports, which is this process's.
//
// Each memory port answers in order, one beat a cycle at most, `latency` cycles after the question.
// With stalls every channel of every port is held back at random, from a seed. A fault makes one
// port answer once with an error, or never again.
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <random>

#include "ssdkv_fpga.h"
#include "verilated.h"

#define SSDKV_STRINGIFY2(x) #x
#define SSDKV_STRINGIFY(x) SSDKV_STRINGIFY2(x)
#define SSDKV_JOIN2(a, b) a##b
#define SSDKV_JOIN(a, b) SSDKV_JOIN2(a, b)
#include SSDKV_STRINGIFY(SSDKV_ATTEND.h)
#ifdef SSDKV_SPARF
#include SSDKV_STRINGIFY(SSDKV_SPARF.h)
#endif

namespace {

constexpr uint32_t kHeadSize = SSDKV_HEAD_SIZE;
constexpr uint32_t kGroup = SSDKV_GROUP;
constexpr uint32_t kBeat = SSDKV_FPGA_BEAT_BYTES;
constexpr uint64_t kAllBytes = ~uint64_t{0};
// Cycles without a beat or a handshake on any memory port, beside those of an answer: the kernel
// hangs. SparF's choice goes over all tokens three times without any.
constexpr uint32_t kPatience = 20'000;
constexpr uint32_t kSparfPatience = 20'000 + 4 * SSDKV_FPGA_MAX_SPARF_TOKENS;
constexpr uint8_t kSlaveError = 2;

// Chances of a stall, in 256ths, and where they come from.
class Stalls {
 public:
  void set(uint32_t seed, uint32_t chance) {
    random_.seed(seed);
    chance_ = chance;
  }
  bool now() { return chance_ != 0 && (random_() & 255u) < chance_; }

 private:
  std::minstd_rand random_;
  uint32_t chance_ = 0;
};

// A port's fault in the calls to come, after some answers: an error once, or silence.
class Fault {
 public:
  void set(uint32_t answers, bool silent) {
    armed_ = true;
    answers_ = answers;
    silent_ = silent;
  }
  void clear() { armed_ = false; }
  bool silent() const { return due() && silent_; }
  bool error() const { return due() && !silent_; }
  void answered() {
    if (error()) clear();
    if (armed_ && answers_ != 0) --answers_;
  }

 private:
  bool due() const { return armed_ && answers_ == 0; }
  bool armed_ = false;
  uint32_t answers_ = 0;
  bool silent_ = false;
};

// Beats of one port that were asked for and are not answered yet.
class ReadPort {
 public:
  explicit ReadPort(Stalls& stalls, uint32_t beat_bytes = kBeat)
      : stalls_(stalls), beat_bytes_(beat_bytes) {}

  template <class Bit, class Data>
  void before_clock(uint64_t cycle, Bit& arready, Bit& rvalid, Data& rdata, Bit& rresp) {
    arready = !stalls_.now();
    rvalid = !beats_.empty() && beats_.front().due <= cycle && !stalls_.now() && !fault.silent();
    rresp = rvalid && fault.error() ? kSlaveError : 0;
    if (rresp != 0)
      std::memset(&rdata[0], 0, beat_bytes_);
    else if (rvalid)
      std::memcpy(&rdata[0], reinterpret_cast<const void*>(beats_.front().address), beat_bytes_);
  }

  // Returns whether anything moved.
  bool at_clock(uint64_t due, bool asked, uint64_t address, uint32_t more, bool answered) {
    if (asked)
      for (uint32_t beat = 0; beat <= more; ++beat)
        beats_.push_back({address + uint64_t{beat_bytes_} * beat, due});
    if (answered) {
      beats_.pop_front();
      fault.answered();
    }
    return asked || answered;
  }

  void clear() { beats_.clear(); }

  Fault fault;

 private:
  struct Beat {
    uint64_t address;
    uint64_t due;
  };
  Stalls& stalls_;
  uint32_t beat_bytes_;
  std::deque<Beat> beats_;
};

// Bursts of the write port, one after another.
class WritePort {
 public:
  explicit WritePort(Stalls& stalls) : stalls_(stalls) {}

  template <class Bit>
  void before_clock(uint64_t cycle, Bit& awready, Bit& wready, Bit& bvalid, Bit& bresp) {
    awready = !stalls_.now();
    wready = !stalls_.now();
    bvalid = !answers_.empty() && answers_.front() <= cycle && !stalls_.now() && !fault.silent();
    bresp = bvalid && fault.error() ? kSlaveError : 0;
  }

  template <class Data>
  bool at_clock(uint64_t due, bool asked, uint64_t address, bool written, const Data& data,
                uint64_t strobe, bool last, bool answered) {
    if (asked) next_ = address;
    if (written) {
      auto* to = reinterpret_cast<uint8_t*>(next_);
      const auto* from = reinterpret_cast<const uint8_t*>(&data[0]);
      if (strobe == kAllBytes) std::memcpy(to, from, kBeat);
      for (uint32_t byte = 0; strobe != kAllBytes && byte < kBeat; ++byte)
        if ((strobe >> byte & 1) != 0) to[byte] = from[byte];
      next_ += kBeat;
      if (last) answers_.push_back(due);
    }
    if (answered) {
      answers_.pop_front();
      fault.answered();
    }
    return asked || written || answered;
  }

  void clear() { answers_.clear(); }

  Fault fault;

 private:
  Stalls& stalls_;
  uint64_t next_ = 0;
  std::deque<uint64_t> answers_;
};

// One kernel with its clock and its memory.
template <class Model>
class Machine {
 public:
  Machine(Stalls& stalls, const uint32_t& latency, uint32_t patience)
      : patience_(patience),
        latency_(latency),
        lists_(stalls),
        pages_(stalls),
        channels_(stalls, SSDKV_FPGA_CHANNEL_BEAT_BYTES),
        out_(stalls) {
    reset();
  }

  void reset() {
    lists_.clear();
    pages_.clear();
    channels_.clear();
    out_.clear();
    model->s_awvalid = model->s_wvalid = model->s_bready = model->s_arvalid = model->s_rready = 0;
    model->rst = 1;
    for (int count = 0; count < 20; ++count) tick();
    model->rst = 0;
  }

  // One cycle. Returns whether a memory port moved.
  bool tick() {
    auto& m = *model;
    lists_.before_clock(cycle_, m.list_arready, m.list_rvalid, m.list_rdata, m.list_rresp);
    pages_.before_clock(cycle_, m.page_arready, m.page_rvalid, m.page_rdata, m.page_rresp);
    if constexpr (requires { m.channel_arvalid; })
      channels_.before_clock(cycle_, m.channel_arready, m.channel_rvalid, m.channel_rdata,
                             m.channel_rresp);
    out_.before_clock(cycle_, m.out_awready, m.out_wready, m.out_bvalid, m.out_bresp);
    m.clk = 0;
    m.eval();
    bool moved = false;
    if (!m.rst) {
      const uint64_t due = cycle_ + latency_;
      moved |= lists_.at_clock(due, m.list_arvalid && m.list_arready, m.list_araddr, m.list_arlen,
                               m.list_rvalid && m.list_rready);
      moved |= pages_.at_clock(due, m.page_arvalid && m.page_arready, m.page_araddr, m.page_arlen,
                               m.page_rvalid && m.page_rready);
      moved |= out_.at_clock(due, m.out_awvalid && m.out_awready, m.out_awaddr,
                             m.out_wvalid && m.out_wready, m.out_wdata, m.out_wstrb, m.out_wlast,
                             m.out_bvalid && m.out_bready);
      if constexpr (requires { m.channel_arvalid; })
        moved |= channels_.at_clock(due, m.channel_arvalid && m.channel_arready, m.channel_araddr,
                                    m.channel_arlen, m.channel_rvalid && m.channel_rready);
    }
    written_ = m.s_awready && m.s_wready;
    read_ = m.s_rvalid;
    read_data_ = m.s_rdata;
    m.clk = 1;
    m.eval();
    ++cycle_;
    return moved;
  }

  void write(uint32_t address, uint32_t value) {
    model->s_awaddr = address;
    model->s_wdata = value;
    model->s_wstrb = 0xf;
    model->s_awvalid = model->s_wvalid = model->s_bready = 1;
    do tick();
    while (!written_);
    model->s_awvalid = model->s_wvalid = 0;
    while (model->s_bvalid) tick();
  }

  uint32_t read(uint32_t address) {
    model->s_araddr = address;
    model->s_arvalid = model->s_rready = 1;
    tick();
    model->s_arvalid = 0;
    do tick();
    while (!read_);
    return read_data_;
  }

  // From start to done. Returns 0, or the cycles after which it was given up.
  uint32_t run() {
    write(0x00, 1);
    const uint64_t patience = uint64_t{patience_} + latency_;
    uint64_t still = 0;
    while ((read(0x00) & 2) == 0)
      for (int count = 0; count < 16; ++count) {
        still = tick() ? 0 : still + 1;
        if (still > patience) return static_cast<uint32_t>(still);
      }
    return 0;
  }

  // Faults of ports: lists, pages, outputs.
  Fault* fault(uint32_t port) {
    Fault* faults[] = {&lists_.fault, &pages_.fault, &out_.fault};
    return port < 3 ? faults[port] : nullptr;
  }

 private:
  const uint32_t patience_;
  const uint32_t& latency_;
  uint64_t cycle_ = 0;
  ReadPort lists_, pages_, channels_;
  WritePort out_;
  VerilatedContext context_;
  std::unique_ptr<Model> model{new Model(&context_)};
  bool written_ = false;
  bool read_ = false;
  uint32_t read_data_ = 0;
};

// Arguments go to their registers one after another, each followed by a reserved word.
template <class Model>
class Registers {
 public:
  explicit Registers(Machine<Model>& machine) : machine_(machine) {}

  void put(uint64_t value) {
    machine_.write(at_, static_cast<uint32_t>(value));
    machine_.write(at_ + 4, static_cast<uint32_t>(value >> 32));
    at_ += 12;
  }
  void put(uint32_t value) {
    machine_.write(at_, value);
    at_ += 8;
  }

 private:
  Machine<Model>& machine_;
  uint32_t at_ = 0x10;
};

template <class Model>
int32_t finish(Machine<Model>& machine, uint64_t address) {
  auto& status = *reinterpret_cast<ssdkv_fpga_status*>(address);
  if (const uint32_t cycles = machine.run()) {
    status = {};
    status.code = SSDKV_FPGA_STATUS_NO_ANSWER;
    status.index = cycles;
    status.version = SSDKV_FPGA_VERSION;
    machine.reset();
  }
  for (uint32_t port = 0; machine.fault(port) != nullptr; ++port) machine.fault(port)->clear();
  return static_cast<int32_t>(status.code);
}

}  // namespace

struct ssdkv_fpga_device {
  Stalls stalls;
  uint32_t latency = 64;
  Machine<SSDKV_ATTEND> attend{stalls, latency, kPatience};
#ifdef SSDKV_SPARF
  Machine<SSDKV_SPARF> sparf{stalls, latency, kSparfPatience};
#endif
};

extern "C" {

uint32_t ssdkv_fpga_version(void) { return SSDKV_FPGA_VERSION; }

uint32_t ssdkv_fpga_layout(void) { return SSDKV_FPGA_LAYOUT; }

ssdkv_fpga_device* ssdkv_fpga_open(uint32_t head_size, uint32_t group, uint32_t) {
  if (head_size != kHeadSize || group != kGroup) return nullptr;
  return new ssdkv_fpga_device;
}

void ssdkv_fpga_close(ssdkv_fpga_device* device) { delete device; }

// Of the calls to come: seed and chance, in 256ths, of stalls; cycles from a question to its
// answer.
void ssdkv_fpga_rtl_memory(ssdkv_fpga_device* device, uint32_t seed, uint32_t chance,
                           uint32_t latency) {
  device->stalls.set(seed, chance);
  device->latency = latency;
}

// Of the next call: after so many answers port 0 (lists), 1 (pages) or 2 (outputs) of a kernel
// answers once with an error, or with `silent` never again.
void ssdkv_fpga_rtl_fault(ssdkv_fpga_device* device, uint32_t port, uint32_t answers,
                          uint32_t silent) {
  Fault* faults[] = {
      device->attend.fault(port),
#ifdef SSDKV_SPARF
      device->sparf.fault(port),
#endif
  };
  for (Fault* fault : faults)
    if (fault != nullptr) fault->set(answers, silent != 0);
}

int32_t ssdkv_fpga_attend(ssdkv_fpga_device* device, const ssdkv_fpga_attend_args* args) {
  Registers registers(device->attend);
  registers.put(args->q);
  registers.put(args->pages);
  registers.put(args->entries);
  registers.put(args->jobs);
  registers.put(args->out);
  registers.put(args->digests);
  registers.put(args->status);
  registers.put(args->job_count);
  registers.put(args->entry_count);
  registers.put(args->v_offset);
  registers.put(static_cast<uint32_t>(args->scale_log2e));
  registers.put(args->flags);
  return finish(device->attend, args->status);
}

#ifdef SSDKV_SPARF
int32_t ssdkv_fpga_sparf(ssdkv_fpga_device* device, const ssdkv_fpga_sparf_args* args) {
  Registers registers(device->sparf);
  registers.put(args->q);
  registers.put(args->pages);
  registers.put(args->channel_pages);
  registers.put(args->entries);
  registers.put(args->jobs);
  registers.put(args->channels);
  registers.put(args->mean_value);
  registers.put(args->out);
  registers.put(args->masks);
  registers.put(args->choices);
  registers.put(args->status);
  registers.put(args->job_count);
  registers.put(args->entry_count);
  registers.put(args->channel_count);
  registers.put(args->block_tokens);
  registers.put(args->page_tokens);
  registers.put(args->keep_channels);
  registers.put(args->channel_group);
  registers.put(args->sinks);
  registers.put(args->v_offset);
  registers.put(static_cast<uint32_t>(args->scale));
  registers.put(static_cast<uint32_t>(args->scale_log2e));
  registers.put(args->flags);
  return finish(device->sparf, args->status);
}
#else
int32_t ssdkv_fpga_sparf(ssdkv_fpga_device*, const ssdkv_fpga_sparf_args* args) {
  auto& status = *reinterpret_cast<ssdkv_fpga_status*>(args->status);
  status = {};
  status.code = SSDKV_FPGA_STATUS_SHAPE;
  status.version = SSDKV_FPGA_VERSION;
  return SSDKV_FPGA_STATUS_SHAPE;
}
#endif

}  // extern "C"
