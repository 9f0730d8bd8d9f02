"""Native CPU attention kernels (``csrc/attention``).

Raw addresses are those of torch or numpy memory that the caller keeps alive. Arrays are
C-contiguous, on the CPU, of exactly the stated dtype (numpy or torch; no silent conversion).
Every function blocks until done, releases the GIL and may be called from any thread. It runs on the
OpenMP team that torch has for that thread; ``threads`` bounds it and counts the caller. Dtypes are
``FLOAT32``, ``BFLOAT16`` and ``FLOAT16``; all arithmetic is fp32.

Blocks hold ``[kv_heads][groups]`` pages, ``page_stride`` bytes apart; a page is K
``[page_tokens][head_size]`` followed by V of the same shape; ``block_tokens = groups *
page_tokens``.

All raise ValueError on shapes or numbers that do not fit together and TypeError on arrays of
another dtype or layout.
"""

import numpy as np
import torch
from numpy.typing import NDArray

FLOAT32: int
BFLOAT16: int
FLOAT16: int

def isa() -> str:
    """Name of the instruction set in force: "avx512", "avx2" or "portable"."""

def team_available() -> bool:
    """Whether calls run on the host's OpenMP team; else on the caller's thread alone."""

def isas() -> list[str]:
    """Names this machine can run, best first."""

def set_isa(name: str) -> None:
    """Use another instruction set's kernels, process wide. ValueError if they cannot run here."""

def attend(
    q_address: int,
    q_dtype: int,
    q_stride_bytes: int,
    scale: float,
    m: torch.Tensor | NDArray[np.float32],
    l: torch.Tensor | NDArray[np.float32],
    acc: torch.Tensor | NDArray[np.float32],
    row_query_begin: torch.Tensor | NDArray[np.int32],
    row_query_count: torch.Tensor | NDArray[np.int32],
    row_first_position: torch.Tensor | NDArray[np.int64],
    row_block_begin: torch.Tensor | NDArray[np.int32],
    row_block_end: torch.Tensor | NDArray[np.int32],
    block_base: torch.Tensor | NDArray[np.uint64],
    block_position: torch.Tensor | NDArray[np.int64],
    block_tokens: int,
    page_tokens: int,
    page_stride: int,
    kv_heads: int,
    q_heads: int,
    head_size: int,
    kv_dtype: int,
    threads: int,
) -> None:
    """Attend ragged rows of queries to blocks of KV and update the running softmax in place.

    Queries ``row_query_begin[r] + i``, ``i < row_query_count[r]``, stand at positions
    ``row_first_position[r] + i`` and see the keys at or before their position in blocks
    ``row_block_begin[r]..row_block_end[r]`` of ``block_base`` (absolute address of the layer's
    part) and ``block_position`` (position of the block's first token). Keys that no query of a
    tile may see are not read. Rows must not share queries.

    ``m [T, q_heads]``: running maximum of scaled logits, starts at -inf; ``l [T, q_heads]``:
    running sum of ``exp(logit - m)``, starts at 0; ``acc [T, q_heads, head_size]``: unnormalised
    output, starts at 0. Repeated calls with disjoint sets of blocks add up to attention over
    their union, in any order, up to fp32 rounding; rows that see no key are left as they are. The
    same call with the same ``threads`` gives the same bits.

    Queries are ``[T][q_heads][head_size]`` with tokens ``q_stride_bytes`` apart.
    """

def finish(
    m: torch.Tensor | NDArray[np.float32],
    l: torch.Tensor | NDArray[np.float32],
    acc: torch.Tensor | NDArray[np.float32],
    out_address: int,
    out_dtype: int,
    out_stride_bytes: int,
    lse: torch.Tensor | NDArray[np.float32] | None,
    threads: int,
) -> None:
    """Write ``out = acc / l`` (zeros where ``l`` is 0) and, unless None, ``lse = m + log(l)``.

    ``out [T][q_heads][head_size]`` has its tokens ``out_stride_bytes`` apart; ``lse [T, q_heads]``.
    """

def store_kv(
    key_address: int,
    value_address: int,
    dtype: int,
    key_stride_bytes: int,
    value_stride_bytes: int,
    slot_mapping: torch.Tensor | NDArray[np.int64],
    cache_address: int,
    block_stride_bytes: int,
    page_stride: int,
    block_tokens: int,
    page_tokens: int,
    kv_heads: int,
    head_size: int,
    threads: int,
) -> None:
    """Scatter new K and V ``[T][kv_heads][head_size]`` into blocks.

    ``slot_mapping[t] = block * block_tokens + offset``; negative: the token is skipped. Block
    ``b`` of the layer starts at ``cache_address + b * block_stride_bytes``. No conversion:
    ``dtype`` is that of both sides.
    """

def pack_blocks(
    source: torch.Tensor | NDArray[np.uint64],
    destination: torch.Tensor | NDArray[np.uint64],
    pages: int,
    payload_bytes: int,
    source_stride: int,
    destination_stride: int,
    threads: int,
) -> None:
    """Copy items of ``pages`` pages from ``source[i]`` to ``destination[i]``.

    Zeroes the padding of each destination page.
    """

def unpack_blocks(
    source: torch.Tensor | NDArray[np.uint64],
    destination: torch.Tensor | NDArray[np.uint64],
    pages: int,
    payload_bytes: int,
    source_stride: int,
    destination_stride: int,
    threads: int,
) -> None:
    """As :func:`pack_blocks`, but leaves the destination's padding as it is."""
