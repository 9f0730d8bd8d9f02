"""Sparse attention's kernels beside :mod:`vllm_ssdkv.kernels.dense`: pages and summaries.

``CpuPageKernels`` runs the native ones of ``vllm_ssdkv._kernels``, ``TritonPageKernels`` those of
``vllm_ssdkv.triton_kernels``; :func:`select_page_kernels` picks by device. They follow the
semantics of ``tests/oracles/sparse_attention.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv import _kernels
from vllm_ssdkv.base.errors import UnsupportedError
from vllm_ssdkv.kernels.dense import alignment, block_addresses
from vllm_ssdkv.kernels.native import NativeKernels
from vllm_ssdkv.kernels.operands.block_layout import (
    BlockLayout,
    IntArray,
    PartialState,
    on_device,
    on_host,
)
from vllm_ssdkv.kernels.operands.page_list import PageList
from vllm_ssdkv.kernels.operands.token_order import TokenOrder
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.memory.summary_rows import SummaryRows, channel_bytes, summary_bytes


@dataclass(frozen=True, slots=True, eq=False)
class DeviceAddresses:
    """Addresses of a :class:`Packing` on a device, int64.

    Attributes:
        source: Each layer's part of each block, [L, n].
        pages: Each layer's first page in each slot, [L, n].
        known: Blocks whose slots have rows, [m].
        records: Each layer's records in each of these rows, [L, m].
        channels: Each layer's channel-major K in these rows, [L, m].
    """

    source: torch.Tensor
    pages: torch.Tensor
    known: torch.Tensor
    records: torch.Tensor
    channels: torch.Tensor


class Packing:
    """n blocks of the caches of L layers, on their way to slots and to rows of summaries.

    Layers may be packed one by one: addresses go to a device once, with the first of them. Used by
    one thread at a time, and on a device on streams that have ended when the next one is used.

    Attributes:
        caches: Cache of each layer, [num_blocks, ...].
        layout: Layout of the blocks.
        geometry: Geometry of the slots.
        source: Absolute addresses of each layer's part of each block, uint64 [L, n].
        pages: Absolute addresses of the first page of each slot, uint64 [n].
        rows: Rows of the table of summaries, [n].
    """

    def __init__(
        self,
        caches: Sequence[torch.Tensor],
        block_ids: IntArray,
        frames: NDArray[np.uint64],
        rows: SummaryRows,
        layout: BlockLayout,
        geometry: SlotGeometry,
    ):
        """``frames``: absolute addresses, [n].

        Raises:
            ValueError: a cache does not hold blocks of this layout, or not these; the numbers of
                blocks, frames and rows differ.
        """
        self.source = block_addresses(caches, block_ids, layout)
        self.caches, self.layout, self.geometry = caches, layout, geometry
        if not self.source.shape[1] == len(frames) == len(rows.address):
            raise ValueError(
                f"{self.source.shape[1]} blocks cannot go to {len(frames)} frames and "
                f"{len(rows.address)} rows"
            )
        self.pages = frames + np.uint64(geometry.header_bytes)
        self.rows = rows
        self._there: DeviceAddresses | None = None

    def first_pages(self, layer: int) -> NDArray[np.uint64]:
        """Absolute addresses of a layer's first page in each slot, [n]."""
        pages: NDArray[np.uint64] = self.pages + np.uint64(layer * self.geometry.layer_bytes)
        return pages

    def on_device(self, device: torch.device) -> DeviceAddresses:
        """The addresses on a device: sent once, in one copy that nobody waits for."""
        if self._there is not None:
            return self._there
        geometry, layers = self.geometry, np.arange(len(self.source), dtype=np.uint64)[:, None]
        known = np.flatnonzero(self.rows.address)
        rows = self.rows.address[known][None, :]
        record_bytes = summary_bytes(geometry, self.layout.page_tokens) // geometry.layers
        keys = rows + np.uint64(max(0, self.rows.channels))
        parts = (
            self.source,
            self.pages[None, :] + layers * np.uint64(geometry.layer_bytes),
            known.astype(np.uint64)[None, :],
            rows + layers * np.uint64(record_bytes),
            keys + layers * np.uint64(channel_bytes(geometry)),
        )
        sent = on_device(np.concatenate([part.ravel() for part in parts]), torch.int64, device)
        begin = np.cumsum([0, *(part.size for part in parts)]).tolist()
        source, pages, which, records, channels = (
            sent[begin[i] : begin[i + 1]].view(part.shape) for i, part in enumerate(parts)
        )
        self._there = DeviceAddresses(source, pages, which[0], records, channels)
        return self._there


class PageAttention(Protocol):
    """Attention over listed pages. Threads and order: as ``AttentionKernels``."""

    def attend_pages(
        self,
        query: torch.Tensor,
        state: PartialState,
        pages: PageList,
        layout: BlockLayout,
        scale: float,
    ) -> None:
        """Fold the listed pages into ``state`` in place: exact attention over those tokens.

        ``query [T, Hq, D]`` as in ``AttentionKernels.attend``; of ``layout`` only page tokens, KV
        heads, head size and dtype count. A query whose lists hold no key keeps its state, so that
        pages may be split over calls as they arrive. The same call gives the same bits; on the CPU
        cutting the same tokens into pages of another size does, too.
        """
        ...


class PageKernels(PageAttention, Protocol):
    """Kernels of a device for sparse attention. Threads and order: as ``AttentionKernels``."""

    device: torch.device

    def log_sum_exp(self, state: PartialState, tokens: torch.Tensor) -> torch.Tensor:
        """Log-sum-exp of the logits that some query tokens, int64 [n], have seen, [n, Hq]."""
        ...

    def summarize(
        self,
        source: IntArray,
        layout: BlockLayout,
        *,
        bounds: IntArray | None = None,
        spread: IntArray | None = None,
        channels: IntArray | None = None,
        value_sum: IntArray | None = None,
    ) -> None:
        """Write what is kept of n complete blocks of one layer, for selectors and compensation.

        All are absolute addresses, ``[n]``, of memory that the device reaches. ``source``: the
        layer's part of each block, laid out by ``layout`` (as in the cache or as in a slot).
        Targets that are not None: ``bounds``
        ``[kv_heads, groups, 2, head_size]`` (min and max over a page of each channel of K, in the
        layout's dtype, exact; NaN where K has one), ``spread`` (the same of mean and variance, in
        fp32, then rounded, at most the largest finite number; NaN where K has a number that is not
        finite), ``channels`` ``[kv_heads, head_size,
        block_tokens]`` (K, in the layout's dtype) and ``value_sum`` ``[kv_heads, head_size]``
        (float32 sum of V over the block's tokens, in order).
        """
        ...

    def encode(self, source: IntArray, layout: BlockLayout, codes: IntArray, bits: int) -> None:
        """Write K of n complete blocks of one layer in ``bits`` a number: records of each KV head,
        as ``docs/format.md`` has them, back to back. Addresses as of :meth:`summarize`."""
        ...

    def pack_summarized(
        self, packing: Packing, layers: range, order: TokenOrder | None = None
    ) -> None:
        """Copy some layers of blocks into slots, and write what selectors must know of them to the
        slots' rows: pages as ``AttentionKernels.pack`` does, records of these layers, and
        channel-major K, if rows have it. A slot without a row gets its pages only.

        With an ``order`` of these layers tokens go into their pages by likeness, the halves of the
        halves across the direction in which their rows vary most, as in
        ``csrc/attention/token_order.hpp``; K, V and what is made of them have the same order.
        """
        ...


class CpuPageKernels(NativeKernels):
    """The native kernels. ``threads`` bounds the threads of one call (default: torch's)."""

    device = torch.device("cpu")

    def attend_pages(
        self,
        query: torch.Tensor,
        state: PartialState,
        pages: PageList,
        layout: BlockLayout,
        scale: float,
    ) -> None:
        """See :meth:`PageKernels.attend_pages`."""
        rows, listed = pages.bound
        self._native.attend(
            _kernels.vectors("query", query, query.shape[1], layout.head_size),
            scale,
            state.bound,
            rows,
            listed,
            layout.shape,
            self.threads,
        )

    def log_sum_exp(self, state: PartialState, tokens: torch.Tensor) -> torch.Tensor:
        """See :meth:`PageKernels.log_sum_exp`."""
        return torch.from_numpy(self._native.log_sum_exp(state.bound, tokens.numpy()))

    def summarize(
        self,
        source: IntArray,
        layout: BlockLayout,
        *,
        bounds: IntArray | None = None,
        spread: IntArray | None = None,
        channels: IntArray | None = None,
        value_sum: IntArray | None = None,
    ) -> None:
        """See :meth:`PageKernels.summarize`."""
        self._native.summarize(
            on_host(source, np.uint64),
            layout.shape,
            *(
                None if target is None else on_host(target, np.uint64)
                for target in (bounds, spread, channels, value_sum)
            ),
            self.threads,
        )

    def encode(self, source: IntArray, layout: BlockLayout, codes: IntArray, bits: int) -> None:
        """See :meth:`PageKernels.encode`."""
        addresses = on_host(source, np.uint64), on_host(codes, np.uint64)
        self._native.encode(addresses[0], layout.shape, addresses[1], bits, self.threads)

    def pack_summarized(
        self, packing: Packing, layers: range, order: TokenOrder | None = None
    ) -> None:
        """See :meth:`PageKernels.pack_summarized`; one native call."""
        self._native.pack_summarized(
            packing.source[layers.start : layers.stop].ravel(),
            packing.first_pages(layers.start),
            packing.rows.address,
            _slot_tails(packing.layout, packing.geometry),
            layers.start,
            packing.rows.channels,
            self.threads,
            None if order is None else order.bound,
        )

    def make_tails(
        self,
        frames: NDArray[np.uint64],
        tails: NDArray[np.uint64],
        layout: BlockLayout,
        geometry: SlotGeometry,
    ) -> None:
        """Make the tails of n slots, summary and channel pages, from frames: both absolute
        addresses, ``[n]``. ``layout`` is that of blocks in slots. What of the payload of a page is
        not used is zeroed; the padding behind it stays as it is."""
        layers = np.arange(geometry.layers, dtype=np.uint64) * np.uint64(geometry.layer_bytes)
        source = layers[:, None] + (frames + np.uint64(geometry.header_bytes))[None, :]
        held = _slot_tails(layout, geometry)
        self._native.make_tails(source.ravel(), tails, held, self.threads)


def _slot_tails(layout: BlockLayout, geometry: SlotGeometry) -> _kernels.SlotTails:
    return _kernels.SlotTails(
        layout.shape,
        geometry.layers,
        geometry.page_bytes,
        geometry.summary_pages,
        geometry.channel_pages,
        spread=geometry.record.startswith("spread"),
        value_sums=geometry.record == "spread_with_values",
        code_bits=geometry.code_bits,
    )


class TritonPageKernels:
    """The Triton kernels of one CUDA device (or, for tests, of Triton's interpreter)."""

    def __init__(self, device: torch.device) -> None:
        """Load the kernels; raises ``UnsupportedError`` if Triton cannot be imported."""
        self.device = device
        try:
            self._attend = importlib.import_module("vllm_ssdkv.triton_kernels.attend")
            self._summarize = importlib.import_module("vllm_ssdkv.triton_kernels.summarize")
            self._codes = importlib.import_module("vllm_ssdkv.triton_kernels.codes")
            self._order = importlib.import_module("vllm_ssdkv.triton_kernels.order")
            self._pack = importlib.import_module("vllm_ssdkv.triton_kernels.pack")
        except ImportError as error:
            raise UnsupportedError(
                f"sparse attention on {device} needs Triton, which does not load: {error}"
            ) from error

    def attend_pages(
        self,
        query: torch.Tensor,
        state: PartialState,
        pages: PageList,
        layout: BlockLayout,
        scale: float,
    ) -> None:
        """See :meth:`PageKernels.attend_pages`; pages may lie in pinned host memory.

        Lists that are host arrays spare a wait.
        """
        sizes = on_host(pages.end, np.int32) - on_host(pages.begin, np.int32)
        mask = pages.token_mask
        if mask is not None:
            mask = torch.as_tensor(mask).to(query.device, torch.uint8).contiguous()
        listed = dataclasses.replace(pages, token_mask=mask)
        longest = int(sizes.max()) if len(sizes) else 0
        self._attend.attend_pages(
            query, state, listed, layout=layout, scale=scale, max_pages=longest
        )

    def log_sum_exp(self, state: PartialState, tokens: torch.Tensor) -> torch.Tensor:
        """See :meth:`PageKernels.log_sum_exp`."""
        return state.m[tokens] + torch.log(state.l[tokens])

    def summarize(
        self,
        source: IntArray,
        layout: BlockLayout,
        *,
        bounds: IntArray | None = None,
        spread: IntArray | None = None,
        channels: IntArray | None = None,
        value_sum: IntArray | None = None,
    ) -> None:
        """See :meth:`PageKernels.summarize`; one launch."""
        targets = {
            "bounds": bounds,
            "spread": spread,
            "channels": channels,
            "value_sum": value_sum,
        }
        self._summarize.summarize(
            on_device(source, torch.int64, self.device),
            layout,
            **{
                name: on_device(target, torch.int64, self.device)
                for name, target in targets.items()
                if target is not None
            },
        )

    def encode(self, source: IntArray, layout: BlockLayout, codes: IntArray, bits: int) -> None:
        """See :meth:`PageKernels.encode`; one launch."""
        self._codes.encode(
            on_device(source, torch.int64, self.device),
            layout,
            on_device(codes, torch.int64, self.device),
            bits,
        )

    def pack_summarized(
        self, packing: Packing, layers: range, order: TokenOrder | None = None
    ) -> None:
        """See :meth:`PageKernels.pack_summarized`; a launch per layer for pages and one for the
        rest, which goes where it stays."""
        layout, geometry = packing.layout, packing.geometry
        there = packing.on_device(self.device)
        if order is not None:
            kept = on_device(order.kept, torch.int32, self.device)
            features = order.addresses()
        for i, layer in enumerate(layers):
            source, aligned = there.source[layer], alignment(packing.source[layer])
            if order is not None and order.layers[i]:
                alike = None if features is None else features[i * len(kept) :][: len(kept)]
                made = self._reordered(source, kept, alike, order.width, layout)
                source, aligned = _rows(made), alignment(np.array([made.data_ptr()], np.uint64))
            self._pack.copy_pages(
                source,
                there.pages[layer],
                aligned=math.gcd(aligned, alignment(packing.first_pages(layer))),
                pages=layout.kv_heads * layout.groups,
                payload_bytes=layout.page_payload_bytes,
                source_stride_bytes=layout.page_stride_bytes,
                target_stride_bytes=geometry.page_bytes,
                zero_padding=True,
            )
            known = there.known
            if len(known) < len(source):
                source = source.index_select(0, known)
            self._summarize_layer(source, there.records[layer], there.channels[layer], packing)

    def _reordered(
        self,
        source: torch.Tensor,
        kept: torch.Tensor,
        features: NDArray[np.uint64] | None,
        width: int,
        layout: BlockLayout,
    ) -> torch.Tensor:
        """Copies of one layer's blocks, [n, block], with their tokens in order, whose ``features``,
        of this ``width``, are at addresses, [n], as of ``TokenOrder``."""
        place = self._order.order_blocks(source, kept, layout)
        if features is not None:
            known = np.flatnonzero(features)
            rows = on_device(features[known], torch.int64, self.device)
            which = on_device(known, torch.int64, self.device)
            place[which] = self._order.order_blocks(rows, kept[which], layout, width)
        made: torch.Tensor = self._order.reorder(source, place, layout)
        return made

    def _summarize_layer(
        self,
        source: torch.Tensor,
        records: torch.Tensor,
        channels: torch.Tensor,
        packing: Packing,
    ) -> None:
        """Write what is kept of one layer's blocks: addresses of these, of their records and of
        their channels, [m]."""
        layout, geometry = packing.layout, packing.geometry
        if geometry.code_bits:
            self._codes.encode(source, layout, records, geometry.code_bits)
            return
        record = geometry.payload_bytes // layout.page_tokens
        targets = {}
        if geometry.channel_pages:
            targets["value_sum"] = records
            if packing.rows.channels >= 0:
                targets["channels"] = channels
        else:
            targets["bounds" if geometry.record == "bounds" else "spread"] = records
            if geometry.record == "spread_with_values":
                targets["value_sum"] = records + geometry.pages_per_layer * record
        self._summarize.summarize(source, layout, **targets, sum_stride=record // 4)


def _rows(memory: torch.Tensor) -> torch.Tensor:
    """Absolute address of each row, int64, on the device of the memory."""
    steps = torch.arange(len(memory), dtype=torch.int64, device=memory.device)
    return steps * (memory.stride(0) * memory.itemsize) + memory.data_ptr()


@functools.cache
def select_page_kernels(device: torch.device) -> PageKernels:
    """The kernels for tensors on ``device``, one object per device of a process.

    Raises ``UnsupportedError`` if there are none.
    """
    if device.type == "cpu":
        return CpuPageKernels()
    if device.type == "cuda":
        return TritonPageKernels(device)
    raise UnsupportedError(
        f"sparse selectors have no attention kernels for {device.type} devices; set selector: exact"
    )
