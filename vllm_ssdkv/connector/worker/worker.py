"""The worker's half: moves bytes, keeps residency, reports results. One per rank."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.base.metrics import TELL_INTERVAL_S, Counters
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.connector.kv_layout import KVLayout, block_layout
from vllm_ssdkv.connector.messages import (
    BACKGROUND,
    RankReport,
    StepPlan,
)
from vllm_ssdkv.connector.worker.binding import Binding
from vllm_ssdkv.connector.worker.block_comparison import (
    BlockComparer,
    element_type,
    layers_of_tokens,
)
from vllm_ssdkv.connector.worker.block_copy import (
    BlockPort,
    OpaquePort,
    as_it_lies,
    blocks_as_bytes,
    check_overlay,
    plain_stretches,
    whole_blocks,
)
from vllm_ssdkv.connector.worker.layer_copy import LayerCopier
from vllm_ssdkv.connector.worker.loads import Loads
from vllm_ssdkv.connector.worker.rank_store import RankAccess, StoreWork
from vllm_ssdkv.connector.worker.saves import Saves
from vllm_ssdkv.connector.worker.step_timer import StepTimer
from vllm_ssdkv.connector.worker.stream_fence import StreamFence
from vllm_ssdkv.store.own_store import owned
from vllm_ssdkv.store.tier import TierStore
from vllm_ssdkv.store.tiered_store import TieredStore

if TYPE_CHECKING:
    from vllm_ssdkv.connector.worker.page_mode import PageMode
    from vllm_ssdkv.kernels.summary_builder import KernelSummaryBuilder

logger = logging.getLogger(__name__)

IDLE_S = 0.001
"""Time that a step which computes nothing waits for a load. It is short, since a request may
arrive."""


class SSDKVWorker:
    """Carries out the scheduler's plan on one rank.

    All methods run on the worker's main thread. Order within a step: :meth:`begin`, the forward
    pass (which uses the step of :attr:`paged` in page mode), :meth:`end`, :meth:`report`.
    """

    def __init__(
        self,
        config: SSDKVConfig,
        layout: KVLayout,
        opened: RankAccess,
        open_page_mode: Callable[[torch.device], PageMode] | None,
        binding: Binding,
    ):
        """
        Args:
            config: The options.
            layout: Of this rank's KV.
            opened: Its way to the store.
            open_page_mode: Opens page mode for caches on a device, once ``opened`` has started
                the store; None: the mode is ``reuse``.
            binding: What this rank computes with.
        """
        self.config = config
        self.layout = layout
        self._opened, self._own = opened, opened.own
        self._open_page_mode = open_page_mode
        self._binding = binding
        self._loads: Loads | None = None
        self._store: TierStore | None = None
        self._saves: Saves | None = None
        self._port_in: BlockPort | None = None
        """Copies hits into HBM."""
        self.paged: PageMode | None = None
        """Page mode; exists in that mode, once :meth:`register` was called."""
        self.layers: LayerCopier | None = None
        """Copies layers while others compute; exists once :meth:`register` was called."""
        self._timer: StepTimer | None = None
        self._fence = StreamFence(torch.device("cpu"))
        self.began = False
        """True once a step has begun: vLLM warms up before that, with requests of its own."""
        self._report = RankReport()
        self._invalid_blocks: set[int] = set()
        self._gauges_due = 0.0
        self._told_frames = 0
        self._settled = False

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self._opened.rank

    @property
    def counters(self) -> Counters:
        """Metrics of this process."""
        return self._opened.counters

    @property
    def rank_store(self) -> TierStore:
        """The store of either mode; exists once :meth:`register` was called."""
        if self._store is None:
            raise RuntimeError("vLLM has not registered the KV caches yet")
        return self._store

    @property
    def loads(self) -> Loads:
        """Loads of this rank; exist once :meth:`register` was called."""
        if self._loads is None:
            raise RuntimeError("vLLM has not registered the KV caches yet")
        return self._loads

    @property
    def saves(self) -> Saves:
        """Blocks that leave HBM; exists once :meth:`register` was called."""
        if self._saves is None:
            raise RuntimeError("vLLM has not registered the KV caches yet")
        return self._saves

    @property
    def page_mode(self) -> PageMode:
        """Page mode of this rank; exists in that mode, once :meth:`register` was called."""
        if self.paged is None:
            raise RuntimeError("the mode is not `page`, or vLLM has not registered the KV caches")
        return self.paged

    @property
    def store(self) -> TieredStore:
        """The store in this process; exists once :meth:`register` was called.

        Raises:
            TypeError: it is elsewhere, which the options allow in mode ``reuse`` only.
        """
        return owned(self._own).store

    @property
    def least_frames(self) -> int:
        """Blocks that this rank's DRAM holds at least; the store is in this process."""
        return owned(self._own).opened.plan.frames

    @property
    def least_chosen(self) -> int:
        """Blocks of contexts from which a layer's rows can choose at least, if DRAM has no frame of
        any; 0: they cannot. The store is in this process."""
        plan = owned(self._own).opened.plan
        if not plan.chosen_places:
            return 0
        from vllm_ssdkv.kernels.operands.step_tables import MOST_MISSES

        of_layer = plan.chosen_places / self.layout.geometry.layers
        return int(min(plan.kept_places, MOST_MISSES) / of_layer)

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Learn where HBM's blocks are, digest the model, and start the store's threads.

        Raises:
            UnsupportedError: the cache cannot be stored as it lies, nor the model be digested.
            StoreError: the scheduler's process cannot be told of the weights.
        """
        self._binding.start()
        caches = [self._blocks(kv_caches[name]) for name in self.layout.layer_names]
        for group in self.layout.overlaid:
            check_overlay(caches, [self._blocks(kv_caches[name]) for name in group])
        self._fence = StreamFence(caches[0].device)
        geometry, sizes = self.layout.geometry, self.layout.layer_bytes
        plain = self.config.mode == "reuse"
        stretches = plain_stretches(caches, geometry, sizes) if plain else None
        store = self._store = self._opened.start(
            StoreWork(
                self.config,
                self.layout.block_tokens,
                self._copy_in,
                self._summarizer(),
                stretches,
            )
        )
        self._loads = Loads(
            store,
            self._block_comparer(caches),
            self.layout.block_tokens,
            self.counters if self.rank == 0 else None,
        )
        self._timer = StepTimer(caches[0].device)
        if caches[0].is_cuda:
            self._opened.pin(caches[0].device)
        port: BlockPort
        if self._open_page_mode is not None:
            self.paged = self._open_page_mode(caches[0].device)
            port = self._port_in = self.paged.port(caches)
        else:
            port = self._port_in = OpaquePort(caches, geometry, store.save_frames, sizes)
            if store.load_frames is not store.save_frames:
                self._port_in = OpaquePort(caches, geometry, store.load_frames, sizes)
        self.layers = LayerCopier(
            port, self.layout, caches[0].device, self._layer_deadline(), self.counters
        )
        writes = self._own is None or not self._own.opened.reads_only
        self._saves = Saves(
            store, port, self.layers, geometry, self.counters, self.paged, writes=writes
        )

    def _block_comparer(self, caches: Sequence[torch.Tensor]) -> BlockComparer | None:
        """Make the comparer of blocks of the chain in these caches; None: their dtype allows no
        comparison, or this stage has none of its layers."""
        layout = self.layout
        kind = element_type(layout)
        if kind is None or not layout.chain_layers:
            return None
        return BlockComparer(
            [as_it_lies(cache) for cache in caches[: len(layout.chain_layers)]],
            layout.geometry,
            kind,
            layout.chain_tokens or layout.block_tokens,
            # Where blocks have padding, a token's elements are fewer than they seem.
            frozenset()
            if layout.padded
            else layers_of_tokens(layout.chain_layers, routed=self._binding.routed),
            block_layout(layout, self.config.page_tokens) if self.config.orders_tokens else None,
            layout.layer_bytes,
        )

    def _layer_deadline(self) -> float:
        """Seconds for a copy of a layer: it waits for what the GPU has to do before, where other
        ranks may be late by one deadline for each drive that hangs."""
        drives = 0 if self._own is None else len(self._own.device_paths)
        return self.config.io.deadline * (drives + 1)

    def _blocks(self, cache: torch.Tensor) -> torch.Tensor:
        layout = self.layout
        if layout.padded:
            return blocks_as_bytes(cache, layout.num_blocks, layout.geometry.payload_bytes)
        return whole_blocks(cache, layout.num_blocks)

    def _summarizer(self) -> KernelSummaryBuilder | None:
        layout, geometry = self.layout, self.layout.geometry
        if not geometry.tail_pages:
            return None
        from vllm_ssdkv.kernels.summary_builder import KernelSummaryBuilder

        return KernelSummaryBuilder(block_layout(layout, self.config.page_tokens), geometry)

    def _copy_in(self, frames: NDArray[np.int32], block_ids: NDArray[np.int64]) -> None:
        if self._port_in is None:
            raise RuntimeError("vLLM has not registered the KV caches yet")
        self._fence.follow()
        self._port_in.load(frames, block_ids)

    # ---- one step ----

    def begin(self, plan: StepPlan) -> None:
        """Before the forward pass: contexts are brought up to date and their reads started."""
        store = self.rank_store
        if self._saves is not None:
            self._saves.drop()  # of a step that failed
        own = self._own
        if own is not None and plan.segments is not None:
            own.change_segments(plan.segments)
        self._settled = plan.settled
        self._binding.take_changes(self._report)
        self._invalid_blocks.update(plan.invalid)
        if self.paged is not None:
            self.paged.update_contexts(plan)
        if plan.discard:
            gone = np.array(plan.discard, dtype=np.int64)
            store.abandon(gone)
            if self.paged is not None and self.paged.offloader is not None:
                # Another engine that shares them may fill them.
                self.paged.offloader.reclaim(gone)
        if own is not None:
            own.settle(plan.trim, plan.believed)
        if self._saves is not None:
            # Before the step's contexts are read: what makes room for its blocks is not in use.
            self._saves.begin(plan.save, has_inputs=bool(plan.x_slots))
        self.began = True
        if self.paged is not None:
            self.paged.begin(plan)
        if plan.timed and self._timer is not None:
            self._timer.begin(plan.step)

    def end(self, plan: StepPlan) -> None:
        """After the forward pass: finished blocks leave HBM, loads and writes are started."""
        self._fence.set()
        if self._timer is not None:
            self._timer.end()
        loads, saves, paged = self.loads, self.saves, self.paged
        spoiled: list[int] = []
        if paged is not None:
            spoiled = paged.end(
                self.counters,
                self._report,
                self._invalid_blocks,
                may_promote=loads.may_promote,
            )
        if self._binding.changed(plan, self._report):
            loads.distrust()
        commit, bound = plan.commit, self._binding.holds(plan)
        for comparison in plan.compare:
            lost = paged is not None and paged.computes_again(comparison.request_id)
            differs = loads.compare(comparison, self._report, bound=bound and not lost)
            if differs and comparison.fence_block:
                self._invalid_blocks.add(comparison.fence_block)
        if not bound:
            commit = commit.under_keys_of_nobody()
            pairs = zip(commit.slots.tolist(), commit.epochs.tolist(), strict=True)
            self._report.unbound.extend(pairs)
        saves.end(plan.save, commit, spoiled, plan.x_slots, self._report)
        if plan.copy_frames is not None:
            saves.copy_frames(plan.copy_frames, self.store, self._report)
        for load in plan.loads:
            adapter = load.adapter
            same = bound and (adapter is None or self._binding.holds_adapter(adapter))
            if same or load.request_id in BACKGROUND:
                loads.start(load)
            else:
                loads.refuse(load, self._report)

    def give_up(self) -> None:
        """Replace :meth:`end` after a forward pass that failed. Nothing of the step is stored."""
        logger.error("ssdkv: the forward pass failed: no block of this step is stored")
        if self.paged is not None:
            self.paged.give_up(self.counters)
        if self._saves is not None:
            self._saves.drop()

    # ---- results ----

    def collect(self, *, idle: bool) -> None:
        """Take in what the store's threads have finished.

        Blocks only if ``idle``, when there is nothing to compute, for up to :data:`IDLE_S` while
        loads are under way: vLLM would step again at once, and hold the interpreter that the
        loads need.
        """
        if self._store is None:
            return
        durable, failed = self._store.take_write_results()
        self._report.durable.extend(durable)
        self._report.failed_writes.extend(failed)
        self.loads.collect(IDLE_S if idle else 0.0, self._report)
        if self._timer is not None:
            self._report.steps.extend(self._timer.take())
        if self._own is not None:
            self._own.report(self._report)

    def take_loads(self) -> tuple[set[str], set[str]]:
        """Requests whose loads ended, and those of them that failed, since the last call."""
        return self._loads.take() if self._loads is not None else (set(), set())

    def take_invalid_blocks(self) -> set[int]:
        """HBM blocks of requests whose output of this step must not be used."""
        invalid, self._invalid_blocks = self._invalid_blocks, set()
        return invalid

    def take_report(self) -> RankReport | None:
        """Take the report for the scheduler, with the counters since the last call."""
        if self._settled or time.monotonic() >= self._gauges_due:
            self.update_gauges()
        report, self._report = self._report, RankReport()
        report.gained = self.counters.take_gained()
        report.gauges = self.counters.take_gauges()
        return None if report.empty() else report

    def update_gauges(self) -> None:
        """Refresh the gauges that this process owns, and what the I/O engine counts; see whether
        all data files are still there. Not in every step: the system's answer costs the
        interpreter, which then waits for the writing thread."""
        self._gauges_due = time.monotonic() + TELL_INTERVAL_S
        store = self.rank_store
        if store.open_frames != self._told_frames:
            self._report.frames = self._told_frames = store.open_frames
        if self.paged is not None:
            self.paged.update_gauges(self.counters, self._report)
        if self._own is not None:
            self._own.update_gauges()

    def close(self) -> None:
        """Write what is committed, stop the threads, release the files."""
        deadline_s = self.config.io.deadline
        ended = self.paged is None or self.paged.close(deadline_s)
        ended = (self.layers is None or self.layers.close(deadline_s)) and ended
        if self._store is not None:
            self._store.close(read_elsewhere=not ended)
        self._opened.close()
