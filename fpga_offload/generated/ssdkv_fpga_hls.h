// Generated from fpga_offload/description.py by `ssdkv lab docs write`; do not edit.
#pragma once

// Exact attention of any number of jobs.
#define SSDKV_FPGA_ATTEND_PARAMETERS \
  const beat_t* q, \
  const beat_t* pages, \
  const entry_t* entries, \
  const job_t* jobs, \
  float_beat_t* out, \
  std::uint64_t* digests, \
  status_t* status, \
  std::uint32_t job_count, \
  std::uint32_t entry_count, \
  std::uint32_t v_offset, \
  std::int32_t scale_log2e, \
  std::uint32_t flags

#define SSDKV_FPGA_ATTEND_NAMES \
  q, \
  pages, \
  entries, \
  jobs, \
  out, \
  digests, \
  status, \
  job_count, \
  entry_count, \
  v_offset, \
  scale_log2e, \
  flags

// The same, from the C ABI's structure.
#define SSDKV_FPGA_ATTEND_FROM(args) \
  reinterpret_cast<const beat_t*>((args).q), \
  reinterpret_cast<const beat_t*>((args).pages), \
  reinterpret_cast<const entry_t*>((args).entries), \
  reinterpret_cast<const job_t*>((args).jobs), \
  reinterpret_cast<float_beat_t*>((args).out), \
  reinterpret_cast<std::uint64_t*>((args).digests), \
  reinterpret_cast<status_t*>((args).status), \
  (args).job_count, \
  (args).entry_count, \
  (args).v_offset, \
  (args).scale_log2e, \
  (args).flags

#define SSDKV_FPGA_ATTEND_INTERFACE \
  _Pragma("HLS INTERFACE m_axi port = q bundle = gmem_q offset = slave") \
  _Pragma("HLS INTERFACE s_axilite port = q") \
  _Pragma("HLS INTERFACE m_axi port = pages bundle = gmem_pages offset = slave") \
  _Pragma("HLS INTERFACE s_axilite port = pages") \
  _Pragma("HLS INTERFACE m_axi port = entries bundle = gmem_list offset = slave") \
  _Pragma("HLS INTERFACE s_axilite port = entries") \
  _Pragma("HLS INTERFACE m_axi port = jobs bundle = gmem_list offset = slave") \
  _Pragma("HLS INTERFACE s_axilite port = jobs") \
  _Pragma("HLS INTERFACE m_axi port = out bundle = gmem_out offset = slave") \
  _Pragma("HLS INTERFACE s_axilite port = out") \
  _Pragma("HLS INTERFACE m_axi port = digests bundle = gmem_out offset = slave") \
  _Pragma("HLS INTERFACE s_axilite port = digests") \
  _Pragma("HLS INTERFACE m_axi port = status bundle = gmem_out offset = slave") \
  _Pragma("HLS INTERFACE s_axilite port = status") \
  _Pragma("HLS INTERFACE s_axilite port = job_count") \
  _Pragma("HLS INTERFACE s_axilite port = entry_count") \
  _Pragma("HLS INTERFACE s_axilite port = v_offset") \
  _Pragma("HLS INTERFACE s_axilite port = scale_log2e") \
  _Pragma("HLS INTERFACE s_axilite port = flags") \
  _Pragma("HLS INTERFACE s_axilite port = return")

// SparF: channel scores, argtopk, row filter, and attention to what was chosen.
#define SSDKV_FPGA_SPARF_PARAMETERS \
  const beat_t* q, \
  const beat_t* pages, \
  const channel_beat_t* channel_pages, \
  const entry_t* entries, \
  const sparf_job_t* jobs, \
  const std::uint64_t* channels, \
  const float_beat_t* mean_value, \
  float_beat_t* out, \
  std::uint32_t* masks, \
  choice_t* choices, \
  status_t* status, \
  std::uint32_t job_count, \
  std::uint32_t entry_count, \
  std::uint32_t channel_count, \
  std::uint32_t block_tokens, \
  std::uint32_t page_tokens, \
  std::uint32_t keep_channels, \
  std::uint32_t channel_group, \
  std::uint32_t sinks, \
  std::uint32_t v_offset, \
  std::int32_t scale, \
  std::int32_t scale_log2e, \
  std::uint32_t flags

#define SSDKV_FPGA_SPARF_NAMES \
  q, \
  pages, \
  channel_pages, \
  entries, \
  jobs, \
  channels, \
  mean_value, \
  out, \
  masks, \
  choices, \
  status, \
  job_count, \
  entry_count, \
  channel_count, \
  block_tokens, \
  page_tokens, \
  keep_channels, \
  channel_group, \
  sinks, \
  v_offset, \
  scale, \
  scale_log2e, \
  flags

// The same, from the C ABI's structure.
#define SSDKV_FPGA_SPARF_FROM(args) \
  reinterpret_cast<const beat_t*>((args).q), \
  reinterpret_cast<const beat_t*>((args).pages), \
  reinterpret_cast<const channel_beat_t*>((args).channel_pages), \
  reinterpret_cast<const entry_t*>((args).entries), \
  reinterpret_cast<const sparf_job_t*>((args).jobs), \
  reinterpret_cast<const std::uint64_t*>((args).channels), \
  reinterpret_cast<const float_beat_t*>((args).mean_value), \
  reinterpret_cast<float_beat_t*>((args).out), \
  reinterpret_cast<std::uint32_t*>((args).masks), \
  reinterpret_cast<choice_t*>((args).choices), \
  reinterpret_cast<status_t*>((args).status), \
  (args).job_count, \
  (args).entry_count, \
  (args).channel_count, \
  (args).block_tokens, \
  (args).page_tokens, \
  (args).keep_channels, \
  (args).channel_group, \
  (args).sinks, \
  (args).v_offset, \
  (args).scale, \
  (args).scale_log2e, \
  (args).flags

#define SSDKV_FPGA_SPARF_INTERFACE \
  _Pragma("HLS INTERFACE m_axi port = q bundle = gmem_q offset = slave") \
  _Pragma("HLS INTERFACE s_axilite port = q") \
  _Pragma("HLS INTERFACE m_axi port = pages bundle = gmem_pages offset = slave") \
  _Pragma("HLS INTERFACE s_axilite port = pages") \
  _Pragma("HLS INTERFACE m_axi port = channel_pages bundle = gmem_channels offset = slave") \
  _Pragma("HLS INTERFACE s_axilite port = channel_pages") \
  _Pragma("HLS INTERFACE m_axi port = entries bundle = gmem_list offset = slave") \
  _Pragma("HLS INTERFACE s_axilite port = entries") \
  _Pragma("HLS INTERFACE m_axi port = jobs bundle = gmem_list offset = slave") \
  _Pragma("HLS INTERFACE s_axilite port = jobs") \
  _Pragma("HLS INTERFACE m_axi port = channels bundle = gmem_list offset = slave") \
  _Pragma("HLS INTERFACE s_axilite port = channels") \
  _Pragma("HLS INTERFACE m_axi port = mean_value bundle = gmem_q offset = slave") \
  _Pragma("HLS INTERFACE s_axilite port = mean_value") \
  _Pragma("HLS INTERFACE m_axi port = out bundle = gmem_out offset = slave") \
  _Pragma("HLS INTERFACE s_axilite port = out") \
  _Pragma("HLS INTERFACE m_axi port = masks bundle = gmem_out offset = slave") \
  _Pragma("HLS INTERFACE s_axilite port = masks") \
  _Pragma("HLS INTERFACE m_axi port = choices bundle = gmem_out offset = slave") \
  _Pragma("HLS INTERFACE s_axilite port = choices") \
  _Pragma("HLS INTERFACE m_axi port = status bundle = gmem_out offset = slave") \
  _Pragma("HLS INTERFACE s_axilite port = status") \
  _Pragma("HLS INTERFACE s_axilite port = job_count") \
  _Pragma("HLS INTERFACE s_axilite port = entry_count") \
  _Pragma("HLS INTERFACE s_axilite port = channel_count") \
  _Pragma("HLS INTERFACE s_axilite port = block_tokens") \
  _Pragma("HLS INTERFACE s_axilite port = page_tokens") \
  _Pragma("HLS INTERFACE s_axilite port = keep_channels") \
  _Pragma("HLS INTERFACE s_axilite port = channel_group") \
  _Pragma("HLS INTERFACE s_axilite port = sinks") \
  _Pragma("HLS INTERFACE s_axilite port = v_offset") \
  _Pragma("HLS INTERFACE s_axilite port = scale") \
  _Pragma("HLS INTERFACE s_axilite port = scale_log2e") \
  _Pragma("HLS INTERFACE s_axilite port = flags") \
  _Pragma("HLS INTERFACE s_axilite port = return")
