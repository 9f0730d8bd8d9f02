"""Chosen channels of K that lies channel-major on SSD: the first step of dual-step loading.

SparF (InstInfer, Pan et al. 2024, I-5) fetches the channel pages that hold a chosen channel, then
drops the channels that came along. What is kept is put side by side, so that the kernel reads it as
it would read all channels.

Frames have no channel pages, and those of a block that is being written are on no device yet: of
blocks in frames channel-major K is made, one layer's for as long as it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.store.read.selected_context import SelectedContexts

_AT_ONCE: Final = 64
"""Blocks whose channels are made at a time."""


class ChannelReader:
    """Reads channels of one step's contexts. Used by the thread of the forward pass."""

    def __init__(self, contexts: SelectedContexts, head_size: int, run_bytes: int):
        """``run_bytes``: of the tokens of a block in one channel."""
        self._contexts = contexts
        self._head_size = head_size
        self._run_bytes = run_bytes
        self._kept = np.zeros(0, dtype=np.uint8)

    def bring(
        self,
        layer: int,
        rows: NDArray[np.int64],
        channels: NDArray[np.int32],
        zeros: Callable[[int], NDArray[np.uint8]],
    ) -> NDArray[np.uint64]:
        """Addresses of every block's chosen channels, ``[kv_heads, count, block_tokens]``, [B].

        Blocks while they are read, with the deadline of I/O. They hold until the next call. Rows
        whose pages did not all come are poisoned, and have zeros for what is missing.

        Args:
            layer: From 0.
            rows: Positions in ``contexts.rows``, [R]; the blocks of others get no address to use.
            channels: Of each row and KV head, [R, kv_heads, count].
            zeros: Makes zeroed memory of so many bytes that the kernels reach.
        """
        contexts, run = self._contexts, self._run_bytes
        heads, count = channels.shape[1:]
        size = heads * count * run
        self._kept = zeros(len(contexts.slots) * size)
        base = np.uint64(self._kept.ctypes.data) + np.arange(
            len(contexts.slots), dtype=np.uint64
        ) * np.uint64(size)
        none = np.zeros(0, dtype=np.int64)
        asked, numbers, pairs, sources, targets = [none], [none], [none], [none], [none]
        head = np.arange(heads, dtype=np.int64)[:, None] * self._head_size
        order = np.arange(heads * count, dtype=np.int64) * run
        begun = 0
        for row, chosen in zip(rows.tolist(), channels, strict=True):
            which = (head + chosen).ravel()
            blocks = np.arange(contexts.begin[row], contexts.end[row], dtype=np.int64)
            framed = contexts.framed[blocks]
            page, inside = np.divmod(which, contexts.page_payload // run)
            pages, place = np.unique(page, return_inverse=True)
            self._make(layer, blocks[framed], len(pages), which * run, order, size)
            blocks = blocks[~framed]
            asked.append(np.repeat(blocks, len(pages)))
            numbers.append(np.tile(pages, len(blocks)))
            first = begun + np.arange(len(blocks), dtype=np.int64) * len(pages)
            pairs.append((first[:, None] + place[None, :]).ravel())
            sources.append(np.tile(inside * run, len(blocks)))
            targets.append((blocks[:, None] * size + order[None, :]).ravel())
            begun += len(blocks) * len(pages)
        self._read(layer, *map(np.concatenate, (asked, numbers, pairs, sources, targets)))
        return base

    def _make(
        self,
        layer: int,
        blocks: NDArray[np.int64],
        pages: int,
        sources: NDArray[np.int64],
        order: NDArray[np.int64],
        size: int,
    ) -> None:
        """Copy the runs at bytes ``sources``, [N], of a layer's channels to bytes ``order``, [N],
        of what is kept of each of these blocks in frames, ``size`` bytes each. Elsewhere they would
        be in so many ``pages``."""
        kept = np.uint64(self._kept.ctypes.data)
        for first in range(0, len(blocks), _AT_ONCE):
            part = blocks[first : first + _AT_ONCE]
            made = self._contexts.make_channels(layer, part, pages)
            rows = np.arange(len(part), dtype=np.int64) * made.shape[1]
            source = np.uint64(made.ctypes.data) + _sums(rows, sources)
            _io.copy(source, kept + _sums(part * size, order), self._run_bytes)

    def _read(
        self,
        layer: int,
        asked: NDArray[np.int64],
        numbers: NDArray[np.int64],
        pairs: NDArray[np.int64],
        sources: NDArray[np.int64],
        targets: NDArray[np.int64],
    ) -> None:
        """Fetch channel pages ``numbers`` of blocks ``asked``, [P], and copy runs out of them, [N].

        A run begins at byte ``sources`` of the page at ``pairs`` of these, and goes to byte
        ``targets`` of what is kept.
        """
        contexts = self._contexts
        kept = np.uint64(self._kept.ctypes.data) + targets.astype(np.uint64)
        every = contexts.channel_pages(layer, asked, numbers)
        for part in contexts.turns(every.pages):
            place = np.zeros(len(asked), dtype=np.int64)
            place[part] = np.arange(len(asked[part]))
            fetch = contexts.fetch_channels(every.part(part))
            try:
                good = np.zeros(len(asked), dtype=np.bool_)
                good[part] = contexts.complete(fetch, asked[part])
                runs = np.flatnonzero(good[pairs])
                address = fetch.address[place[pairs[runs]]] + sources[runs].astype(np.uint64)
                _io.copy(address, kept[runs], self._run_bytes)
            finally:
                contexts.release(fetch)


def _sums(one: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Each of one plus each of the other, [len(one) * len(other)]."""
    return (one[:, None] + other[None, :]).ravel().astype(np.uint64)
