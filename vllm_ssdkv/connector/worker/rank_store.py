"""Needs of a worker in the store of its rank, in this process or in a node.

:class:`TieredStore` is a :class:`RankStore`, and so is the client of a node. Page mode asks for
more, of a :class:`TieredStore` alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.connector.worker.block_copy import FrameMemory
from vllm_ssdkv.connector.worker.pinning import pin_arena
from vllm_ssdkv.node.client.node_drives import NodeDrives
from vllm_ssdkv.store.devices.health import WriteState
from vllm_ssdkv.store.engine_metrics import EngineMetrics
from vllm_ssdkv.store.format.segment import Segment
from vllm_ssdkv.store.open_store import OpenStore
from vllm_ssdkv.store.read.load_job import LoadJob, LoadOutcome
from vllm_ssdkv.store.read.prefix_loader import CopyIn
from vllm_ssdkv.store.tiered_store import TieredStore
from vllm_ssdkv.store.write.summary_builder import SummaryBuilder
from vllm_ssdkv.store.write.trim import SlotTrimmer

I64 = NDArray[np.int64]
Pairs = list[tuple[int, int]]
"""Slots and their epochs."""


class RankStore(Protocol):
    """The store of one rank. Methods mean what those of :class:`TieredStore` do."""

    @property
    def save_frames(self) -> FrameMemory:
        """Frames that :meth:`reserve_frames` gives."""

    @property
    def load_frames(self) -> FrameMemory:
        """Frames that hits are copied from."""

    @property
    def tails(self) -> NDArray[np.uint64]:
        """Addresses of memory for sparse sections; none where slots have none."""

    @property
    def open_frames(self) -> int:
        """Frames that DRAM has now."""

    def reserve_frames(
        self, slots: I64, *, wait: bool, spare_contexts: bool = False
    ) -> NDArray[np.int32]:
        """Frames for the first of these slots, [k], k <= n, for the caller to fill."""

    def filled(self, slots: I64, tails: NDArray[np.uint64]) -> None:
        """The frames of these slots are filled."""

    def flush(self, slots: I64, epochs: I64, keys: Sequence[bytes], *, bound: bool = True) -> None:
        """Write held slots to the devices in the background."""

    def abandon(self, slots: I64) -> None:
        """Forget what is held for these slots."""

    def trim(self, slots: I64) -> None:
        """Slots that hold nothing."""

    def take_write_results(self) -> tuple[Pairs, Pairs]:
        """(slot, epoch) pairs written and failed since the last call."""

    def load(self, job: LoadJob, *, whole: bool = False) -> None:
        """Bring a hit in, in the background."""

    def take_load_outcomes(self, patience_s: float = 0.0) -> list[LoadOutcome]:
        """Loads that ended since the last call."""

    def take_scrubbed(self) -> Pairs:
        """Pairs that the scrub found bad since the last call."""

    def take_mended(self) -> Pairs:
        """Pairs of which the scrub found a copy bad, since the last call."""

    def confirm(self, stored: Iterable[tuple[int, int]]) -> None:
        """Confirm that pairs which the scrub has told are stored."""

    def gauges(self) -> dict[str, int]:
        """Gauges of memory, by metric."""

    def close(self, *, read_elsewhere: bool = False) -> None:
        """Write what is committed and stop."""


@dataclass(frozen=True, slots=True)
class StoreWork:
    """Work of a worker for its store.

    Attributes:
        config: The options.
        block_tokens: Tokens of a slot.
        copy_in: Copies frames into HBM blocks.
        summarizer: Makes sparse sections, where slots have them.
        stretches: What ``copy_in`` copies, where plain copies are all that it does.
    """

    config: SSDKVConfig
    block_tokens: int
    copy_in: CopyIn
    summarizer: SummaryBuilder | None = None
    stretches: _io.Stretches | None = None


class RankAccess(Protocol):
    """One rank's way to its store: opened at the start, closed last."""

    @property
    def counters(self) -> Counters:
        """Metrics of this process."""

    @property
    def rank(self) -> int:
        """Number of the rank."""

    @property
    def device_paths(self) -> Sequence[str]:
        """Devices that this process reads and writes itself."""

    def start(self, work: StoreWork) -> RankStore:
        """Start the store's threads, once."""

    def pin(self, device: torch.device) -> None:
        """Register the memory that blocks are copied to and from with a GPU."""

    def change_segments(self, segments: Sequence[Segment]) -> None:
        """Slots lie elsewhere from now on."""

    def take_lost_devices(self) -> list[int]:
        """Devices that went out of use since the last call."""

    def take_returned_devices(self) -> list[int]:
        """Devices that are in use again since the last call."""

    def take_writing(self) -> list[tuple[int, float]]:
        """As :meth:`DeviceHealth.drain_writing`."""

    def take_speeds(self) -> list[tuple[int, float]]:
        """Devices whose worth has changed since the last call."""

    def update_gauges(self) -> None:
        """Refresh what is told of devices."""

    def close(self) -> None:
        """Release files, memory or connections."""


class EmbeddedRank:
    """A rank's data files, engine and memory in this process.

    Attributes:
        opened: What is open of the store.
        drives: Nodes that have the slots; None: the data files have them.
    """

    def __init__(self, opened: OpenStore, drives: NodeDrives | None = None):
        """``opened`` and ``drives`` are closed by :meth:`close`."""
        self.opened, self.drives = opened, drives
        self.counters: Counters = opened.files.counters
        self.rank = opened.files.rank
        self.device_paths: Sequence[str] = opened.files.health.paths
        self._metrics = EngineMetrics(opened.files.engine, self.device_paths, self.counters)

    def start(self, work: StoreWork) -> TieredStore:
        """See :class:`RankAccess`."""
        opened = self.opened
        return TieredStore(
            opened.files,
            opened.arena,
            opened.plan,
            opened.num_slots,
            work.block_tokens,
            work.copy_in,
            summarizer=work.summarizer,
            trimmer=self._trimmer() if work.config.trim else None,
            scrub_rate=work.config.io.scrub_rate,
            mends=self.drives is not None and work.config.replicas > 1,
            stretches=work.stretches,
            identities=opened.identities,
            keeps_unwritten=work.config.mode == "page",
        )

    def _trimmer(self) -> SlotTrimmer:
        opened = self.opened
        return SlotTrimmer(
            opened.devices,
            self.device_paths,
            opened.files.placement,
            opened.num_slots,
            self.counters,
        )

    def pin(self, device: torch.device) -> None:
        """See :class:`RankAccess`."""
        pin_arena(self.opened.arena, device)

    def change_segments(self, segments: Sequence[Segment]) -> None:
        """See :class:`RankAccess`."""
        self.opened.files.placement.change(segments)

    def take_lost_devices(self) -> list[int]:
        """See :class:`RankAccess`."""
        return list(self.opened.files.health.drain_events())

    def take_returned_devices(self) -> list[int]:
        """See :class:`RankAccess`."""
        return self.opened.files.health.drain_returns()

    def take_writing(self) -> list[tuple[int, float]]:
        """See :class:`RankAccess`."""
        return self.opened.files.health.drain_writing()

    def take_speeds(self) -> list[tuple[int, float]]:
        """See :class:`RankAccess`."""
        return list(self.opened.files.speed.drain_events())

    def update_gauges(self) -> None:
        """Refresh what the I/O engine counts; see whether all data files are still there."""
        self._metrics.update()
        health = self.opened.files.health
        for index, device in enumerate(self.opened.devices):
            state = device.state()
            if state.lost:
                health.quarantine(index, "its data file was removed", for_good=True)
            path, here = health.paths[index], index not in health.quarantined
            paused = health.writing(index) is not WriteState.OPEN
            self.counters.set("device_state", float(here), device=path)
            self.counters.set("writes_paused", float(paused), device=path)
            self.counters.set("store_bytes", float(state.stored_bytes), device=path)

    def close(self) -> None:
        """See :class:`RankAccess`."""
        if self.drives is not None:
            self.drives.close(self.opened.files.deadline_s)
        self.opened.close()
