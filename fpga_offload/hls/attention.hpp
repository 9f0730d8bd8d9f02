// Kernel `attend`: exact attention of any number of jobs. Arguments as in description.py.
#pragma once

#include "engine.hpp"
#include "ssdkv_fpga_hls.h"

namespace ssdkv {
namespace fpga {

// Checks jobs and entries before any work.
inline Finding check_attend(std::uint64_t base, const entry_t* entries, const job_t* jobs,
                            std::uint32_t job_count, std::uint32_t entry_count) {
  for (std::uint32_t i = 0; i < job_count; ++i) {
#pragma HLS PIPELINE II = 1
    const job_t job = jobs[i];
    if (job.entries > entry_count || job.first > entry_count - job.entries) {
      return {SSDKV_FPGA_STATUS_JOB_ENTRIES, i};
    }
    if (job.entries > kMaxPages) return {SSDKV_FPGA_STATUS_JOB_LENGTH, i};
  }
  for (std::uint32_t i = 0; i < entry_count; ++i) {
#pragma HLS PIPELINE II = 1
    const Finding found = check_entry(base, entries[i], i);
    if (found.code != SSDKV_FPGA_STATUS_OK) return found;
  }
  return {SSDKV_FPGA_STATUS_OK, 0};
}

// Brings a job's entries on chip.
inline void read_entries(const entry_t* entries, const job_t& job, bool mask, pages_t& pages) {
  for (std::uint32_t i = 0; i < job.entries; ++i) {
#pragma HLS PIPELINE II = 1
    const entry_t entry = entries[job.first + i];
    const std::uint32_t wanted = mask ? entry.mask : 0xffffu;
    pages[i].address = entry.address;
    pages[i].live = static_cast<std::uint16_t>(first_tokens(entry.tokens) & wanted);
  }
}

template <int D, int G>
void write_digests(const JobState<D, G>& job, std::uint32_t first, int count,
                   std::uint64_t* digests) {
  for (int i = 0; i < count; ++i) {
#pragma HLS PIPELINE II = 1
    digests[first + static_cast<std::uint32_t>(i)] =
        finish_digest(job.digests[i % kDigestUnits][i / kDigestUnits], 4 * kPageTokens * D);
  }
}

inline Finding check_attend_arguments(int head_size, std::uint32_t dtype, std::uint32_t job_count,
                                      std::uint32_t v_offset, std::uint32_t flags) {
#pragma HLS INLINE
  if ((flags & SSDKV_FPGA_FLAG_BFLOAT16) != dtype) return {SSDKV_FPGA_STATUS_SHAPE, 0};
  if (job_count > SSDKV_FPGA_MAX_JOBS) {
    return {SSDKV_FPGA_STATUS_ARGUMENT, SSDKV_FPGA_ATTEND_ARGUMENT_JOB_COUNT};
  }
  if (!is_v_offset(v_offset, head_size)) {
    return {SSDKV_FPGA_STATUS_ARGUMENT, SSDKV_FPGA_ATTEND_ARGUMENT_V_OFFSET};
  }
  return {SSDKV_FPGA_STATUS_OK, 0};
}

// `base` is where `pages` lies, for the check of addresses; a card's buffer never lies at 0.
template <int D, int G, typename T>
void run_attend(JobState<D, G>& state, std::uint64_t base, SSDKV_FPGA_ATTEND_PARAMETERS) {
  const float scale = float_of(static_cast<std::uint32_t>(scale_log2e));
  const bool mask = (flags & SSDKV_FPGA_FLAG_MASK) != 0;
  const bool checksum = (flags & SSDKV_FPGA_FLAG_CHECKSUM) != 0;
  const float whole[kMaxGroup] = {1, 1, 1, 1, 1, 1, 1, 1};
  const float nothing[D] = {};
  Finding found = check_attend_arguments(D, T::kFlags, job_count, v_offset, flags);
  if (found.code == SSDKV_FPGA_STATUS_OK) {
    found = check_attend(base, entries, jobs, job_count, entry_count);
  }
  const std::uint32_t done = found.code == SSDKV_FPGA_STATUS_OK ? job_count : 0;
  std::uint64_t beats = 0;
  for (std::uint32_t i = 0; i < done; ++i) {
    const job_t job = jobs[i];
    const int count = static_cast<int>(job.entries);
    read_queries<D, G, T>(q, job.query, state);
    read_entries(entries, job, mask, state.pages);
    attend_pages<D, G, T>(pages, count, v_offset, scale, checksum, state);
    write_partial<D, G>(state, whole, nothing, job.out, out);
    if (checksum) write_digests<D, G>(state, job.first, count, digests);
    beats += 2 * Sizes<D>::kHalf * static_cast<std::uint64_t>(count);
  }
  write_status(found.code, found.index, done, beats, status);
}

}  // namespace fpga
}  // namespace ssdkv
