"""Native CPU attention kernels (``csrc/attention``).

Raw addresses are those of torch or numpy memory that the caller keeps alive. Arrays are
C-contiguous, on the CPU, of exactly the stated dtype (numpy or torch; no silent conversion).
Every function blocks until done and may be called from any thread. It releases the GIL, but for
those that take microseconds: ``without``, ``compensate``, ``count_choice`` and the clock. It runs
on the OpenMP team that torch has for that thread; ``threads`` bounds it and counts the caller.
Dtypes are ``FLOAT32``, ``BFLOAT16`` and ``FLOAT16``; all arithmetic is fp32.

Blocks hold ``[kv_heads][groups]`` pages, ``page_stride`` bytes apart; a page is K
``[page_tokens][head_size]`` followed by V of the same shape; ``block_tokens = groups *
page_tokens``.

All raise ValueError on shapes or numbers that do not fit together and TypeError on arrays of
another dtype or layout.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

FLOAT32: int
BFLOAT16: int
FLOAT16: int
SPLIT_PAGES: int

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

def attend_pages(
    q_address: int,
    q_dtype: int,
    q_stride_bytes: int,
    scale: float,
    m: torch.Tensor | NDArray[np.float32],
    l: torch.Tensor | NDArray[np.float32],
    acc: torch.Tensor | NDArray[np.float32],
    query_token: torch.Tensor | NDArray[np.int32],
    query_position: torch.Tensor | NDArray[np.int64],
    begin: torch.Tensor | NDArray[np.int32],
    end: torch.Tensor | NDArray[np.int32],
    address: torch.Tensor | NDArray[np.uint64],
    position: torch.Tensor | NDArray[np.int64],
    token_mask: torch.Tensor | NDArray[np.uint8] | None,
    page_tokens: int,
    kv_heads: int,
    q_heads: int,
    head_size: int,
    kv_dtype: int,
    threads: int,
) -> None:
    """As :func:`attend`, for one query per row and lists of pages instead of blocks.

    Query ``query_token[r]`` at ``query_position[r]`` and the query heads of KV head ``h`` see the
    pages ``begin[i]..end[i]``, ``i = r * kv_heads + h``, at absolute addresses ``address``, whose
    first tokens stand at ``position``; and of each page the tokens at or before the query whose
    ``token_mask [pages, page_tokens]`` is not 0. No query may be listed twice.
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

def merge(
    m: torch.Tensor | NDArray[np.float32],
    l: torch.Tensor | NDArray[np.float32],
    acc: torch.Tensor | NDArray[np.float32],
    part_m: torch.Tensor | NDArray[np.float32],
    part_l: torch.Tensor | NDArray[np.float32],
    part_acc: torch.Tensor | NDArray[np.float32],
) -> None:
    """Fold a state over further keys into a state of the same queries; keeps the GIL."""

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

def summarize(
    source: torch.Tensor | NDArray[np.uint64],
    bounds: torch.Tensor | NDArray[np.uint64] | None,
    spread: torch.Tensor | NDArray[np.uint64] | None,
    channels: torch.Tensor | NDArray[np.uint64] | None,
    scales: torch.Tensor | NDArray[np.uint64] | None,
    value_sum: torch.Tensor | NDArray[np.uint64] | None,
    block_tokens: int,
    page_tokens: int,
    page_stride: int,
    kv_heads: int,
    head_size: int,
    dtype: int,
    threads: int,
) -> None:
    """Write summaries of blocks; see ``PageKernels.summarize``."""

def pack_summarized(
    source: NDArray[np.uint64],
    pages: NDArray[np.uint64] | None,
    tail: NDArray[np.uint64],
    page_bytes: int,
    summary_pages: int,
    channel_pages: int,
    scaled: bool,
    spread: bool,
    value_sums: bool,
    block_tokens: int,
    page_tokens: int,
    page_stride: int,
    kv_heads: int,
    head_size: int,
    dtype: int,
    threads: int,
    ordered: NDArray[np.uint8] | None,
    kept: NDArray[np.int32] | None,
    features: NDArray[np.uint64] | None,
    feature_width: int,
) -> None:
    """Copy n blocks of L layers to slots, and make what selectors must know of them.

    ``source [L * n]``: addresses of each layer's part of each block. ``pages [n]``: addresses of
    the slots' first pages of K and V, None to make tails only; ``tail [n]``: those of their tails'
    first pages, ``summary_pages``, then ``channel_pages`` of each layer. Pages are ``page_bytes``
    apart. Without channel pages summaries are bounds, or ``spread``, behind which may be the
    sums of V (``value_sums``); ``scaled`` channels are int8. Tokens of layers that are ``ordered
    [L]`` go into their pages by likeness, but for the first ``kept [n]`` pages: by K or by the
    ``features [L * n]`` of a block, addresses, 0 for none. See
    ``PageKernels.pack_summarized``.
    """

def bound_logits(
    query: NDArray[np.float32],
    scale: float,
    row_begin: NDArray[np.int32],
    row_end: NDArray[np.int32],
    records: NDArray[np.uint64],
    first_page: NDArray[np.int64],
    logits: NDArray[np.float32],
    block_tokens: int,
    page_tokens: int,
    kv_heads: int,
    dtype: int,
    threads: int,
) -> None:
    """Write upper bounds of the scaled logits of each page; see ``ScoringKernels``.

    Tables of logits and scores are laid out as ``sparse/scores.py`` says, here and below.
    """

def spread_logits(
    query: NDArray[np.float32],
    scale: float,
    row_begin: NDArray[np.int32],
    row_end: NDArray[np.int32],
    records: NDArray[np.uint64],
    first_page: NDArray[np.int64],
    logits: NDArray[np.float32],
    block_tokens: int,
    page_tokens: int,
    kv_heads: int,
    dtype: int,
    threads: int,
) -> None:
    """Write logits of pages from mean and variance of their keys; see ``ScoringKernels``."""

def choose_channels(
    query: NDArray[np.float32],
    scale: float,
    kv_heads: int,
    channels: NDArray[np.int32],
    reduced: NDArray[np.float32],
    together: int,
) -> None:
    """Write SparQ's ``channels [rows, kv_heads, r]``, ascending, and the queries of them.

    ``reduced [rows, q_heads, r]`` is scaled, so that its product with K is the approximate logit.
    """

def channel_logits(
    channels: NDArray[np.int32],
    reduced: NDArray[np.float32],
    row_begin: NDArray[np.int32],
    row_end: NDArray[np.int32],
    base: NDArray[np.uint64],
    scales: NDArray[np.uint64] | None,
    window_begin: NDArray[np.int32],
    window_end: NDArray[np.int32],
    window: NDArray[np.uint64],
    window_tokens: NDArray[np.int32],
    first_token: NDArray[np.int64],
    logits: NDArray[np.float32],
    block_tokens: int,
    page_tokens: int,
    page_stride: int,
    head_size: int,
    dtype: int,
    threads: int,
) -> None:
    """Write approximate logits of context, then window. A token's does not depend on its place."""

def weigh(
    logits: NDArray[np.float32],
    first_page: NDArray[np.int64],
    window_lse: NDArray[np.float32] | None,
    weights: NDArray[np.float32],
    window_mass: NDArray[np.float32],
    lse: NDArray[np.float32],
    q_heads: int,
    page_tokens: int,
    threads: int,
) -> None:
    """Write the mean softmax weight of pages and windows; see ``ScoringKernels.weigh``."""

def score_tokens(
    logits: NDArray[np.float32],
    first_token: NDArray[np.int64],
    first_column: NDArray[np.int64],
    score: NDArray[np.float32],
    mass: NDArray[np.float32],
    lse: NDArray[np.float32],
    window_mass: NDArray[np.float32],
    page_tokens: int,
    threads: int,
) -> None:
    """Write scores and masses of context pages; see ``ScoringKernels.score_tokens``."""

def choose(
    score: NDArray[np.float32],
    mass: NDArray[np.float32],
    window_mass: NDArray[np.float32],
    first_column: NDArray[np.int64],
    least: NDArray[np.int32],
    most: NDArray[np.int32],
    sinks: int,
    p: float,
    threads: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
    """Return columns, where each list begins, and masses; see ``ScoringKernels.choose``."""

def cover(
    logits: NDArray[np.float32],
    first_token: NDArray[np.int64],
    lse: NDArray[np.float32],
    window_tokens: NDArray[np.int32],
    pages: NDArray[np.int32],
    begin: NDArray[np.int32],
    token_mask: NDArray[np.uint8] | None,
    alpha: NDArray[np.float32],
    page_tokens: int,
    threads: int,
) -> None:
    """Write softmax masses of chosen tokens and window; see ``ScoringKernels.cover``."""

def without(
    pages: NDArray[np.int32],
    begin: NDArray[np.int32],
    known: NDArray[np.int32],
    known_begin: NDArray[np.int32],
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Lists of pages, ascending, without those of the same lists of ``known``; and their edges."""

def count_choices(
    pages: NDArray[np.int32],
    counts: NDArray[np.float32],
    begin: NDArray[np.int32],
    chosen: NDArray[np.int32],
    chosen_begin: NDArray[np.int32],
    threads: int,
) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int32]]:
    """Counts of pages, which decay, after one more choice: pages, counts and edges of the lists.

    Twice as many as were chosen are kept, those with the highest counts.
    """

def unite(
    pages: NDArray[np.int32],
    begin: NDArray[np.int32],
    others: NDArray[np.int32],
    others_begin: NDArray[np.int32],
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Lists of pages, ascending, with those of the same lists of ``others``; and their edges."""

def best_by_ranks(
    pages: NDArray[np.int32],
    score: NDArray[np.float32],
    begin: NDArray[np.int32],
    counted: NDArray[np.int32],
    counts: NDArray[np.float32],
    counted_begin: NDArray[np.int32],
    most: NDArray[np.int32],
    threads: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Of each list, ``most`` pages of the lowest sum of ranks by score and by count, best first;
    and the edges."""

def compensate(
    l: NDArray[np.float32],
    acc: NDArray[np.float32],
    token: NDArray[np.int64],
    alpha: NDArray[np.float32],
    mean: NDArray[np.float32],
) -> None:
    """See :func:`vllm_ssdkv.attention.compensate.compensate`; ``l`` and ``acc`` of its state."""

def count_choice(
    mass: NDArray[np.float32], token_mask: NDArray[np.uint8] | None
) -> tuple[float, int]:
    """Return the softmax mass that lists leave out, where it is not NaN, and the mask's tokens.

    Args:
        mass: That they cover, [R, kv_heads], as in ``Selection.mass``.
        token_mask: As in ``Selection.token_mask``; None has no tokens.
    """

class AttentionClock:
    """Seconds by part, one of :data:`vllm_ssdkv.kernels.step_clock.PARTS`.

    Used by the thread that runs the forward pass. On a GPU kernels run later than they are called:
    what is measured there is the time of the host.
    """

    def __init__(self) -> None: ...
    def start(self) -> None:
        """Attention of a layer begins."""

    def lap(self, part: int) -> None:
        """What was done since the last call was this part. Raises IndexError: there is none."""

    @property
    def seconds(self) -> Sequence[float]:
        """Of every part, so far."""
