"""The values that page-mode attention passes around: block layout, block lists, rows and partials.

A *block* holds the keys and values of ``block_tokens`` consecutive tokens of one layer as
``[kv_heads][groups]`` pages; a page is ``K[page_tokens][head_size]`` followed by
``V[page_tokens][head_size]`` and starts every ``page_stride_bytes`` bytes. vLLM's cache holds
blocks with the pages back to back, a slot of the store pads each page to 4 KiB: same layout,
two strides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv import _kernels

IntArray: TypeAlias = NDArray[np.signedinteger] | NDArray[np.unsignedinteger] | torch.Tensor
"""One-dimensional integers, on the host (numpy, CPU tensor) or on the kernels' device."""

_Number = TypeVar("_Number", bound=np.generic)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Element types that every provider of kernels accepts for queries, keys, values and outputs."""

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Element types that blocks may have beside those: K and V divided by a scale of their layer."""

NATIVE_DTYPES = {
    torch.float32: _kernels.FLOAT32,
    torch.float16: _kernels.FLOAT16,
    torch.bfloat16: _kernels.BFLOAT16,
    torch.float8_e4m3fn: _kernels.FLOAT8_E4M3,
    torch.float8_e5m2: _kernels.FLOAT8_E5M2,
}
"""Native kernels' numbers of the element types."""

MAX_HEAD_SIZE = 512
"""Channels of a head that kernels have scratch for (``kMaxHeadSize``)."""

HEAD_SIZE_STEP = 8
"""Heads are whole vectors."""


def head_size_problem(head_size: int) -> str:
    """Reason for page mode to have no kernels for heads of this size; empty if it has."""
    if head_size <= MAX_HEAD_SIZE and head_size % HEAD_SIZE_STEP == 0:
        return ""
    return (
        f"the model's heads have {head_size} channels, and page mode computes with multiples of "
        f"{HEAD_SIZE_STEP} up to {MAX_HEAD_SIZE}"
    )


@dataclass(frozen=True)
class BlockLayout:
    """Layout of a block of one layer, element by element. Immutable, any thread.

    Raises ``ValueError`` when the sizes contradict each other.
    """

    block_tokens: int
    page_tokens: int
    kv_heads: int
    head_size: int
    page_stride_bytes: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        """Check the sizes once, so that no kernel has to."""
        if min(self.block_tokens, self.page_tokens, self.kv_heads, self.head_size) < 1:
            raise ValueError(f"every size of a block layout must be at least 1: {self}")
        if self.block_tokens % self.page_tokens:
            raise ValueError(
                f"block_tokens {self.block_tokens} is not a multiple of page_tokens "
                f"{self.page_tokens}"
            )
        if self.dtype not in NATIVE_DTYPES:
            raise ValueError(f"KV dtype {self.dtype} is none of {tuple(NATIVE_DTYPES)}")
        if (
            self.page_stride_bytes < self.page_payload_bytes
            or self.page_stride_bytes % self.dtype.itemsize
        ):
            raise ValueError(
                f"page_stride_bytes {self.page_stride_bytes} must be a multiple of the element "
                f"size {self.dtype.itemsize} and at least the payload {self.page_payload_bytes}"
            )

    @classmethod
    def unpadded(
        cls,
        block_tokens: int,
        page_tokens: int,
        kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
    ) -> BlockLayout:
        """Layout of vLLM's paged cache: pages back to back."""
        stride = 2 * page_tokens * head_size * dtype.itemsize
        return cls(block_tokens, page_tokens, kv_heads, head_size, stride, dtype)

    def with_page_stride(self, page_stride_bytes: int) -> BlockLayout:
        """Same pages at another stride, e.g. the padded pages of a slot."""
        return BlockLayout(
            self.block_tokens,
            self.page_tokens,
            self.kv_heads,
            self.head_size,
            page_stride_bytes,
            self.dtype,
        )

    @cached_property
    def shape(self) -> _kernels.BlockShape:
        """The layout as native kernels take it; ``ValueError`` if they have none for it."""
        return _kernels.BlockShape(
            self.block_tokens,
            self.page_tokens,
            self.page_stride_bytes,
            self.kv_heads,
            self.head_size,
            NATIVE_DTYPES[self.dtype],
        )

    @property
    def groups(self) -> int:
        """Pages per KV head."""
        return self.block_tokens // self.page_tokens

    @property
    def page_payload_bytes(self) -> int:
        """Used bytes of a page: K then V."""
        return 2 * self.page_tokens * self.head_size * self.dtype.itemsize

    @property
    def page_stride(self) -> int:
        """Elements from one page to the next."""
        return self.page_stride_bytes // self.dtype.itemsize

    @cached_property
    def block_bytes(self) -> int:
        """Bytes from the first page's start to the last page's end, its padding included."""
        return self.kv_heads * self.groups * self.page_stride_bytes

    @property
    def payload_bytes(self) -> int:
        """Bytes of K and V of a block."""
        return self.kv_heads * self.groups * self.page_payload_bytes

    def check_cache(self, cache: torch.Tensor) -> int:
        """Elements between blocks of ``cache [num_blocks, ...]``; ``ValueError`` unless it holds
        blocks of this layout."""
        stride = block_stride(cache)
        held = math.prod(cache.shape[1:]) * cache.itemsize
        if cache.dtype != self.dtype or (held < self.block_bytes and cache.shape[0]):
            raise ValueError(
                f"a cache of {cache.dtype} with {held} bytes per block cannot hold {self} "
                f"({self.block_bytes} bytes)"
            )
        return stride


@dataclass(frozen=True, slots=True)
class BlockSource:
    """B blocks of one layer that rows attend over. Holds references, copies nothing.

    ``tensor`` is the memory that the blocks lie in (any shape; addressed as a flat array of KV
    elements from ``data_ptr()``), and ``base`` int64 ``[B]`` the element offset of each block's
    first page in it. If ``tensor`` is ``None``, ``base`` holds absolute addresses (bytes, uint64),
    which lets one list mix blocks of vLLM's cache and of the DRAM arena (on a GPU: of pinned host
    memory); the caller keeps that memory alive. ``position`` int64 ``[B]`` is the position in the
    request of each block's token 0. With ``digests``, uint64 ``[B, pages]``, nobody has checked the
    pages yet: only kernels that compare these may attend to them.
    """

    tensor: torch.Tensor | None
    base: IntArray
    position: IntArray
    digests: NDArray[np.uint64] | None = None

    def __post_init__(self) -> None:
        """Raise ``ValueError`` unless both arrays are one-dimensional and of one length."""
        if len(self.base.shape) != 1 or tuple(self.base.shape) != tuple(self.position.shape):
            raise ValueError(
                f"base {tuple(self.base.shape)} and position {tuple(self.position.shape)} must "
                "both be [B]"
            )

    @classmethod
    def of_cache(cls, cache: torch.Tensor, block_ids: IntArray, position: IntArray) -> BlockSource:
        """Blocks ``block_ids`` of a layer's cache ``[num_blocks, ...]``, on any device."""
        block_stride(cache)
        ids = block_ids if isinstance(block_ids, torch.Tensor) else np.asarray(block_ids, np.int64)
        return cls(cache, ids * cache.stride(0), position)

    def to(self, device: torch.device) -> BlockSource:
        """The same blocks, in the same memory, with ``base`` and ``position`` on ``device``."""
        return BlockSource(
            self.tensor,
            on_device(self.base, torch.int64, device),
            on_device(self.position, torch.int64, device),
        )


def block_stride(cache: torch.Tensor) -> int:
    """Elements between blocks of ``cache [num_blocks, ...]``; ``ValueError`` if one has holes."""
    shape, stride = cache.shape, cache.stride()
    # Blocks mostly are flat: asking a view of one of them takes ten times as long.
    flat = len(shape) == 2 and (stride[1] == 1 or shape[1] == 1)
    if len(shape) < 2 or not (flat or shape[0] == 0 or cache[0].is_contiguous()):
        raise ValueError(
            f"a cache must be [num_blocks, ...] with contiguous blocks, got {tuple(cache.shape)} "
            f"with strides {stride}"
        )
    return stride[0]


@dataclass(frozen=True)
class Rows:
    """R ragged query rows, each with its range of blocks in a :class:`BlockSource`.

    Row r has the queries ``query_begin[r] .. + query_count[r]`` (int32) at the positions
    ``first_position[r] + i`` (int64) and attends over the blocks ``block_begin[r] ..
    block_end[r]`` (int32, end exclusive). No query may belong to two rows of one call.
    ``max_queries`` and ``max_blocks`` bound the counts over all rows; they size a launch, so that
    no device value has to be read back.
    """

    query_begin: IntArray
    query_count: IntArray
    first_position: IntArray
    block_begin: IntArray
    block_end: IntArray
    max_queries: int
    max_blocks: int
    _bound: _kernels.Rows | None = None

    @classmethod
    def build(
        cls,
        query_begin: Sequence[int] | IntArray,
        query_count: Sequence[int] | IntArray,
        first_position: Sequence[int] | IntArray,
        block_begin: Sequence[int] | IntArray,
        block_end: Sequence[int] | IntArray,
    ) -> Rows:
        """Rows from host integers, [R]; raises ``ValueError`` if the lengths differ, or a number of
        queries or blocks is negative."""
        begin = np.ascontiguousarray(query_begin, np.int32)
        count = np.ascontiguousarray(query_count, np.int32)
        first = np.ascontiguousarray(first_position, np.int64)
        low = np.ascontiguousarray(block_begin, np.int32)
        high = np.ascontiguousarray(block_end, np.int32)
        if not begin.ndim == count.ndim == first.ndim == low.ndim == high.ndim == 1:
            raise ValueError("every array of the rows must be one-dimensional")
        made = _kernels.Rows(begin, count, first, low, high)
        return cls(begin, count, first, low, high, made.max_queries, made.max_pages, made)

    @cached_property
    def bound(self) -> _kernels.Rows:
        """The rows, which lie on the host, as native kernels take them: checked."""
        return self._bound or _kernels.Rows(
            np.ascontiguousarray(self.query_begin, np.int32),
            np.ascontiguousarray(self.query_count, np.int32),
            np.ascontiguousarray(self.first_position, np.int64),
            np.ascontiguousarray(self.block_begin, np.int32),
            np.ascontiguousarray(self.block_end, np.int32),
        )

    def to(self, device: torch.device) -> Rows:
        """The same rows as tensors on ``device``: once per step, then used by every layer."""
        return Rows(
            on_device(self.query_begin, torch.int32, device),
            on_device(self.query_count, torch.int32, device),
            on_device(self.first_position, torch.int64, device),
            on_device(self.block_begin, torch.int32, device),
            on_device(self.block_end, torch.int32, device),
            self.max_queries,
            self.max_blocks,
        )

    def __len__(self) -> int:
        """Number of rows."""
        return int(self.query_begin.shape[0])


def on_device(values: IntArray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``values`` as a contiguous tensor of ``dtype`` on ``device``; no copy if it is one.

    Values of the host are sent through pinned memory, and not waited for.
    """
    if isinstance(values, torch.Tensor):
        tensor = values
    else:
        array = np.ascontiguousarray(values)
        if array.dtype.kind == "u" and array.dtype.itemsize == 8:
            array = array.view(np.int64)  # torch knows one of numpy's two uint64, native code both
        tensor = torch.as_tensor(array)
    if device.type == "cuda" and tensor.device.type == "cpu":
        pinned = tensor.to(dtype).contiguous().pin_memory()
        return pinned.to(device, non_blocking=True)
    return tensor.to(device=device, dtype=dtype).contiguous()


def on_host(values: IntArray, dtype: type[_Number]) -> NDArray[_Number]:
    """``values`` as a contiguous numpy array; waits for the device if they lie on one."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    return np.ascontiguousarray(values, dtype)


@dataclass(frozen=True)
class Softmax:
    """Rule of a layer by which scaled products ``s`` of queries and keys become logits, and what
    its softmax has beside them. All of it is per query head.

    Attributes:
        sinks: Logits of attention sinks, [Hq], any dtype: keys of their own whose values are zero.
        soft_cap: Logits are ``soft_cap * tanh(s / soft_cap)``; 0: ``s``.
        slopes: ALiBi, float32 [Hq] on the device of the kernels: to these is added the slope times
            the key's position less the query's.
        value_scale: V is what blocks hold times this. (K's scale is a factor of the logits'.)
    """

    sinks: torch.Tensor | None = None
    soft_cap: float = 0.0
    slopes: torch.Tensor | None = None
    value_scale: float = 1.0

    def __post_init__(self) -> None:
        """Raise ``ValueError`` unless the slopes are float32: kernels read no others."""
        if self.slopes is not None and self.slopes.dtype != torch.float32:
            raise ValueError(f"slopes must be float32, and are {self.slopes.dtype}")

    @property
    def is_plain(self) -> bool:
        """Check whether logits are the products."""
        return not self.soft_cap and self.slopes is None

    @property
    def host_sinks(self) -> NDArray[np.float32] | None:
        """Sinks as native kernels take them."""
        if self.sinks is None:
            return None
        made: NDArray[np.float32] = self.sinks.detach().to("cpu", torch.float32).numpy()
        return made

    @cached_property
    def host_slopes(self) -> NDArray[np.float32] | None:
        """Slopes likewise; they lie on the host."""
        return None if self.slopes is None else self.slopes.numpy()


PLAIN = Softmax()
"""Softmax of most models."""


@dataclass(frozen=True)
class PartialState:
    """State of an online softmax (Milakov and Gimelshein 2018), updated in place by ``attend``.

    ``m`` float32 ``[T, Hq]`` is the running maximum of the scaled scores, ``l`` float32 ``[T, Hq]``
    the sum of ``exp(score - m)`` and ``acc`` float32 ``[T, Hq, D]`` the values weighted by it.
    A query that has seen no key has ``m = -inf, l = 0, acc = 0``; with an attention sink, a key of
    its own whose value is zero, ``m`` is the sink's logit and ``l = 1``. States over disjoint keys
    may be computed in any order, or apart and merged. All its logits are made by ``softmax``.
    """

    m: torch.Tensor
    l: torch.Tensor  # noqa: E741  (the papers' name)
    acc: torch.Tensor
    softmax: Softmax = PLAIN

    @classmethod
    def empty(
        cls,
        tokens: int,
        query_heads: int,
        head_size: int,
        device: torch.device,
        softmax: Softmax = PLAIN,
    ) -> PartialState:
        """State of T queries that have seen no key but their heads' sinks."""
        acc = torch.zeros((tokens, query_heads, head_size), dtype=torch.float32, device=device)
        if softmax.sinks is not None:
            m = softmax.sinks.to(device, torch.float32).repeat(tokens, 1)
            return cls(m, torch.ones_like(m), acc, softmax)
        m = torch.full((tokens, query_heads), -torch.inf, dtype=torch.float32, device=device)
        return cls(m, torch.zeros_like(m), acc, softmax)

    def rows(self, index: torch.Tensor) -> PartialState:
        """A copy, on the host, of the states of some queries, int64 [R]."""
        parts = (self.m[index].cpu(), self.l[index].cpu(), self.acc[index].cpu())
        return PartialState(*parts, self.softmax)

    @cached_property
    def bound(self) -> _kernels.State:
        """The state, which lies on the host, as native kernels take it; ``ValueError`` if none of
        them can."""
        if not self.acc.is_cpu:
            raise ValueError(f"the state must be on the CPU, not on {self.acc.device}")
        self.check(tuple(self.acc.shape), self.acc.device)
        return _kernels.State(
            self.m.numpy(),
            self.l.numpy(),
            self.acc.numpy(),
            self.softmax.soft_cap,
            self.softmax.host_slopes,
            self.softmax.value_scale,
        )

    def check(self, shape: tuple[int, ...], device: torch.device) -> None:
        """Raise ``ValueError`` unless this is a contiguous state of queries of ``shape``,
        [T, Hq, D], on ``device``."""
        for name, part, want in (
            ("m", self.m, shape[:2]),
            ("l", self.l, shape[:2]),
            ("acc", self.acc, shape),
        ):
            if (
                tuple(part.shape) != want
                or part.dtype != torch.float32
                or not part.is_contiguous()
                or part.device != device
            ):
                raise ValueError(
                    f"{name} must be contiguous float32 {want} on {device}, got "
                    f"{part.dtype} {tuple(part.shape)} on {part.device}"
                )
