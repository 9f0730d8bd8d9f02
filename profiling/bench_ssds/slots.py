"""Requests of whole slots through our stripe map and an engine, as the store makes them."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np

from vllm_ssdkv.config.io_engine import EngineKind, EngineOptions, ThrottleRule
from vllm_ssdkv.profiling.bench_io.case import Sample
from vllm_ssdkv.profiling.bench_io.clock import Clock
from vllm_ssdkv.profiling.bench_io.engines import require_results
from vllm_ssdkv.profiling.bench_io.files import BenchFile, require_stamps
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.io.engines.open import open_engine
from vllm_ssdkv.store.io.engines.protocol import U32, Batch, Op
from vllm_ssdkv.store.memory.arena import Arena
from vllm_ssdkv.store.placement.lanes import lanes_for
from vllm_ssdkv.store.placement.stripe_map import StripeMap

GEOMETRY = SlotGeometry(kind="opaque", layers=31, heads=1, groups=1, payload_bytes=32 * 1024)
"""A slot of 31 layers with 32 KiB each: 996 KiB with its header, two stripe units."""

QUEUE_DEPTH = 16
"""Our default."""


class SlotRequests:
    """Loads and stores of slots over all devices, with one engine.

    Args:
        kind: Engine.
        files: The devices.
        weights: Share of each device in a stripe.
        arena: Memory; requests share it in turn.
        rules: Twins' models.

    Raises:
        EngineUnavailableError: the engine cannot run here.
    """

    def __init__(
        self,
        kind: EngineKind,
        files: Sequence[BenchFile],
        weights: Sequence[float],
        arena: Arena,
        rules: tuple[ThrottleRule, ...],
    ) -> None:
        self.stripes = StripeMap(GEOMETRY, lanes_for(weights), len(weights))
        self._who = f"ssdkv {kind}"
        self._files = files
        self._arena = arena
        fds, paths = [file.fd for file in files], [file.path for file in files]
        options = EngineOptions(engine=kind, queue_depth=QUEUE_DEPTH, throttle=rules)
        self._engine = open_engine(options, fds, paths, arena)

    def _submit(self, op: Op, slots: Sequence[int], memory: int) -> tuple[Batch, U32]:
        """One batch for a whole request, into the arena from slot place ``memory`` on."""
        places = self._arena.nbytes // GEOMETRY.slot_bytes
        extents = self.stripes.extents(np.asarray(slots, np.int64), 0, GEOMETRY.slot_bytes)
        inside = extents.buffer % np.uint64(GEOMETRY.slot_bytes)
        place = (extents.slot_index + memory) % places
        buffer = place.astype(np.uint64) * np.uint64(GEOMETRY.slot_bytes) + inside
        begin = np.uint64(self._files[0].begin(op))
        batch = self._engine.submit(
            op, extents.device, extents.offset + begin, extents.length, buffer
        )
        return batch, extents.length

    def check(self, slots: Sequence[int]) -> None:
        """Read the slots and compare each page with what the files hold.

        Raises:
            BenchError: a page is not what was written.
        """
        view = self._arena.view(0, len(slots) * GEOMETRY.slot_bytes)
        view[:] = 0
        batch, length = self._submit(Op.READ, slots, 0)
        require_results(batch, length, self._who)
        extents = self.stripes.extents(np.asarray(slots, np.int64), 0, GEOMETRY.slot_bytes)
        for device, offset, nbytes, buffer in zip(
            extents.device, extents.offset, extents.length, extents.buffer, strict=True
        ):
            piece = self._arena.view(int(buffer), int(nbytes))
            require_stamps(self._files[device], int(offset), piece, self._who)

    def run(self, op: Op, requests: Sequence[Sequence[int]]) -> Sample:
        """All requests at once, each one batch; until the last has ended.

        Raises:
            BenchError: an I/O failed.
        """
        waiting: collections.deque[tuple[Batch, U32]] = collections.deque()
        with Clock() as clock:
            for index, slots in enumerate(requests):
                waiting.append(self._submit(op, slots, index * len(slots)))
            for batch, length in waiting:
                require_results(batch, length, self._who)
        count = sum(map(len, requests))
        return clock.sample(count, GEOMETRY.slot_bytes)

    def close(self) -> None:
        """End the engine."""
        self._engine.close(60.0)
