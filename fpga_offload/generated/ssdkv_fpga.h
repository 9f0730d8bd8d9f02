/* Generated from fpga_offload/description.py by `ssdkv lab docs write`; do not edit.
 *
 * C ABI of kernels in a shared library. Addresses are those of the process, as 64 bits.
 */
#ifndef SSDKV_FPGA_ABI_H
#define SSDKV_FPGA_ABI_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SSDKV_FPGA_VERSION 1u
#define SSDKV_FPGA_PAGE_TOKENS 16u
#define SSDKV_FPGA_BLOCK_TOKENS 128u
#define SSDKV_FPGA_BEAT_BYTES 64u
#define SSDKV_FPGA_CHANNEL_BEAT_BYTES 32u
#define SSDKV_FPGA_SCORE_TOKENS 16u
#define SSDKV_FPGA_MAX_GROUP 8u
#define SSDKV_FPGA_MAX_JOB_ENTRIES 4096u
#define SSDKV_FPGA_MAX_SPARF_TOKENS 65536u
#define SSDKV_FPGA_MAX_JOBS 1048576u
/* Fingerprint of all arguments and records. */
#define SSDKV_FPGA_LAYOUT 0x1431e759u

#define SSDKV_FPGA_FLAG_BFLOAT16 1u
#define SSDKV_FPGA_FLAG_MASK 2u
#define SSDKV_FPGA_FLAG_CHECKSUM 4u
#define SSDKV_FPGA_FLAG_BY_PAGE 8u
#define SSDKV_FPGA_FLAG_ATTEND 16u
#define SSDKV_FPGA_FLAG_WINDOW 32u
#define SSDKV_FPGA_FLAG_MEAN_VALUE 64u

#define SSDKV_FPGA_STATUS_OK 0
#define SSDKV_FPGA_STATUS_JOB_ENTRIES 1
#define SSDKV_FPGA_STATUS_JOB_LENGTH 2
#define SSDKV_FPGA_STATUS_ENTRY_ADDRESS 3
#define SSDKV_FPGA_STATUS_ENTRY_TOKENS 4
#define SSDKV_FPGA_STATUS_CHANNEL_ADDRESS 5
#define SSDKV_FPGA_STATUS_ARGUMENT 6
#define SSDKV_FPGA_STATUS_SHAPE 7
#define SSDKV_FPGA_STATUS_MEMORY 8
#define SSDKV_FPGA_STATUS_NO_ANSWER 65535

/* Places of arguments, as a status says them. */
#define SSDKV_FPGA_ATTEND_ARGUMENT_Q 0u
#define SSDKV_FPGA_ATTEND_ARGUMENT_PAGES 1u
#define SSDKV_FPGA_ATTEND_ARGUMENT_ENTRIES 2u
#define SSDKV_FPGA_ATTEND_ARGUMENT_JOBS 3u
#define SSDKV_FPGA_ATTEND_ARGUMENT_OUT 4u
#define SSDKV_FPGA_ATTEND_ARGUMENT_DIGESTS 5u
#define SSDKV_FPGA_ATTEND_ARGUMENT_STATUS 6u
#define SSDKV_FPGA_ATTEND_ARGUMENT_JOB_COUNT 7u
#define SSDKV_FPGA_ATTEND_ARGUMENT_ENTRY_COUNT 8u
#define SSDKV_FPGA_ATTEND_ARGUMENT_V_OFFSET 9u
#define SSDKV_FPGA_ATTEND_ARGUMENT_SCALE_LOG2E 10u
#define SSDKV_FPGA_ATTEND_ARGUMENT_FLAGS 11u
#define SSDKV_FPGA_SPARF_ARGUMENT_Q 0u
#define SSDKV_FPGA_SPARF_ARGUMENT_PAGES 1u
#define SSDKV_FPGA_SPARF_ARGUMENT_CHANNEL_PAGES 2u
#define SSDKV_FPGA_SPARF_ARGUMENT_ENTRIES 3u
#define SSDKV_FPGA_SPARF_ARGUMENT_JOBS 4u
#define SSDKV_FPGA_SPARF_ARGUMENT_CHANNELS 5u
#define SSDKV_FPGA_SPARF_ARGUMENT_MEAN_VALUE 6u
#define SSDKV_FPGA_SPARF_ARGUMENT_OUT 7u
#define SSDKV_FPGA_SPARF_ARGUMENT_MASKS 8u
#define SSDKV_FPGA_SPARF_ARGUMENT_CHOICES 9u
#define SSDKV_FPGA_SPARF_ARGUMENT_STATUS 10u
#define SSDKV_FPGA_SPARF_ARGUMENT_JOB_COUNT 11u
#define SSDKV_FPGA_SPARF_ARGUMENT_ENTRY_COUNT 12u
#define SSDKV_FPGA_SPARF_ARGUMENT_CHANNEL_COUNT 13u
#define SSDKV_FPGA_SPARF_ARGUMENT_BLOCK_TOKENS 14u
#define SSDKV_FPGA_SPARF_ARGUMENT_PAGE_TOKENS 15u
#define SSDKV_FPGA_SPARF_ARGUMENT_KEEP_CHANNELS 16u
#define SSDKV_FPGA_SPARF_ARGUMENT_CHANNEL_GROUP 17u
#define SSDKV_FPGA_SPARF_ARGUMENT_SINKS 18u
#define SSDKV_FPGA_SPARF_ARGUMENT_V_OFFSET 19u
#define SSDKV_FPGA_SPARF_ARGUMENT_SCALE 20u
#define SSDKV_FPGA_SPARF_ARGUMENT_SCALE_LOG2E 21u
#define SSDKV_FPGA_SPARF_ARGUMENT_FLAGS 22u

/* A page, or 16 tokens of a larger one. Entries come in any order. */
typedef struct {
  /* of K [16, d], from `pages` on; a multiple of 64. All 16 tokens may be read */
  uint64_t address;
  /* valid ones, the first of the page: 1 to 16 */
  uint32_t tokens;
  /* bit t: token t is attended to. Looked at with MASK only */
  uint32_t mask;
} ssdkv_fpga_entry;

/* G queries, and the entries that they attend to. */
typedef struct {
  /* of its entries */
  uint32_t first;
  /* how many; 0 is allowed */
  uint32_t entries;
  /* place of its G queries, in units of G x d elements */
  uint32_t query;
  /* place of its partial, in units of partials */
  uint32_t out;
} ssdkv_fpga_job;

/* G queries, the channels of their context, and its window. */
typedef struct {
  /* as of a job */
  uint32_t query;
  /* place of its partial and of its choice */
  uint32_t out;
  /* of its blocks of channels, in context order */
  uint32_t first_channels;
  /* how many; 0 is allowed */
  uint32_t channel_blocks;
  /* of its context's entries and masks, in context order, one for each 16 tokens; the entries are read with ATTEND only */
  uint32_t first_entry;
  /* of the window's entries, in the same list */
  uint32_t first_window;
  /* how many; at least 1 token in all */
  uint32_t window_entries;
  /* tokens, or pages with BY_PAGE, to choose, sinks included */
  uint32_t keep;
} ssdkv_fpga_sparf_job;

/* What sparf says of one job, beside the masks. */
typedef struct {
  /* per query head: softmax mass of the chosen and the window */
  float alpha[8];
  /* per query head: natural log-sum-exp of all tokens */
  float lse[8];
  /* mean over the query heads: mass of the window */
  float window_mass;
  /* chosen in the context */
  uint32_t tokens;
  /* entries of the context with a chosen token */
  uint32_t pages;
  /* 0 */
  uint32_t reserved[13];
} ssdkv_fpga_choice;

/* Written at the end of a call, errors included. */
typedef struct {
  /* of Status */
  uint32_t code;
  /* of what is broken */
  uint32_t index;
  /* of the kernel */
  uint32_t version;
  /* done */
  uint32_t jobs;
  /* from start to done; 0: not known */
  uint64_t cycles;
  /* of 64 bytes read from pages; 0: not known */
  uint64_t beats;
  /* 0 */
  uint32_t reserved[8];
} ssdkv_fpga_status;

/* Exact attention of any number of jobs. */
typedef struct {
  /* queries, 16 bits, [n, G, d] */
  uint64_t q;
  /* base of the entries' addresses; 0 is allowed */
  uint64_t pages;
  /* list of entries */
  uint64_t entries;
  /* list of jobs */
  uint64_t jobs;
  /* partials */
  uint64_t out;
  /* u64 per entry, with CHECKSUM */
  uint64_t digests;
  /* one status record */
  uint64_t status;
  /* jobs, at most 1048576 */
  uint32_t job_count;
  /* entries in the list */
  uint32_t entry_count;
  /* bytes from K to V of an entry: 32 d where pages have 16 tokens; a multiple of 64 */
  uint32_t v_offset;
  /* bits of fp32: scale of the logits x log2 e */
  int32_t scale_log2e;
  /* bits of Flag */
  uint32_t flags;
} ssdkv_fpga_attend_args;

/* SparF: channel scores, argtopk, row filter, and attention to what was chosen. */
typedef struct {
  /* queries, 16 bits, [n, G, d] */
  uint64_t q;
  /* base of the entries' addresses; 0 is allowed */
  uint64_t pages;
  /* base of the channels' addresses */
  uint64_t channel_pages;
  /* list of entries */
  uint64_t entries;
  /* list of sparf jobs */
  uint64_t jobs;
  /* u64 per block of channels: address of K of one KV head, [d, block_tokens], from `channel_pages` on */
  uint64_t channels;
  /* mean V fp32 [d] by out, with MEAN_VALUE */
  uint64_t mean_value;
  /* partials */
  uint64_t out;
  /* u32 per entry: bits of its chosen tokens */
  uint64_t masks;
  /* choices, by out */
  uint64_t choices;
  /* one status record */
  uint64_t status;
  /* jobs, at most 1048576 */
  uint32_t job_count;
  /* entries in the list */
  uint32_t entry_count;
  /* blocks of channels in the list */
  uint32_t channel_count;
  /* tokens of a block of channels, a multiple of 16 */
  uint32_t block_tokens;
  /* tokens of a page, a multiple of 16, for BY_PAGE */
  uint32_t page_tokens;
  /* SparQ's r, 1 to d */
  uint32_t keep_channels;
  /* neighbours chosen together; divides r and d */
  uint32_t channel_group;
  /* tokens, or pages with BY_PAGE, chosen in any case */
  uint32_t sinks;
  /* bytes from K to V of an entry: 32 d where pages have 16 tokens; a multiple of 64 */
  uint32_t v_offset;
  /* bits of fp32: scale of the logits */
  int32_t scale;
  /* bits of fp32: scale of the logits x log2 e */
  int32_t scale_log2e;
  /* bits of Flag */
  uint32_t flags;
} ssdkv_fpga_sparf_args;

typedef struct ssdkv_fpga_device ssdkv_fpga_device;

/* SSDKV_FPGA_VERSION of the library. */
uint32_t ssdkv_fpga_version(void);
/* SSDKV_FPGA_LAYOUT of the library. */
uint32_t ssdkv_fpga_layout(void);
/* Kernels of one shape; of the flags BFLOAT16 counts. NULL: there are none. */
ssdkv_fpga_device* ssdkv_fpga_open(uint32_t head_size, uint32_t group, uint32_t flags);
void ssdkv_fpga_close(ssdkv_fpga_device* device);
/* Run a kernel to its end. One thread at a time per device. The status record is written, and its
 * code is returned. */
int32_t ssdkv_fpga_attend(ssdkv_fpga_device* device,
                          const ssdkv_fpga_attend_args* args);
int32_t ssdkv_fpga_sparf(ssdkv_fpga_device* device,
                          const ssdkv_fpga_sparf_args* args);

#ifdef __cplusplus
}
#endif

#endif
