"""Tails of slots whose pages are random: what stands for summaries and channels follows from KV."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.memory.summary_rows import (
    SummaryRows,
    channel_bytes,
    channels_offset,
    row_bytes,
    summary_bytes,
)

Bytes = NDArray[np.uint8]

NOTHING = 0xFF
"""What HBM holds where nothing was copied to; no content has this byte."""


def tail_of(geometry: SlotGeometry, kv: Bytes) -> Bytes:
    """What stands for summary and channel pages, [tail_pages, payload_bytes], of these pages of
    KV."""
    pages = [kv[i % len(kv)] + np.uint16(1 + i) for i in range(geometry.summary_pages)]
    for layer in range(geometry.layers):
        pages += list(channels_of(geometry, kv[geometry.first_page(layer) :]))
    tail = np.array(pages, dtype=np.uint16).reshape(geometry.tail_pages, kv.shape[1])
    return (tail % NOTHING).astype(np.uint8)


def channels_of(geometry: SlotGeometry, kv: Bytes) -> NDArray[np.uint16]:
    """Channel pages of a layer whose pages of KV are the first ones."""
    count, own = geometry.channel_pages, kv[: geometry.pages_per_layer]
    pages = [own[i % len(own)] + np.uint16(101 + i) for i in range(count)]
    return np.array(pages, dtype=np.uint16).reshape(count, geometry.payload_bytes) % NOTHING


def memory_at(address: int, size: int) -> Bytes:
    """Writable."""
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=np.uint8)


def addresses(memory: NDArray[np.float32] | Bytes) -> NDArray[np.uint64]:
    """Of each row."""
    steps = np.arange(len(memory), dtype=np.uint64) * np.uint64(memory.strides[0])
    return np.uint64(memory.ctypes.data) + steps


def rows_of(
    geometry: SlotGeometry, page_tokens: int, count: int, fill: int = 0
) -> tuple[Bytes, SummaryRows]:
    """Memory of so many rows of a table with channels, full of one byte, and their addresses."""
    size = row_bytes(geometry, page_tokens, channels=geometry.channel_pages > 0)
    memory = np.full((count, size), fill, np.uint8)
    channels = channels_offset(geometry, page_tokens) if geometry.channel_pages else -1
    return memory, SummaryRows(addresses(memory), channels)


def tails_of(rows: Bytes, geometry: SlotGeometry, page_tokens: int, padding: int) -> Bytes:
    """Tails of slots, [n, tail_bytes], with what these rows hold, and zeros behind it in the
    payload of its last page."""
    parts = [(0, summary_bytes(geometry, page_tokens), geometry.summary_pages)]
    begin, size = channels_offset(geometry, page_tokens), channel_bytes(geometry)
    for layer in range(geometry.layers if size else 0):
        parts.append((begin + layer * size, size, geometry.channel_pages))
    tails = np.full((len(rows), geometry.tail_pages, geometry.page_bytes), padding, np.uint8)
    first = 0
    for begin, size, pages in parts:
        held = np.zeros((len(rows), pages * geometry.payload_bytes), np.uint8)
        held[:, :size] = rows[:, begin : begin + size]
        payloads = held.reshape(len(rows), pages, geometry.payload_bytes)
        tails[:, first : first + pages, : geometry.payload_bytes] = payloads
        first += pages
    return tails.reshape(len(rows), geometry.tail_bytes)


class Tails:
    """Makes what :func:`content` has."""

    def __init__(self, geometry: SlotGeometry):
        self._geometry = geometry

    def _pages(self, address: int, pages: int) -> Bytes:
        memory = memory_at(address, pages * self._geometry.page_bytes)
        return memory.reshape(pages, -1)[:, : self._geometry.payload_bytes]

    def make_tails(self, frames: NDArray[np.uint64], tails: NDArray[np.uint64]) -> None:
        geometry = self._geometry
        for frame, tail in zip(frames.tolist(), tails.tolist(), strict=True):
            kv = self._pages(frame + geometry.header_bytes, geometry.kv_pages)
            self._pages(tail, geometry.tail_pages)[:] = tail_of(geometry, kv)

    def make_channels(self, pages: NDArray[np.uint64], channels: NDArray[np.uint64]) -> None:
        size = channel_bytes(self._geometry)
        for page, target in zip(pages.tolist(), channels.tolist(), strict=True):
            made = channels_of(self._geometry, self._pages(page, self._geometry.pages_per_layer))
            memory_at(target, size)[:] = made.astype(np.uint8).ravel()[:size]
