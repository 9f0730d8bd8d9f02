"""I/O engine whose devices are drives of nodes."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.node.client.volume_wire import VolumeWire, WirePart
from vllm_ssdkv.store.format.slot_geometry import SUPERBLOCK_BYTES
from vllm_ssdkv.store.io.engines.protocol import (
    I32,
    PENDING,
    U16,
    U32,
    U64,
    Op,
    depth_bound,
    latency_bound,
    zero_totals,
)
from vllm_ssdkv.store.memory.arena import Arena

I64 = NDArray[np.int64]

FRAME_BYTES: Final = 1 << 20
"""Bytes that one frame is about, at most, and the longest stretch: a quarter of the least
window."""

WireOf = Callable[[int], VolumeWire | None]
"""The wire of a node, by number; None: it is gone."""


class NodeBatch:
    """See :class:`vllm_ssdkv.store.io.engines.protocol.Batch`.

    Requests longer than a frame are several pieces; the result of a request is that of its pieces
    up to the first that is short, or the error of one.
    """

    def __init__(self, lengths: I64, pieces: I64):
        """
        Args:
            lengths: Bytes of each request, [n].
            pieces: Number of its pieces, [n].
        """
        self._pieces = np.full(int(pieces.sum()), PENDING, dtype=np.int64)
        self._first = np.cumsum(pieces) - pieces
        self._one_each = bool((pieces == 1).all())
        self._lengths = lengths
        self._left = len(self._pieces)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        if not self._left:
            self._ended.set()

    def end(self, which: I64, results: I64) -> None:
        """Results of pieces, by number; each once."""
        with self._lock:
            self._pieces[which] = results
            self._left -= len(which)
            if not self._left:
                self._ended.set()

    def done(self) -> bool:
        """See the protocol."""
        return self._ended.is_set()

    def wait(self, timeout_s: float) -> bool:
        """See the protocol."""
        return self._ended.wait(min(max(timeout_s, 0.0), threading.TIMEOUT_MAX))

    def results(self) -> I32:
        """See the protocol."""
        with self._lock:
            pieces = self._pieces.copy()
        if self._one_each or not len(pieces):
            return pieces.astype(np.int32)
        moved = np.add.reduceat(pieces.clip(min=0), self._first)
        worst = np.minimum.reduceat(pieces, self._first)  # PENDING is the least
        return np.where(worst < 0, worst, moved).astype(np.int32)


class _Totals:
    """Statistics of an engine. Any thread."""

    def __init__(self, devices: int):
        self._lock = threading.Lock()
        self._totals = zero_totals(devices)
        self._in_flight = [0] * devices

    def begin(self, op: Op, device: int, requests: int) -> None:
        name = op.name.lower()
        with self._lock:
            self._in_flight[device] += requests
            depth = self._in_flight[device]
            self._totals[f"{name}_submitted.{device}"] += requests
            self._totals[f"depth_{depth_bound(depth)}.{device}"] += requests
            self._totals[f"depth_sum.{device}"] += requests * depth

    def end(self, op: Op, device: int, results: I64, spent_ns: int) -> None:
        """``spent_ns``: time of each of the requests."""
        name, count = op.name.lower(), len(results)
        with self._lock:
            self._in_flight[device] -= count
            self._totals[f"{name}_requests.{device}"] += count
            self._totals[f"{name}_bytes.{device}"] += int(results.clip(min=0).sum())
            self._totals[f"{name}_errors.{device}"] += int((results < 0).sum())
            self._totals[f"{name}_nanoseconds.{device}"] += spent_ns * count
            self._totals[f"{name}_latency_{latency_bound(spent_ns)}.{device}"] += count

    @property
    def outstanding(self) -> int:
        with self._lock:
            return sum(self._in_flight)

    def copy(self) -> dict[str, int]:
        with self._lock:
            return dict(self._totals)


class NodeEngine:
    """See :class:`vllm_ssdkv.store.io.engines.protocol.IoEngine`; any thread may call any method.

    What lies on a node that is gone fails at once. Offsets are those of data files: their
    superblocks are here, the rest is in the volumes.

    Example:
        engine = NodeEngine(arena, np.array([0, 1]), np.array([0, 0]), wires.__getitem__)
        engine.submit(Op.READ, device, offset, length, buffer).wait(1.0)
    """

    name = "node"

    def __init__(self, arena: Arena, node_of: I64, drive_of: I64, wire_of: WireOf):
        """
        Args:
            arena: Memory of all requests.
            node_of: Number of the node that each device is on, [devices].
            drive_of: Number of the drive there, [devices].
            wire_of: The wire of each node, of the session of now.
        """
        self._arena_bytes = arena.nbytes
        self._node_of, self._drive_of, self._wire_of = node_of, drive_of, wire_of
        self._totals = _Totals(len(node_of))
        self._closed = False

    def submit(self, op: Op, device: U16, offset: U64, length: U32, buffer: U64) -> NodeBatch:
        """See the protocol."""
        if self._closed:
            raise ValueError("the engine is closed")
        device, length = np.ascontiguousarray(device), np.ascontiguousarray(length)
        offset, buffer = np.ascontiguousarray(offset), np.ascontiguousarray(buffer)
        _io.check_requests(device, offset, length, buffer, len(self._node_of), self._arena_bytes)
        if (offset < SUPERBLOCK_BYTES).any():
            raise ValueError("superblocks are not in the volumes of nodes")
        lengths = length.astype(np.int64)
        count = -(-lengths // FRAME_BYTES)
        batch = NodeBatch(lengths, count)
        of = np.repeat(np.arange(len(count)), count)
        inside = (np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)) * FRAME_BYTES
        pieces = _Pieces(
            device.astype(np.int64)[of],
            offset.astype(np.int64)[of] - SUPERBLOCK_BYTES + inside,
            np.minimum(lengths[of] - inside, FRAME_BYTES),
            buffer.astype(np.int64)[of] + inside,
        )
        for number in np.unique(pieces.device).tolist():
            self._submit_to(batch, op, number, np.flatnonzero(pieces.device == number), pieces)
        return batch

    def _submit_to(
        self, batch: NodeBatch, op: Op, device: int, which: I64, pieces: _Pieces
    ) -> None:
        """Have pieces of one device, by number, moved."""
        self._totals.begin(op, device, len(which))
        wire = self._wire_of(int(self._node_of[device]))
        now, drive = time.monotonic(), int(self._drive_of[device])
        parts = []
        for mine in _frames(which, pieces.length):

            def ended(part: WirePart, results: I64, mine: I64 = mine) -> None:
                spent_ns = int((time.monotonic() - part.asked) * 1e9)
                self._totals.end(op, device, results, spent_ns)
                batch.end(mine, results)

            parts.append(
                WirePart(
                    op,
                    drive,
                    pieces.offset[mine],
                    pieces.length[mine],
                    pieces.buffer[mine],
                    ended,
                    now,
                )
            )
        if wire is None:
            for part in parts:
                part.fail(errno.ENOTCONN)
        else:
            wire.submit(parts)

    def statistics(self) -> Mapping[str, int]:
        """See the protocol; the names are those of the threads engine."""
        return self._totals.copy()

    def close(self, timeout_s: float) -> bool:
        """See the protocol. Sessions with the nodes are ended by whoever has them."""
        self._closed = True
        deadline = time.monotonic() + timeout_s
        while self._totals.outstanding and time.monotonic() < deadline:
            time.sleep(0.002)
        return not self._totals.outstanding


class _Pieces:
    """Stretches of volumes, at most a frame long: device, offset, length, buffer, each [m]."""

    def __init__(self, device: I64, offset: I64, length: I64, buffer: I64):
        self.device, self.offset, self.length, self.buffer = device, offset, length, buffer


def _frames(which: I64, length: I64) -> Sequence[I64]:
    """Pieces, by number, in groups of a frame each."""
    ends = np.cumsum(length[which])
    if not len(which) or ends[-1] <= FRAME_BYTES:
        return [which] if len(which) else []
    found, begin = [], 0
    while begin < len(which):
        base = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, base + FRAME_BYTES, side="right")))
        found.append(which[begin:end])
        begin = end
    return found
