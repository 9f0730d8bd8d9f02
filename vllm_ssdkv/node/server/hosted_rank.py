"""One rank of a hosted store: its data files, its DRAM, and what its threads have finished."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.metrics import TELL_INTERVAL_S, Counters
from vllm_ssdkv.store.cache.frames import FrameState
from vllm_ssdkv.store.devices.health import WriteState
from vllm_ssdkv.store.engine_metrics import EngineMetrics
from vllm_ssdkv.store.format.segment import Segment
from vllm_ssdkv.store.memory.arena import SharedArena
from vllm_ssdkv.store.open import StorePlace, open_rank
from vllm_ssdkv.store.tiered_store import TieredStore

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RankResults:
    """Ended work of a rank's threads. Pairs are (slot, epoch)."""

    written: list[tuple[int, int]] = field(default_factory=list)
    failed: list[tuple[int, int]] = field(default_factory=list)
    bad: list[tuple[int, int]] = field(default_factory=list)
    mended: list[tuple[int, int]] = field(default_factory=list)
    lost_devices: list[int] = field(default_factory=list)
    returned_devices: list[int] = field(default_factory=list)
    """Comes behind ``lost_devices``."""
    writing: list[tuple[int, float]] = field(default_factory=list)
    """Devices as :meth:`DeviceHealth.drain_writing` returns them."""
    speeds: list[tuple[int, float]] = field(default_factory=list)
    bytes_written: list[tuple[int, int]] = field(default_factory=list)
    """(device, bytes) since the last results."""


class LentFrames:
    """Frames that workers copy from, told of by a thread that does not wait for the copy.

    All sessions together have half of the frames at most: saves and reads go on whatever workers
    do. Any thread may call.

    Example:
        lent = LentFrames(lambda: 8)
        assert lent.take(3)
        lent.give_back(3)
    """

    def __init__(self, frames: Callable[[], int]):
        """``frames``: how many the rank has."""
        self._frames = frames
        self._lock = threading.Lock()
        self._lent = 0

    def take(self, count: int) -> bool:
        """Lend ``count`` more; False: that would be too many."""
        with self._lock:
            fits = self._lent + count <= self._frames() // 2
            self._lent += count if fits else 0
            return fits

    def give_back(self, count: int) -> None:
        """These are lent no more."""
        with self._lock:
            self._lent -= count


class HostedRank:
    """One rank's part of a store. Any thread may call; a thread of its own tells results.

    Attributes:
        rank: Its number.
        store: Its frames, files and threads.
        arena: Memory that engines on this host map.
        saving: Lock of whoever takes frames for blocks of engines.
        lent: Count of frames that workers copy from by themselves.
    """

    def __init__(self, place: StorePlace, rank: int, block_tokens: int):
        """Open, lock and claim the data files, and start the threads of the store. Blocks on I/O.

        Raises:
            SSDKVError: as :func:`vllm_ssdkv.store.open.open_rank`.
        """
        arenas: list[SharedArena] = []

        def memory(nbytes: int) -> SharedArena:
            arenas.append(SharedArena(nbytes))
            return arenas[0]

        self.rank = rank
        self.counters = Counters()
        self._opened = open_rank(place, rank, self.counters, memory=memory)
        (self.arena,) = arenas
        self.saving = threading.Lock()
        try:
            self.store = TieredStore(
                self._opened.files,
                self._opened.arena,
                self._opened.plan,
                self._opened.num_slots,
                block_tokens,
                _nothing_to_copy,
                scrub_rate=place.config.io.scrub_rate,
                identities=self._opened.identities,
            )
        except BaseException:
            self._opened.close()
            raise
        self.lent = LentFrames(lambda: self.store.frames.frames)
        self.paths = self._opened.files.health.paths
        self.counters.start_at_zero(self.paths)
        self._metrics = EngineMetrics(self._opened.files.engine, self.paths, self.counters)
        self._told_written = [0] * len(self._opened.devices)
        self._gauges_due = 0.0
        self._stopping = False
        self._thread: threading.Thread | None = None

    def describe(self) -> list[str]:
        """Lines of the log when the store was opened."""
        return self._opened.describe()

    def start(self, told: Callable[[int, RankResults], None]) -> None:
        """Begin to tell results: ``told`` is called with the rank in a thread of its own."""
        self._thread = threading.Thread(
            target=self._run, args=(told,), name=f"ssdkv-node-rank{self.rank}", daemon=True
        )
        self._thread.start()

    def take_results(self) -> RankResults:
        """Results since the last call."""
        written, failed = self.store.take_write_results()
        found = RankResults(written, failed)
        found.bad, found.mended = self.store.take_scrubbed(), self.store.take_mended()
        files = self._opened.files
        found.lost_devices = files.health.drain_events()
        found.returned_devices = files.health.drain_returns()
        found.writing = files.health.drain_writing()
        found.speeds = files.speed.drain_events()
        for device in range(len(self._opened.devices)):
            total = int(self.counters.total("bytes_written", device=self.paths[device]))
            gained = total - self._told_written[device]
            if gained > 0:
                found.bytes_written.append((device, gained))
                self._told_written[device] = total
        return found

    def frames(self) -> tuple[int, int]:
        """Frames of DRAM, and those that hold data."""
        frames = self.store.frames
        return frames.frames, frames.frames - frames.count(FrameState.FREE)

    def update_gauges(self) -> None:
        """Refresh what this rank tells of its engine, DRAM and devices; see whether all data files
        are still there."""
        self._metrics.update()
        there, used = self.frames()
        dirty = self.store.frames.count(FrameState.HELD, FrameState.WRITING)
        self.counters.set("dram_frames", there)
        self.counters.set("dram_frames_used", used)
        self.counters.set("dram_frames_dirty", dirty)
        health = self._opened.files.health
        for index, device in enumerate(self._opened.devices):
            state = device.state()
            if state.lost:
                health.quarantine(index, "its data file was removed", for_good=True)
            path, here = health.paths[index], index not in health.quarantined
            paused = health.writing(index) is not WriteState.OPEN
            self.counters.set("device_state", float(here), device=path)
            self.counters.set("writes_paused", float(paused), device=path)
            self.counters.set("store_bytes", float(state.stored_bytes), device=path)

    def change_placement(self, segments: Sequence[Segment]) -> None:
        """Places of slots from now on."""
        self._opened.files.placement.change(segments)

    def _run(self, told: Callable[[int, RankResults], None]) -> None:
        while not self._stopping:
            self.store.wait_write_results(TELL_INTERVAL_S)
            try:
                told(self.rank, self.take_results())
                if time.monotonic() >= self._gauges_due:
                    self._gauges_due = time.monotonic() + TELL_INTERVAL_S
                    self.update_gauges()
            except Exception:  # whatever it is, engines must not wait for ever
                self.counters.add("thread_errors", 1, thread="writer")
                logger.exception("ssdkv node: results of rank %d are late", self.rank)

    def close(self) -> None:
        """Write what is committed, and stop. Blocks, with the deadlines of the devices."""
        self._stopping = True
        self.store.close()
        if self._thread is not None:
            self._thread.join()
        self._opened.close()


def _nothing_to_copy(frames: NDArray[np.int32], blocks: NDArray[np.int64]) -> None:
    """Loads of a node go through the loaders of its sessions."""
    raise AssertionError(f"{len(frames)} frames for {len(blocks)} blocks of nobody")
