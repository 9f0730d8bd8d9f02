"""Sparse attention's kernels beside :mod:`vllm_ssdkv.kernels.dense`: pages and summaries.

``CpuPageKernels`` runs the native ones of ``vllm_ssdkv._kernels``, ``TritonPageKernels`` those of
``vllm_ssdkv.triton_kernels``; :func:`select_page_kernels` picks by device. They follow the
semantics of ``tests/oracles/sparse_attention.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv import _io, _kernels
from vllm_ssdkv.base.errors import UnsupportedError
from vllm_ssdkv.kernels.dense import TritonKernels, block_addresses
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
from vllm_ssdkv.store.memory.summary_rows import code_bytes


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
        self,
        caches: Sequence[torch.Tensor],
        block_ids: IntArray,
        frames: NDArray[np.uint64],
        tails: NDArray[np.uint64],
        layout: BlockLayout,
        geometry: SlotGeometry,
        order: TokenOrder | None = None,
    ) -> None:
        """Copy n blocks of the L layers ``caches[l] [num_blocks, ...]`` into n slots, complete but
        for their headers: pages as ``AttentionKernels.pack`` does, and the tails of summary and
        channel pages.

        ``frames`` and ``tails`` ``[n]`` are absolute addresses, on the host. What of the payload of
        a summary or channel page is not used is zeroed; the padding behind it stays as it is. With
        an ``order`` tokens go into their pages by likeness, the halves of the halves across the
        direction in which their rows vary most, as in ``csrc/attention/token_order.hpp``; K, V and
        what is made of them have the same order.
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
        self,
        caches: Sequence[torch.Tensor],
        block_ids: IntArray,
        frames: NDArray[np.uint64],
        tails: NDArray[np.uint64],
        layout: BlockLayout,
        geometry: SlotGeometry,
        order: TokenOrder | None = None,
    ) -> None:
        """See :meth:`PageKernels.pack_summarized`; one native call."""
        source = block_addresses(caches, block_ids, layout)
        self._summarize_slots(
            source, frames + np.uint64(geometry.header_bytes), tails, layout, geometry, order
        )

    def make_tails(
        self,
        frames: NDArray[np.uint64],
        tails: NDArray[np.uint64],
        layout: BlockLayout,
        geometry: SlotGeometry,
    ) -> None:
        """Make the tails of n slots, as :meth:`pack_summarized` does, from frames: both absolute
        addresses, ``[n]``. ``layout`` is that of blocks in slots."""
        layers = np.arange(geometry.layers, dtype=np.uint64) * np.uint64(geometry.layer_bytes)
        source = layers[:, None] + (frames + np.uint64(geometry.header_bytes))[None, :]
        self._summarize_slots(source, None, tails, layout, geometry)

    def _summarize_slots(
        self,
        source: NDArray[np.uint64],
        pages: NDArray[np.uint64] | None,
        tails: NDArray[np.uint64],
        layout: BlockLayout,
        geometry: SlotGeometry,
        order: TokenOrder | None = None,
    ) -> None:
        held = _kernels.SlotTails(
            layout.shape,
            geometry.layers,
            geometry.page_bytes,
            geometry.summary_pages,
            geometry.channel_pages,
            spread=geometry.record.startswith("spread"),
            value_sums=geometry.record == "spread_with_values",
            code_bits=geometry.code_bits,
        )
        self._native.pack_summarized(
            source.ravel(), pages, tails, held, self.threads, None if order is None else order.bound
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
        self,
        caches: Sequence[torch.Tensor],
        block_ids: IntArray,
        frames: NDArray[np.uint64],
        tails: NDArray[np.uint64],
        layout: BlockLayout,
        geometry: SlotGeometry,
        order: TokenOrder | None = None,
    ) -> None:
        """See :meth:`PageKernels.pack_summarized`: a launch per layer for pages and one for the
        rest, which is made in memory of the device and waited for."""
        sources = block_addresses(caches, block_ids, layout)
        slot_layout = layout.with_page_stride(geometry.page_bytes)
        summaries = self._payloads(len(frames), geometry, geometry.summary_pages)
        for layer, addresses in enumerate(sources):
            source, made, places = addresses, caches[layer], on_host(block_ids, np.int64)
            if order is not None and order.layers[layer]:
                made = self._reordered(addresses, layer, order, layout)
                source, places = _rows(made), np.arange(len(frames))
            TritonKernels(self.device).pack(
                [made],
                places,
                frames + np.uint64(geometry.layer_offset(layer)),
                geometry.layer_bytes,
                layout,
                slot_layout,
            )
            self._summarize_layer(layer, source, summaries, tails, layout, geometry)
        _put(summaries, tails, geometry)

    def _reordered(
        self, source: NDArray[np.uint64], layer: int, order: TokenOrder, layout: BlockLayout
    ) -> torch.Tensor:
        """Copies of one layer's blocks, [n, block], with their tokens in order."""
        addresses = on_device(source, torch.int64, self.device)
        kept = torch.from_numpy(order.kept).to(self.device)
        place = self._order.order_blocks(addresses, kept, layout)
        features = order.addresses()
        if features is not None:
            of_layer = features.reshape(len(order.layers), -1)[layer]
            known = np.flatnonzero(of_layer)
            rows = on_device(of_layer[known], torch.int64, self.device)
            which = torch.from_numpy(known).to(self.device)
            place[which] = self._order.order_blocks(rows, kept[which], layout, order.width)
        made: torch.Tensor = self._order.reorder(addresses, place, layout)
        return made

    def _summarize_layer(
        self,
        layer: int,
        source: NDArray[np.uint64],
        summaries: torch.Tensor,
        tails: NDArray[np.uint64],
        layout: BlockLayout,
        geometry: SlotGeometry,
    ) -> None:
        """Write the records of one layer's blocks in ``summaries``, and its channel pages."""
        record = geometry.payload_bytes // layout.page_tokens
        if not geometry.channel_pages:
            self._page_records(layer, source, summaries, layout, geometry)
            return
        slots = len(summaries)
        channels = self._payloads(slots, geometry, geometry.channel_pages)
        sums = torch.zeros((slots, geometry.heads, layout.head_size), device=self.device)
        size = geometry.heads * record
        self.summarize(source, layout, channels=_rows(channels), value_sum=_rows(sums))
        first = geometry.first_channel_page(layer) - geometry.kv_pages
        _put(channels, tails + np.uint64(first * geometry.page_bytes), geometry)
        held = summaries[:, layer * size : (layer + 1) * size].view(slots, geometry.heads, record)
        held[..., : 4 * layout.head_size] = sums.view(torch.uint8)

    def _page_records(
        self,
        layer: int,
        source: NDArray[np.uint64],
        summaries: torch.Tensor,
        layout: BlockLayout,
        geometry: SlotGeometry,
    ) -> None:
        """Write the records of the pages of one layer and, if wanted, the sums of V."""
        if geometry.code_bits:
            size = geometry.heads * code_bytes(geometry, layout.page_tokens)
            target = _rows(summaries) + np.uint64(layer * size)
            self.encode(source, layout, target, geometry.code_bits)
            return
        record = geometry.payload_bytes // layout.page_tokens
        pages, values = geometry.pages_per_layer * record, 0
        if geometry.record == "spread_with_values":
            values = geometry.heads * record
        kind = "bounds" if geometry.record == "bounds" else "spread"
        begin = layer * (pages + values)
        self.summarize(source, layout, **{kind: _rows(summaries) + np.uint64(begin)})
        if not values:
            return
        sums = torch.zeros((len(summaries), geometry.heads, layout.head_size), device=self.device)
        self.summarize(source, layout, value_sum=_rows(sums))
        held = summaries[:, begin + pages : begin + pages + values]
        held = held.view(len(summaries), geometry.heads, record)
        held[..., : 4 * layout.head_size] = sums.view(torch.uint8)

    def _payloads(self, slots: int, geometry: SlotGeometry, pages: int) -> torch.Tensor:
        """Memory of the device for the payloads of so many pages of each slot, uint8, zeros."""
        shape = slots, pages * geometry.payload_bytes
        return torch.zeros(shape, dtype=torch.uint8, device=self.device)


def _put(payloads: torch.Tensor, first: NDArray[np.uint64], geometry: SlotGeometry) -> None:
    """Copy payloads, [n, pages * payload_bytes], to the pages from the ``first`` ones, [n], on."""
    payloads = payloads.cpu()
    pages = np.arange(payloads.shape[1] // geometry.payload_bytes, dtype=np.uint64)
    source = _rows(payloads)[:, None] + pages * np.uint64(geometry.payload_bytes)
    target = first[:, None] + pages * np.uint64(geometry.page_bytes)
    _io.copy(source.ravel(), target.ravel(), geometry.payload_bytes)


def _rows(memory: torch.Tensor) -> NDArray[np.uint64]:
    """Absolute address of each row."""
    step = np.uint64(memory.stride(0) * memory.itemsize)
    return np.uint64(memory.data_ptr()) + np.arange(len(memory), dtype=np.uint64) * step


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
