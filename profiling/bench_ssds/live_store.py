"""A rank's real store under load, driven as the connector's scheduler and worker drive it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.io import MIN_STAGING
from vllm_ssdkv.config.io_engine import ThrottleRule
from vllm_ssdkv.connector.scheduler.kv_groups import GroupLoad
from vllm_ssdkv.connector.scheduler.rewriter import Rewriter
from vllm_ssdkv.connector.scheduler.slot_ledger import PendingWrites
from vllm_ssdkv.store.cache.frames import NO_FRAME, FrameState
from vllm_ssdkv.store.device_weights import DeviceWeights
from vllm_ssdkv.store.devices.wear import WearLedger
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.index.slot_index import SlotState
from vllm_ssdkv.store.io.testing.throttled import ThrottledEngine
from vllm_ssdkv.store.open import StorePlace, open_index, open_rank
from vllm_ssdkv.store.read.load_job import LoadJob
from vllm_ssdkv.store.tiered_store import TieredStore
from vllm_ssdkv.store.write_policy import WritePolicy

_TOKENS = 16
"""Tokens of a block; nothing depends on it."""

RUNNING = 2
"""Requests that run at a time: the last ones that were loaded."""

_CLOSE_S = 60.0

_PAUSE_S = 0.002
_PAUSE = threading.Event()


def pause() -> None:
    """Let the store's threads work. Real time passes, whatever the model of a twin says."""
    _PAUSE.wait(_PAUSE_S)


def _nothing(_frames: NDArray[np.int32], _blocks: NDArray[np.int64]) -> None:
    """Instead of a copy to HBM: the drives are measured."""


class LiveStore:
    """A store in reuse mode on some devices. One thread calls all methods; none waits for a device
    but :meth:`close`.

    Attributes:
        slots: Slots it has.
        counters: Of the rank.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        geometry: SlotGeometry,
        *,
        state: Path,
        capacity: int,
        dram: int,
        replicas: int = 1,
        throttle: Sequence[ThrottleRule] = (),
    ) -> None:
        """Make it.

        Args:
            directories: One on each device; equal weights.
            geometry: Shape of the slots.
            state: Directory for journal and ``store.json``.
            capacity: Bytes of each device.
            dram: Bytes of memory.
            replicas: Copies of each slot.
            throttle: Models of in-process twins; those may change while it runs.

        Raises:
            StoreError, ConfigError: as an engine's start.
        """
        devices = [{"path": d, "capacity": capacity, "weight": 1} for d in directories]
        config = SSDKVConfig.from_extra_config(
            {
                "mode": "reuse",
                "devices": devices,
                "state_dir": state,
                "replicas": replicas,
                "dram_gib": f"{dram} B",
                "io": {"staging": MIN_STAGING},  # which whole slots do not need
            }
        )
        place = StorePlace(config, [geometry], Fingerprint({"model": "bench_ssds"}))
        self.counters = Counters()
        self._opened = open_rank(place, 0, self.counters)
        self._index, self._rebalancer = open_index(place, self.counters)
        self._shares = DeviceWeights(self._rebalancer, place.paths)
        files = self._opened.files
        self._twin: ThrottledEngine | None = None
        if throttle:
            self._twin = ThrottledEngine(files.engine, len(directories), throttle)
            files = replace(files, engine=self._twin)
        self._files = files
        self._tiers = TieredStore(
            files, self._opened.arena, self._opened.plan, self._opened.num_slots, _TOKENS, _nothing
        )
        self.slots = files.placement.slots
        wear = WearLedger(None, place.paths, self.counters)
        policy = WritePolicy(
            config, config.devices, wear, [0.0] * len(directories), self.slots, self.counters
        )
        self._writes = PendingWrites(1)
        self._rewriter = Rewriter(
            self._index, self._rebalancer, policy, self.counters, self._writes, self._unpin
        )
        self._writing: dict[int, bytes] = {}
        self._loading: dict[str, GroupLoad] = {}
        self._running: deque[str] = deque()
        self._ended: list[int] = []
        self._names = 0
        self._jobs = 0

    def obey(self, throttle: Sequence[ThrottleRule]) -> None:
        """Twins have these models from now on; real devices know theirs."""
        if self._twin is not None:
            self._twin.change(throttle)

    def step(self) -> list[bytes]:
        """Do one step of vLLM's on a store; keys that were stored since the last one.

        Raises:
            BenchError: a write or a load failed, or a device is out of use.
        """
        self._rebalancer.step()
        segments = self._rebalancer.take_segments()
        if segments is not None:
            self._files.placement.change(segments)
        self._shares.update(0, self._files.speed.drain_events())
        durable, failed = self._tiers.take_write_results()
        if failed or self._files.health.drain_events():
            raise BenchError(f"{len(failed)} slots could not be written, or a device is out of use")
        slots = self._rewriter.written(
            [slot for slot, epoch in durable if self._writes.done(slot, epoch)]
        )
        self._index.durable(np.array(slots, dtype=np.int64))
        self._index.unpin(np.array(slots, dtype=np.int64))
        for outcome in self._tiers.take_load_outcomes():
            if not outcome.complete:
                raise BenchError("slots could not be read")
            load = self._loading.pop(outcome.request_id)
            self._rewriter.loaded(outcome.request_id, load, lasting=True)
            self._index.unpin(load.slots)
            self._ended.append(int(outcome.request_id))
            self._running.append(outcome.request_id)
            if len(self._running) > RUNNING:
                self._rewriter.forget(self._running.popleft())
        self._rewrite()
        return [self._writing.pop(slot) for slot in slots]

    def _rewrite(self) -> None:
        """As a step of scheduler and worker does."""
        rewrites = self._rewriter.plan(self._running, self._tiers.frames.frames)
        slots = np.array([item.new for item in rewrites], dtype=np.int64)
        held = len(self._tiers.reserve_frames(slots, wait=False))
        for item in rewrites[held:]:
            self._rewriter.failed(item.new)
        epochs = np.array([item.epoch for item in rewrites[:held]], dtype=np.int64)
        self._tiers.flush(slots[:held], epochs, [item.key for item in rewrites[:held]])

    def _unpin(self, slots: Sequence[int]) -> None:
        self._index.unpin(np.array(slots, dtype=np.int64))
        gone = [slot for slot in slots if self._index.state(slot) is SlotState.FREE]
        self._tiers.abandon(np.array(gone, dtype=np.int64))

    def store(self, most: int) -> list[bytes]:
        """Have up to ``most`` slots with new content in flight; keys of those that are new."""
        count = most - len(self._writing)
        if count <= 0:
            return []
        slots = self._index.allocate(min(count, self._index.available()))
        held = len(self._tiers.reserve_frames(slots, wait=False))
        self._index.unpin(slots[held:])
        slots = slots[:held]
        keys = [(self._names + i).to_bytes(32, "little") for i in range(held)]
        self._names += held
        for slot, key in zip(slots.tolist(), keys, strict=True):
            self._index.publish(slot, key)
            self._writing[slot] = key
            self._writes.add(slot, self._index.epoch(slot))
        self._tiers.flush(slots, self._index.epochs(slots), keys)
        return keys

    def load(self, keys: Sequence[bytes]) -> int:
        """Begin to read what the store has of these, as one job; how many it has.

        They come from the devices: DRAM forgets them first, as it would not in an engine, except
        what is being read or written. Their own writes must have ended. The job's number is
        :attr:`job`.
        """
        found = [(key, slot) for key in keys for slot in self._index.lookup([key]).tolist()]
        if not found:
            return 0
        slots = np.array([slot for _, slot in found], dtype=np.int64)
        self._index.pin(slots)
        frames = self._tiers.frames
        clean = [
            slot
            for slot in slots.tolist()
            if (frame := frames.frame_of(slot)) != NO_FRAME
            and frames.state(frame) is FrameState.CLEAN
        ]
        frames.forget(np.array(clean, dtype=np.int64))
        self._jobs += 1
        name, keys = str(self._jobs), tuple(key for key, _ in found)
        self._loading[name] = GroupLoad(slots, keys, slots + 1, len(slots))
        self._tiers.load(LoadJob(name, slots, self._index.epochs(slots), keys, slots + 1))
        return len(found)

    def has(self, key: bytes) -> bool:
        """Check whether it holds this."""
        return self._index.find(key) is not None

    @property
    def job(self) -> int:
        """Number of the newest job of :meth:`load`."""
        return self._jobs

    def take_ended(self) -> list[int]:
        """Numbers of jobs whose end :meth:`step` has seen since the last call."""
        ended, self._ended = self._ended, []
        return ended

    @property
    def loads(self) -> int:
        """Jobs that were asked for whose end :meth:`step` has not seen."""
        return len(self._loading)

    def moved(self) -> float:
        """Bytes that devices have read and written so far, as far as somebody waited for them."""
        return self._bytes("bytes_read") + self._bytes("bytes_written")

    def read(self) -> float:
        """Bytes that devices have read so far, likewise."""
        return self._bytes("bytes_read")

    def _bytes(self, name: str) -> float:
        return sum(self.counters.total(name, device=path) for path in self._shares.paths)

    def finish(self) -> None:
        """Wait until nothing is in flight.

        Raises:
            BenchError: as :meth:`step`, or the writes do not end.
        """
        if not self._tiers.drain(_CLOSE_S):
            raise BenchError("the writes do not end")
        end = time.monotonic() + _CLOSE_S
        while self._writes or self._loading:
            if time.monotonic() > end:
                raise BenchError("the reads do not end")
            self.step()
            pause()

    def close(self) -> None:
        """End it, with what is in flight. Its files stay."""
        self._tiers.close()
        self._rebalancer.close()
        self._index.close()
        self._opened.close()
