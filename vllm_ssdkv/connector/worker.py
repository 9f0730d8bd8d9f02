"""The worker's half: moves bytes, keeps residency, reports results. One per rank."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.attention.kernels import select_kernels
from vllm_ssdkv.config import SSDKVConfig
from vllm_ssdkv.connector.blocks import BlockPort, OpaquePort, PagedPort
from vllm_ssdkv.connector.choosing import Choice
from vllm_ssdkv.connector.engine_metrics import EngineMetrics
from vllm_ssdkv.connector.messages import (
    PROBE,
    Commit,
    Load,
    LoadTime,
    RankReport,
    Save,
    SSDKVMetadata,
)
from vllm_ssdkv.connector.model import KVLayout
from vllm_ssdkv.connector.step import PagedStep, block_layout
from vllm_ssdkv.connector.step_timer import StepTimer
from vllm_ssdkv.errors import StoreError
from vllm_ssdkv.metrics import Counters
from vllm_ssdkv.store.arena import Arena
from vllm_ssdkv.store.cache import FrameState
from vllm_ssdkv.store.loader import LoadJob, LoadOutcome
from vllm_ssdkv.store.open_store import OpenStore
from vllm_ssdkv.store.tiers import TieredStore
from vllm_ssdkv.store.trim import SlotTrimmer

logger = logging.getLogger(__name__)

GAUGE_INTERVAL_S = 1.0


class SSDKVWorker:
    """Carries out the scheduler's plan on one rank.

    All methods run on the worker's main thread. Order within a step: :meth:`begin`, the forward
    pass (which uses :attr:`step` in page mode), :meth:`end`, :meth:`report`.
    """

    def __init__(self, config: SSDKVConfig, layout: KVLayout, opened: OpenStore):
        self.config = config
        self.layout = layout
        self.counters: Counters = opened.files.counters
        self.rank = opened.files.rank
        self._opened = opened
        self._store: TieredStore | None = None
        self._port: BlockPort | None = None
        self._timer: StepTimer | None = None
        self.step: PagedStep | None = None
        self._report = RankReport()
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._invalid_blocks: set[int] = set()
        self._poisoned: set[str] = set()
        self._loading: set[str] = set()
        paths = opened.files.health.paths
        self._engine_metrics = EngineMetrics(opened.files.engine, paths, self.counters)
        self._gauges_due = 0.0
        self._engine_due = 0.0
        self._attending = False
        self._told_written = [0] * len(opened.devices)
        self._choice = Choice.of(config)

    @property
    def store(self) -> TieredStore:
        """The store; exists once :meth:`register` was called."""
        if self._store is None:
            raise RuntimeError("vLLM has not registered the KV caches yet")
        return self._store

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Learn where HBM's blocks are and start the store's threads.

        Raises:
            UnsupportedError: the cache cannot be stored as it lies.
        """
        caches = [kv_caches[name] for name in self.layout.layer_names]
        self._store = TieredStore(
            self._opened.files,
            self._opened.arena,
            self._opened.plan,
            self._opened.num_slots,
            self.layout.block_tokens,
            self._copy_in,
            trimmer=self._trimmer(),
            scrub_rate=self.config.io.scrub_rate,
        )
        self._report.frames = self._store.frames.frames
        self._timer = StepTimer(caches[0].device)
        if caches[0].is_cuda:
            _pin(self._opened.arena, caches[0].device)
        if self.config.mode == "page":
            self._port = PagedPort(
                select_kernels(caches[0].device),
                [c.view(c.shape[0], -1) for c in caches],
                block_layout(self.layout, self.config.page_tokens),
                self.layout.geometry,
                self._store.frames,
            )
        else:
            self._port = OpaquePort(caches, self.layout.geometry, self._store.frames)

    def _trimmer(self) -> SlotTrimmer | None:
        if not self.config.trim:
            return None
        files, opened = self._opened.files, self._opened
        return SlotTrimmer(
            opened.devices, files.health.paths, files.placement, opened.num_slots, self.counters
        )

    def _copy_in(self, frames: NDArray[np.int32], block_ids: NDArray[np.int64]) -> None:
        if self._port is None:
            raise RuntimeError("vLLM has not registered the KV caches yet")
        self._port.load(frames, block_ids)

    # ---- one step ----

    def begin(self, plan: SSDKVMetadata) -> None:
        """Before the forward pass: contexts are brought up to date and their reads started."""
        store = self.store
        if plan.segments is not None:
            store.files.placement.change(plan.segments)
        self._attending = bool(plan.rows)
        for request_id in plan.forget:
            store.drop_context(request_id)
            self._poisoned.discard(request_id)
        for delta in plan.contexts:
            if delta.start == 0:
                self._poisoned.discard(delta.request_id)
            store.extend_context(delta.request_id, delta.start, delta.slots)
        if plan.discard:
            store.discard(np.array(plan.discard, dtype=np.int64))
        if plan.trim is not None:
            store.trim(plan.trim)
        if plan.rows:
            self.step = PagedStep(store, self.layout, plan.rows, self._poisoned, self._choice)
        if plan.timed and self._timer is not None:
            self._timer.begin(plan.step)

    def end(self, plan: SSDKVMetadata) -> None:
        """After the forward pass: finished blocks leave HBM, loads and writes are started."""
        if self._timer is not None:
            self._timer.end()
        spoiled: list[int] = []
        if self.step is not None:
            spoiled = self._close_step(self.step)
            self.step = None
        # Older blocks first: their writes free the frames that this step's blocks need.
        self._commit(plan.commit, ~np.isin(plan.commit.slots, plan.save.slots))
        good = ~np.isin(plan.save.slots, spoiled)
        self._skip(plan.save.part(~good))
        self._save(plan.save.part(good), plan.commit)
        for load in plan.loads:
            self._load(load)

    def _close_step(self, step: PagedStep) -> list[int]:
        """Slots of the blocks that this step computed from a context it could not read."""
        step.close()
        step.count(self.counters)
        self._report.bad.extend((slot, -1) for slot in step.bad_slots)
        spoiled: list[int] = []
        for row in step.poisoned_rows():
            self._poisoned.add(row.request_id)
            self._report.poisoned.append(row.request_id)
            self._invalid_blocks.add(row.fence_block)
            first = row.first_position // self.layout.block_tokens
            spoiled.extend(self.store.context_from(row.request_id, first).tolist())
        return spoiled

    def _save(self, save: Save, commit: Commit) -> None:
        """Copy blocks to frames, and commit each at once: the frames may be too few for all."""
        done = 0
        while done < len(save.slots):
            frames = self.store.hold(save.slots[done:], wait=self.config.mode == "page")
            if len(frames) == 0 or self._port is None:
                break
            part = slice(done, done + len(frames))
            self._port.save(save.block_ids[part], frames)
            self.store.filled(save.slots[part], frames)
            self._commit(commit, np.isin(commit.slots, save.slots[part]))
            done += len(frames)
        self._skip(save.part(np.arange(len(save.slots)) >= done))
        self.counters.add("stores_skipped", len(save.slots) - done, cause="write_buffer")

    def _skip(self, save: Save) -> None:
        """These blocks are not stored."""
        self._report.skipped.extend(zip(save.slots.tolist(), save.epochs.tolist(), strict=True))

    def _commit(self, commit: Commit, which: NDArray[np.bool_]) -> None:
        if which.any():
            keys = [key for key, wanted in zip(commit.keys, which.tolist(), strict=True) if wanted]
            self.store.commit(commit.slots[which], commit.epochs[which], keys)

    def _load(self, load: Load) -> None:
        self._loading.add(load.request_id)
        self.store.load(
            LoadJob(load.request_id, load.slots, load.epochs, load.keys, load.block_ids)
        )

    # ---- results ----

    def collect(self) -> None:
        """Take in what the store's threads have finished. Never blocks."""
        if self._store is None:
            return
        durable, failed = self._store.take_write_results()
        self._report.durable.extend(durable)
        self._report.failed_writes.extend(failed)
        for outcome in self._store.take_load_outcomes():
            self._loading.discard(outcome.request_id)
            self._report.loads.append(_load_time(outcome))
            self._report.bad.extend(outcome.bad)
            if outcome.request_id == PROBE:
                continue
            self._finished.add(outcome.request_id)
            self._count_request("hit_tokens", outcome.tokens_from_dram, tier="dram")
            self._count_request("hit_tokens", outcome.tokens_from_ssd, tier="ssd")
            if not outcome.complete:
                self._failed.add(outcome.request_id)
        if self._timer is not None:
            self._report.steps.extend(self._timer.take())
        self._report_writes()
        self._report.bad.extend(self._store.take_scrubbed())
        self._report.lost_devices.extend(self._opened.files.health.take_news())
        self._report.speeds.extend(self._opened.files.speed.take_news())
        self._watch_devices()

    def _report_writes(self) -> None:
        for device, path in enumerate(self._opened.files.health.paths):
            total = int(self.counters.total("bytes_written", device=path))
            if total > self._told_written[device]:
                self._report.written.append((device, total - self._told_written[device]))
                self._told_written[device] = total

    def _count_request(self, metric: str, value: float = 1, **labels: str) -> None:
        """Count what happens to a request, not to a rank: once, on the first rank."""
        if self.rank == 0:
            self.counters.add(metric, value, **labels)

    def _watch_devices(self) -> None:
        for index, device in enumerate(self._opened.devices):
            if device.lost():
                self._opened.files.health.quarantine(index, "its data file was removed")

    def take_loads(self) -> tuple[set[str], set[str]]:
        """Requests whose loads ended, and those of them that failed, since the last call."""
        finished, failed = self._finished, self._failed
        self._finished, self._failed = set(), set()
        return finished, failed

    def take_invalid_blocks(self) -> set[int]:
        """HBM blocks of requests whose output of this step must not be used."""
        invalid, self._invalid_blocks = self._invalid_blocks, set()
        return invalid

    def take_report(self) -> RankReport | None:
        """What the scheduler must hear of, since the last call."""
        report, self._report = self._report, RankReport()
        return None if report.empty() else report

    def update_gauges(self) -> None:
        """Refresh the gauges that this process owns; while tokens are decoded, once a second.

        What the engine counts is many numbers: once a second in any case.
        """
        now = time.monotonic()
        if now >= self._engine_due:
            self._engine_due = now + GAUGE_INTERVAL_S
            self._engine_metrics.update()
        if self._attending and now < self._gauges_due:
            return
        self._gauges_due = now + GAUGE_INTERVAL_S
        frames = self.store.frames
        total = frames.frames - frames.count(FrameState.FREE)
        self.counters.set("dram_frames", frames.frames)
        self.counters.set("dram_frames_used", total)
        self.counters.set("dram_frames_dirty", frames.count(FrameState.HELD, FrameState.WRITING))
        pages, summaries = self.store.choice_gauges()
        self.counters.set("page_cache_pages", pages)
        self.counters.set("summaries_held", summaries)
        quarantined = self._opened.files.health.quarantined
        for index, device in enumerate(self._opened.devices):
            path = self._opened.files.health.paths[index]
            self.counters.set("device_state", float(index not in quarantined), device=path)
            stored = os.fstat(device.fd).st_blocks * 512
            self.counters.set("store_bytes", float(stored), device=path)

    def close(self) -> None:
        """Write what is committed, stop the threads, release the files."""
        if self._store is not None:
            self._store.close()
        self._opened.close()


def _load_time(outcome: LoadOutcome) -> LoadTime:
    return LoadTime(
        outcome.request_id,
        outcome.tokens_from_dram,
        outcome.tokens_from_ssd,
        outcome.queued_s,
        outcome.dram_s,
        outcome.ssd_s,
    )


_MAPPED = 2
"""cudaHostRegisterMapped: kernels may read the memory where it lies."""


def _pin(arena: Arena, device: torch.device) -> None:
    """Register the arena with CUDA, so that copies and kernels reach it without a bounce.

    Written to the documented interface; no GPU was at hand to run it.

    Raises:
        StoreError: CUDA refuses.
    """
    with torch.cuda.device(device):
        cudart: Any = torch.cuda.cudart
        code = int(cudart().cudaHostRegister(arena.address, arena.nbytes, _MAPPED))
    if code:
        raise StoreError(
            f"CUDA cannot pin {arena.nbytes} bytes of DRAM (error {code}): lower dram_gib or raise "
            "the limit of locked memory (ulimit -l)"
        )
