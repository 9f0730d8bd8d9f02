"""A rank's way to its store: in this process, or in nodes. Page mode needs the former."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch

from vllm_ssdkv import _io
from vllm_ssdkv.base.metrics import Counters, counter_key
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.connector.messages import RankReport, SlotArray
from vllm_ssdkv.connector.worker.pinning import pin_arena
from vllm_ssdkv.store.devices.health import WriteState
from vllm_ssdkv.store.engine_metrics import EngineMetrics
from vllm_ssdkv.store.format.segment import Segment
from vllm_ssdkv.store.open_store import OpenStore
from vllm_ssdkv.store.read.prefix_loader import CopyIn
from vllm_ssdkv.store.tier import Pairs, TierStore
from vllm_ssdkv.store.tiered_store import TieredStore
from vllm_ssdkv.store.write.summary_builder import SummaryBuilder
from vllm_ssdkv.store.write.trim import SlotTrimmer

if TYPE_CHECKING:
    from vllm_ssdkv.node.client.node_drives import NodeDrives

_Store_co = TypeVar("_Store_co", bound=TieredStore, covariant=True)


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
    def own(self) -> EmbeddedRank[TieredStore] | None:
        """This rank's part of a store in this process, as far as it does more; None: there is
        none."""

    def start(self, work: StoreWork) -> TierStore:
        """Start the store's threads, once."""

    def pin(self, device: torch.device) -> None:
        """Register the memory that blocks are copied to and from with a GPU."""

    def close(self) -> None:
        """Release files, memory or connections."""


class EmbeddedRank(Generic[_Store_co]):
    """A rank's data files, engine and memory in this process.

    Attributes:
        opened: What is open of the store.
        drives: Nodes that have the slots; None: the data files have them.
    """

    def __init__(self, opened: OpenStore, kind: type[_Store_co], drives: NodeDrives | None = None):
        """``opened`` and ``drives`` are closed by :meth:`close`; ``kind``: of the store."""
        self._kind = kind
        self.opened, self.drives = opened, drives
        self.counters: Counters = opened.files.counters
        self.rank = opened.worker
        self.device_paths: Sequence[str] = opened.files.health.paths
        self._metrics = EngineMetrics(opened.files.engine, self.device_paths, self.counters)
        self._written = [counter_key("bytes_written", device=path) for path in self.device_paths]
        self._told_written = [0] * len(self.device_paths)
        self._store: _Store_co | None = None

    @property
    def own(self) -> EmbeddedRank[_Store_co]:
        """See :class:`RankAccess`."""
        return self

    @property
    def store(self) -> _Store_co:
        """The store; exists once :meth:`start` was called."""
        if self._store is None:
            raise RuntimeError("vLLM has not registered the KV caches yet")
        return self._store

    def start(self, work: StoreWork) -> _Store_co:
        """See :class:`RankAccess`."""
        opened = self.opened
        self._store = self._kind(
            opened.files,
            opened.arena,
            opened.plan,
            opened.num_slots,
            work.block_tokens,
            work.copy_in,
            summarizer=work.summarizer,
            trimmer=self._trimmer() if work.config.trim and not opened.reads_only else None,
            scrub_rate=None if opened.reads_only else work.config.io.scrub_rate,
            mends=self.drives is not None and work.config.replicas > 1,
            stretches=work.stretches,
            identities=opened.identities,
            keeps_unwritten=work.config.mode == "page",
        )
        return self._store

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
        """Slots lie elsewhere from now on."""
        self.opened.files.placement.change(segments)

    def settle(self, trim: SlotArray | None, believed: Pairs) -> None:
        """Slots that hold nothing, and pairs that the scrub has told and that are stored."""
        if trim is not None:
            self.store.trim(trim)
        if believed:
            self.store.confirm(believed)

    def report(self, report: RankReport) -> None:
        """Report what devices and scrub have told since the last call."""
        health = self.opened.files.health
        for device, key in enumerate(self._written):
            total = int(self.counters.value(key))
            if total > self._told_written[device]:
                report.written.append((device, total - self._told_written[device]))
                self._told_written[device] = total
        report.bad.extend(self.store.take_scrubbed())
        report.mended.extend(self.store.take_mended())
        report.lost_devices.extend(health.drain_events())
        report.returned_devices.extend(health.drain_returns())
        report.writing.extend(health.drain_writing())
        report.speeds.extend(self.opened.files.speed.drain_events())

    def update_gauges(self) -> None:
        """Refresh the gauges of memory, and what the I/O engine counts; see whether all data files
        are still there."""
        for name, value in self.store.gauges().items():
            self.counters.set(name, value)
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
            if not self.opened.reads_only:
                self.counters.set("store_bytes", float(state.stored_bytes), device=path)

    def close(self) -> None:
        """See :class:`RankAccess`."""
        if self.drives is not None:
            self.drives.close(self.opened.files.deadline_s)
        self.opened.close()
