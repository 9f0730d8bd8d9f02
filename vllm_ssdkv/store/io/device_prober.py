"""Probes of devices that are out of use: one whose superblock can be read is used again."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from uuid import UUID

import numpy as np

from vllm_ssdkv.base.errors import FormatError
from vllm_ssdkv.store.format.slot_geometry import SUPERBLOCK_BYTES
from vllm_ssdkv.store.format.superblock import BLOCK_BYTES, COPY_OFFSETS, Superblock
from vllm_ssdkv.store.io.engines.protocol import Batch, Op
from vllm_ssdkv.store.io.slot_io import SlotIO
from vllm_ssdkv.store.io.thread_errors import ThreadErrors
from vllm_ssdkv.store.memory.arena import Arena
from vllm_ssdkv.store.memory.memory_plan import PROBE_BYTES, PROBES

_LOOK_S: Final = 1.0
"""Pause after a round of probes that an error has ended, or while one hangs, in seconds."""


@dataclass(frozen=True, slots=True)
class Identity:
    """UUIDs in the superblocks of a data file: of its store, and its own."""

    store: UUID
    device: UUID


class DeviceProber:
    """Reads devices that are out of use, or take no writes, in a thread that exists from the first
    one on.

    A probe goes through the engine, with the deadline of all I/O, so that nothing waits for a
    device that hangs. It reads both copies of the superblock; one of them must be whole and name
    the store and the data file. Of a device whose superblocks are elsewhere, as those of nodes, the
    first page of the slots is read.

    Example:
        prober = DeviceProber(files, arena, plan.probe_offset, opened.identities)
        prober.step()
        prober.close(10.0)
    """

    def __init__(
        self, files: SlotIO, arena: Arena, offset: int, identities: Mapping[int, Identity]
    ):
        """
        Args:
            files: The slots, with their engine and the devices' health.
            arena: Memory of the engine.
            offset: Of :data:`PROBES` pieces of :data:`PROBE_BYTES` in it.
            identities: Of devices whose superblocks can be read, by number.
        """
        self._files, self._health = files, files.health
        self._arena, self._identities = arena, identities
        self._errors = ThreadErrors(files.counters, "prober")
        self._free = [offset + i * PROBE_BYTES for i in range(PROBES)]
        self._hung: list[tuple[int, int, Batch]] = []
        """Devices, and memory that their probes may still write to."""
        self._wake = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._health.on_trouble.append(self._begin)

    def step(self) -> float | None:
        """Try the devices that are due. Blocks for one deadline at most.

        Returns:
            Seconds until there may be others; None: until a device is out of use.
        """
        hung, self._hung = self._hung, []
        for device, at, batch in hung:
            (self._free.append(at) if batch.done() else self._hung.append((device, at, batch)))
        due, pause_s = self._health.to_probe()
        hanging = {device for device, _, _ in self._hung}
        under_way = []
        for device in [one for one in due if one not in hanging][: len(self._free)]:
            at = self._free.pop()
            self._arena.view(at, PROBE_BYTES)[:] = 0  # what is found there comes from the device
            under_way.append((device, at, self._read(device, at)))
        end = time.monotonic() + self._files.deadline_s
        for device, at, batch in under_way:
            ended = batch.wait(max(0.0, end - time.monotonic()))
            (self._free.append(at) if ended else self._hung.append((device, at, batch)))
            self._health.probed(device, right=ended and self._is_right(device, at, batch))
        if due:
            pause_s = self._health.to_probe()[1]
        return pause_s if pause_s is None else max(pause_s, _LOOK_S if self._hung else 0.0)

    def _read(self, device: int, at: int) -> Batch:
        offsets = COPY_OFFSETS if device in self._identities else (SUPERBLOCK_BYTES,)
        count = len(offsets)
        return self._files.engine.submit(
            Op.READ,
            np.full(count, device, dtype=np.uint16),
            np.array(offsets, dtype=np.uint64),
            np.full(count, BLOCK_BYTES, dtype=np.uint32),
            at + BLOCK_BYTES * np.arange(count, dtype=np.uint64),
        )

    def _is_right(self, device: int, at: int, batch: Batch) -> bool:
        """Check what a probe has read."""
        results = batch.results()
        wanted = self._identities.get(device)
        if wanted is None:
            return bool((results == BLOCK_BYTES).all())
        for number in np.flatnonzero(results == BLOCK_BYTES).tolist():
            copy = self._arena.view(at + number * BLOCK_BYTES, BLOCK_BYTES).tobytes()
            try:
                block = Superblock.decode(copy)
            except FormatError:
                continue  # the other copy may be whole
            if Identity(block.store, block.device) == wanted:
                return True
        return False

    # ---- the thread ----

    def _begin(self) -> None:
        with self._wake:
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(target=self._run, name="ssdkv-prober", daemon=True)
                self._thread.start()
            self._wake.notify_all()

    def _run(self) -> None:
        while True:
            pause_s: float | None = _LOOK_S
            with self._errors.swallowed("devices out of use are tried again later"):
                pause_s = self.step()
            with self._wake:
                if not self._stopping:
                    self._wake.wait(pause_s)
                if self._stopping:
                    return

    def close(self, timeout_s: float) -> bool:
        """End the thread; False when it did not end in time, or a probe hangs."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
        return all(batch.done() for _, _, batch in self._hung)
