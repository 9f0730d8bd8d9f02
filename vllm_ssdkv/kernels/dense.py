"""One interface to the attention and copy kernels, whatever device a layer's cache lies on.

``CpuKernels`` runs the native ones of ``vllm_ssdkv._kernels``, ``TritonKernels`` those of
``vllm_ssdkv.triton_kernels``; :func:`select_kernels` picks by device. Both follow the semantics of
``profiling/dense_oracle.py``.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv import _kernels
from vllm_ssdkv.base.errors import UnsupportedError
from vllm_ssdkv.kernels.native import NativeKernels
from vllm_ssdkv.kernels.operands.block_layout import (
    BlockLayout,
    BlockSource,
    IntArray,
    PartialState,
    Rows,
    block_stride,
    on_device,
    on_host,
)


class BlockAttention(Protocol):
    """Attention over whole blocks. Raises ``ValueError`` before any work if arguments do not fit.

    The call returns when it is done, or queues the work, as :class:`AttentionKernels` says.
    """

    def attend(
        self,
        query: torch.Tensor,
        state: PartialState,
        rows: Rows,
        source: BlockSource,
        layout: BlockLayout,
        scale: float,
        sliding_window: int | None = None,
    ) -> None:
        """Fold the rows' blocks into ``state`` in place: exact, causal, grouped-query attention.

        ``query [T, Hq, D]`` of any of ``DTYPES`` (may be strided over tokens), ``Hq`` a multiple of
        ``layout.kv_heads``. Query i of a row sees the keys of its blocks whose position (the
        block's plus the token's index) is at most its own and, with a ``sliding_window``, more than
        its own less that. Scores are ``scale * q . k``; sums are float32. A query that sees no key
        keeps its state, so that any partition of the blocks over calls gives the same result up to
        rounding.
        """
        ...


class AttentionKernels(BlockAttention, Protocol):
    """Attention kernels of a device for page mode.

    Calls are ordered: on the CPU each returns when it is done (the GIL is released meanwhile), on
    CUDA each is queued on the current stream. Any thread may call, as long as no two calls that
    write the same memory run at once. Every method raises ``ValueError`` before any work if
    shapes, dtypes or devices do not fit.
    """

    device: torch.device

    def finish(
        self, state: PartialState, out: torch.Tensor, lse: torch.Tensor | None = None
    ) -> None:
        """Write ``acc / l`` to ``out [T, Hq, D]`` and ``m + ln l`` to ``lse [T, Hq]`` (float32).

        ``out`` is multiplied by the ``value_scale`` of the state's softmax. A query that has seen
        no key gives zeros and ``-inf``.
        """
        ...

    def merge(self, state: PartialState, part: PartialState) -> None:
        """Fold ``part``, a state of the same queries over further keys, into ``state`` in place.

        ``part`` lies on the kernels' device or on the host. Where it saw no key, nothing changes.
        """
        ...

    def store_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        slot_mapping: IntArray,
        layout: BlockLayout,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        """Scatter ``key, value [T, Hkv, D]`` (the cache's dtype) into ``cache [num_blocks, ...]``.

        A cache of ``FLOAT8`` gets them divided by their ``scales``, rounded as vLLM's backends of
        the device do: on the CPU towards zero, on CUDA to the nearest; what is too large becomes
        the largest number.

        Token t goes to block ``slot_mapping[t] // block_tokens``, token ``slot_mapping[t] %
        block_tokens`` of it; a negative entry (int64) is padding and is skipped.
        """
        ...

    def pack(
        self,
        caches: Sequence[torch.Tensor],
        block_ids: IntArray,
        slot_address: IntArray,
        slot_layer_bytes: int,
        layout: BlockLayout,
        slot_layout: BlockLayout,
    ) -> None:
        """Copy n blocks of the L layers ``caches[l] [num_blocks, ...]`` into n slots, zero-padded.

        Layer l of block ``block_ids[i]`` goes to the absolute address ``slot_address[i] +
        l * slot_layer_bytes`` (memory of the device, or pinned memory that it can reach), page by
        page at ``slot_layout``'s stride; the padding of a page is zeroed.
        """
        ...

    def unpack(
        self,
        caches: Sequence[torch.Tensor],
        block_ids: IntArray,
        slot_address: IntArray,
        slot_layer_bytes: int,
        layout: BlockLayout,
        slot_layout: BlockLayout,
    ) -> None:
        """The way back of :meth:`pack`: fill the caches' blocks from the slots."""
        ...


def block_addresses(
    caches: Sequence[torch.Tensor], block_ids: IntArray, layout: BlockLayout
) -> NDArray[np.uint64]:
    """Absolute addresses ``[L, n]`` of each layer's part of n blocks of ``caches[l]``.

    Raises ``ValueError`` if a cache does not hold blocks of this layout, or not these.
    """
    ids = on_host(block_ids, np.int64)
    if ids.ndim != 1:
        raise ValueError(f"block ids {ids.shape} must be [n]")
    for cache in caches:
        layout.check_cache(cache)
    blocks = min((cache.shape[0] for cache in caches), default=0)
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= blocks):
        raise ValueError(f"a block id lies outside the cache's {blocks} blocks")
    start = np.array([cache.data_ptr() for cache in caches], np.uint64)
    step = np.array([block_stride(cache) * cache.itemsize for cache in caches], np.uint64)
    addresses: NDArray[np.uint64] = start[:, None] + step[:, None] * ids.astype(np.uint64)[None, :]
    return addresses


def alignment(*addresses: NDArray[np.uint64]) -> int:
    """Bytes, at most 16, of which all these addresses are multiples."""
    joined = np.bitwise_or.reduce([np.bitwise_or.reduce(part, axis=None) for part in addresses])
    return math.gcd(16, int(joined))


def _layer_addresses(
    caches: Sequence[torch.Tensor],
    block_ids: IntArray,
    slot_address: IntArray,
    slot_layer_bytes: int,
    layout: BlockLayout,
    slot_layout: BlockLayout,
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Absolute addresses ``[L * n]`` of every layer's part of every block, in cache and slot."""
    if layout.with_page_stride(slot_layout.page_stride_bytes) != slot_layout:
        raise ValueError(f"{layout} and {slot_layout} differ in more than the page stride")
    if len(caches) > 1 and slot_layer_bytes < slot_layout.block_bytes:
        raise ValueError(
            f"slot_layer_bytes {slot_layer_bytes} is less than a layer, {slot_layout.block_bytes}"
        )
    blocks = block_addresses(caches, block_ids, layout)
    slots = on_host(slot_address, np.uint64)
    if blocks.shape[1:] != slots.shape:
        raise ValueError(
            f"block ids {blocks.shape[1:]} and slot addresses {slots.shape} must be [n]"
        )
    layers = np.arange(len(caches), dtype=np.uint64) * np.uint64(slot_layer_bytes)
    return blocks.ravel(), (slots[None, :] + layers[:, None]).ravel()


class CpuKernels(NativeKernels):
    """The native kernels. ``threads`` bounds the threads of one call (default: torch's)."""

    device = torch.device("cpu")

    def attend(
        self,
        query: torch.Tensor,
        state: PartialState,
        rows: Rows,
        source: BlockSource,
        layout: BlockLayout,
        scale: float,
        sliding_window: int | None = None,
    ) -> None:
        """See :meth:`AttentionKernels.attend`; blocks may lie at absolute addresses."""
        base = on_host(source.base, np.uint64)
        if source.digests is not None:
            raise ValueError("these kernels do not compare digests, and the blocks are unchecked")
        if source.tensor is not None:
            if source.tensor.dtype != layout.dtype or source.tensor.device.type != "cpu":
                raise ValueError(f"blocks must be {layout.dtype} on the CPU")
            base = base * np.uint64(layout.dtype.itemsize) + np.uint64(source.tensor.data_ptr())
        self._native.attend(
            _kernels.vectors("query", query, query.shape[1], layout.head_size),
            scale,
            state.bound,
            rows.bound,
            _kernels.Pages(base, on_host(source.position, np.int64)),
            layout.shape,
            self.threads,
            sliding_window,
        )

    def finish(
        self, state: PartialState, out: torch.Tensor, lse: torch.Tensor | None = None
    ) -> None:
        """See :meth:`AttentionKernels.finish`."""
        _, heads, head_size = state.acc.shape
        if lse is not None and (lse.dtype != torch.float32 or lse.shape != state.m.shape):
            raise ValueError(f"lse must be float32 {tuple(state.m.shape)}")
        self._native.finish(
            state.bound,
            _kernels.vectors("out", out, heads, head_size),
            None if lse is None else lse.numpy(),
            self.threads,
        )

    def merge(self, state: PartialState, part: PartialState) -> None:
        """See :meth:`AttentionKernels.merge`; keeps the GIL, since it takes microseconds."""
        self._native.merge(state.bound, part.bound)

    def store_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        slot_mapping: IntArray,
        layout: BlockLayout,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        """See :meth:`AttentionKernels.store_kv`; also refuses slots outside the cache."""
        if isinstance(slot_mapping, torch.Tensor) and slot_mapping.dtype == torch.int64:
            slots = slot_mapping.numpy()  # in every layer of a step
        else:
            slots = on_host(slot_mapping, np.int64)
        self._native.store_kv(key, value, slots, cache, layout.shape, self.threads, *scales)

    def pack(
        self,
        caches: Sequence[torch.Tensor],
        block_ids: IntArray,
        slot_address: IntArray,
        slot_layer_bytes: int,
        layout: BlockLayout,
        slot_layout: BlockLayout,
    ) -> None:
        """See :meth:`AttentionKernels.pack`."""
        blocks, slots = _layer_addresses(
            caches,
            block_ids,
            slot_address,
            slot_layer_bytes,
            layout=layout,
            slot_layout=slot_layout,
        )
        self._native.copy_blocks(
            blocks, layout.shape, slots, slot_layout.shape, clear_padding=True, threads=self.threads
        )

    def unpack(
        self,
        caches: Sequence[torch.Tensor],
        block_ids: IntArray,
        slot_address: IntArray,
        slot_layer_bytes: int,
        layout: BlockLayout,
        slot_layout: BlockLayout,
    ) -> None:
        """See :meth:`AttentionKernels.unpack`."""
        blocks, slots = _layer_addresses(
            caches,
            block_ids,
            slot_address,
            slot_layer_bytes,
            layout=layout,
            slot_layout=slot_layout,
        )
        self._native.copy_blocks(
            slots,
            slot_layout.shape,
            blocks,
            layout.shape,
            clear_padding=False,
            threads=self.threads,
        )


class TritonKernels:
    """The Triton kernels of one CUDA device (or, for tests, of Triton's interpreter)."""

    def __init__(self, device: torch.device) -> None:
        """Load the kernels; raises ``UnsupportedError`` if Triton cannot be imported."""
        self.device = device
        try:
            self._attend = importlib.import_module("vllm_ssdkv.triton_kernels.attend")
            self._finish = importlib.import_module("vllm_ssdkv.triton_kernels.finish")
            self._pack = importlib.import_module("vllm_ssdkv.triton_kernels.pack")
            self._store = importlib.import_module("vllm_ssdkv.triton_kernels.store_kv")
        except ImportError as error:
            raise UnsupportedError(
                f"page mode on {device} needs Triton, which does not load: {error}"
            ) from error

    def attend(
        self,
        query: torch.Tensor,
        state: PartialState,
        rows: Rows,
        source: BlockSource,
        layout: BlockLayout,
        scale: float,
        sliding_window: int | None = None,
    ) -> None:
        """See :meth:`AttentionKernels.attend`.

        Each block must start at a multiple of 16 bytes where pages and keys do. Absolute addresses
        may name pinned host memory: right where each byte is read once (decode), slow for long
        rows, whose context belongs in a staging tensor. Arrays that are on the device already are
        used as they are: move ``rows`` and ``source`` once per step with their ``to``.
        """
        self._attend.attend(
            query,
            state,
            rows.to(query.device),
            cache=source.tensor,
            block_offset=on_device(source.base, torch.int64, query.device),
            block_position=on_device(source.position, torch.int64, query.device),
            layout=layout,
            scale=scale,
            sliding_window=sliding_window,
        )

    def finish(
        self, state: PartialState, out: torch.Tensor, lse: torch.Tensor | None = None
    ) -> None:
        """See :meth:`AttentionKernels.finish`."""
        self._finish.finish(state, out, lse)

    def merge(self, state: PartialState, part: PartialState) -> None:
        """See :meth:`AttentionKernels.merge`."""
        shapes = part.m.shape, part.l.shape, part.acc.shape
        if shapes != (state.m.shape, state.l.shape, state.acc.shape):
            raise ValueError(f"the states are not of the same queries: {shapes}")
        m, l, acc = (x.to(self.device, non_blocking=True) for x in (part.m, part.l, part.acc))  # noqa: E741
        top = torch.maximum(state.m, m)
        base = torch.where(torch.isneginf(top), 0.0, top)  # -inf - -inf is not a number
        keep, add = torch.exp(state.m - base), torch.exp(m - base)
        state.acc.mul_(keep[..., None]).addcmul_(acc, add[..., None])
        state.l.mul_(keep).addcmul_(l, add)
        state.m.copy_(top)

    def store_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        slot_mapping: IntArray,
        layout: BlockLayout,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        """See :meth:`AttentionKernels.store_kv`; slots outside the cache are not detected."""
        slots = on_device(slot_mapping, torch.int64, cache.device)
        self._store.store_kv(key, value, cache, slots, layout, scales)

    def pack(
        self,
        caches: Sequence[torch.Tensor],
        block_ids: IntArray,
        slot_address: IntArray,
        slot_layer_bytes: int,
        layout: BlockLayout,
        slot_layout: BlockLayout,
    ) -> None:
        """See :meth:`AttentionKernels.pack`; one launch. Host arrays spare a wait."""
        blocks, slots = _layer_addresses(
            caches,
            block_ids,
            slot_address,
            slot_layer_bytes,
            layout=layout,
            slot_layout=slot_layout,
        )
        there = on_device(np.stack([blocks, slots]), torch.int64, self.device)
        self._pack.copy_pages(
            *there,
            aligned=alignment(blocks, slots),
            pages=layout.kv_heads * layout.groups,
            payload_bytes=layout.page_payload_bytes,
            source_stride_bytes=layout.page_stride_bytes,
            target_stride_bytes=slot_layout.page_stride_bytes,
            zero_padding=True,
        )

    def unpack(
        self,
        caches: Sequence[torch.Tensor],
        block_ids: IntArray,
        slot_address: IntArray,
        slot_layer_bytes: int,
        layout: BlockLayout,
        slot_layout: BlockLayout,
    ) -> None:
        """See :meth:`AttentionKernels.unpack`; one launch. Host arrays spare a wait."""
        blocks, slots = _layer_addresses(
            caches,
            block_ids,
            slot_address,
            slot_layer_bytes,
            layout=layout,
            slot_layout=slot_layout,
        )
        there = on_device(np.stack([slots, blocks]), torch.int64, self.device)
        self._pack.copy_pages(
            *there,
            aligned=alignment(slots, blocks),
            pages=layout.kv_heads * layout.groups,
            payload_bytes=layout.page_payload_bytes,
            source_stride_bytes=slot_layout.page_stride_bytes,
            target_stride_bytes=layout.page_stride_bytes,
            zero_padding=False,
        )


def wait_for(device: torch.device) -> None:
    """Wait for what is queued on the device's current stream: nothing on the CPU."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


@functools.cache
def select_kernels(device: torch.device) -> AttentionKernels:
    """The kernels for tensors on ``device``, one object per device of a process.

    Raises ``UnsupportedError`` if there are none.
    """
    if device.type == "cpu":
        return CpuKernels()
    if device.type == "cuda":
        return TritonKernels(device)
    raise UnsupportedError(f"page mode has no attention kernels for {device.type} devices")
