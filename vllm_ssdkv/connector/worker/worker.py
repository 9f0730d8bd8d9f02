"""The worker's half: moves bytes, keeps residency, reports results. One per rank."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.attention.exact import RowBatch
from vllm_ssdkv.attention.sparse_deviation import SparseDeviation
from vllm_ssdkv.base.metrics import TELL_INTERVAL_S, Counters
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.connector.kv_layout import KVLayout, block_layout
from vllm_ssdkv.connector.messages import (
    BACKGROUND,
    CopyFrames,
    CopyToDram,
    Flush,
    RankReport,
    SlotArray,
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
    PagedPort,
    as_it_lies,
    blocks_as_bytes,
    check_overlay,
    plain_stretches,
    whole_blocks,
)
from vllm_ssdkv.connector.worker.device_memory import (
    channel_memory,
    hot_memory,
    summary_memory,
    take_summary_memory,
)
from vllm_ssdkv.connector.worker.layer_copy import LayerCopier
from vllm_ssdkv.connector.worker.layer_projector import LayerProjector
from vllm_ssdkv.connector.worker.loads import Loads
from vllm_ssdkv.connector.worker.paged_step import PagedStep
from vllm_ssdkv.connector.worker.rank_store import (
    EmbeddedRank,
    RankAccess,
    RankStore,
    StoreWork,
)
from vllm_ssdkv.connector.worker.selector_registry import SelectorRegistry
from vllm_ssdkv.connector.worker.step_timer import StepTimer
from vllm_ssdkv.connector.worker.stream_fence import StreamFence
from vllm_ssdkv.connector.worker.token_ordering import TokenOrdering
from vllm_ssdkv.kernels.dense import select_kernels
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.kernels.summary_builder import KernelSummaryBuilder
from vllm_ssdkv.offload.offloader import Offloader
from vllm_ssdkv.offload.open import open_offloader
from vllm_ssdkv.offload.protocol import DeviceSetup
from vllm_ssdkv.offload.xcache.input_layout import InputLayout
from vllm_ssdkv.offload.xcache.open_inputs import OpenInputs
from vllm_ssdkv.offload.xcache.projected_context import InputProjector
from vllm_ssdkv.offload.xcache.x_cache import XCache
from vllm_ssdkv.offload.xcache.x_rule import XShape
from vllm_ssdkv.sparse.prefetch import Prefetcher
from vllm_ssdkv.sparse.protocol import Selector
from vllm_ssdkv.sparse.selectors.sparf import SparfSelector
from vllm_ssdkv.store.open_store import OpenStore
from vllm_ssdkv.store.tiered_store import TieredStore

logger = logging.getLogger(__name__)

PROMOTED = 1 / 8
"""Of the blocks that a step reads from devices so many are brought into DRAM at a time: hits that
come meanwhile wait no longer than such a part of a step."""

IDLE_S = 0.001
"""How long a step that computes nothing waits for a load. No longer: a request may arrive."""


class SSDKVWorker:
    """Carries out the scheduler's plan on one rank.

    All methods run on the worker's main thread. Order within a step: :meth:`begin`, the forward
    pass (which uses :attr:`step` in page mode), :meth:`end`, :meth:`report`.
    """

    def __init__(
        self,
        config: SSDKVConfig,
        layout: KVLayout,
        opened: RankAccess,
        context_layers: Sequence[int],
        binding: Binding,
        x_layers: Sequence[torch.nn.Module] = (),
        x_shape: XShape | None = None,
    ):
        """
        Args:
            config: The options.
            layout: Of this rank's KV.
            opened: Its way to the store.
            context_layers: Those that attend to contexts in page mode, ascending.
            binding: What this rank computes with.
            x_layers: vLLM's attention layers, in the order of slots, where contexts may be X.
            x_shape: Of these layers.
        """
        self.config = config
        self.layout = layout
        self.counters: Counters = opened.counters
        self.rank = opened.rank
        self._opened = opened
        self._context_layers = context_layers
        self._x_layers, self._x_shape = x_layers, x_shape
        self._binding = binding
        self._loads: Loads | None = None
        self._store: RankStore | None = None
        self._port: BlockPort | None = None
        self._port_in: BlockPort | None = None
        """The way of hits into HBM, where their frames are not those of :attr:`_port`."""
        self.layers: LayerCopier | None = None
        """Copies layers while others compute; exists once :meth:`register` was called."""
        self._timer: StepTimer | None = None
        self._fence = StreamFence(torch.device("cpu"))
        self.step: PagedStep | None = None
        self.began = False
        """True once a step has begun: vLLM warms up before that, with requests of its own."""
        self._report = RankReport()
        self._invalid_blocks: set[int] = set()
        self._poisoned: set[str] = set()
        self._gauges_due = 0.0
        self._told_frames = 0
        self._settled = False
        self._told_left_out = False
        self._told_written = [0] * len(opened.device_paths)
        self._choices: SelectorRegistry | None = None
        self._guesses = Prefetcher() if config.sparse.prefetch else None
        self.ordering: TokenOrdering | None = None
        """Says how tokens of blocks that leave HBM are ordered; None: by position."""
        self.deviation: SparseDeviation | None = None
        """Set by benches: compares sparse attention with exact, in steps that begin later."""
        self.offloader: Offloader | None = None
        """Has a device attend to contexts, in steps that begin later; benches set their own."""
        self.x_cache: XCache | None = None
        """Keeps contexts as X, and projects them; None: none are stored so."""
        self.projector: LayerProjector | None = None
        """Of the layers, if there is an :attr:`x_cache`."""
        self.layer_ended: Callable[[], None] | None = None
        """Set by benches: called when a layer has its attention."""

    @functools.cached_property
    def block_layout(self) -> BlockLayout:
        """Layout of a block in HBM, in page mode."""
        return block_layout(self.layout, self.config.page_tokens)

    @functools.cached_property
    def context_layout(self) -> BlockLayout:
        """The same in a slot, whose pages are padded."""
        return self.block_layout.with_page_stride(self.layout.geometry.page_bytes)

    @property
    def rank_store(self) -> RankStore:
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
    def store(self) -> TieredStore:
        """The store in this process; exists once :meth:`register` was called.

        Raises:
            TypeError: a node has it, which the options allow in mode ``reuse`` only.
        """
        store = self.rank_store
        if not isinstance(store, TieredStore):
            raise TypeError("page mode needs the store in its own process")
        return store

    @property
    def _own(self) -> OpenStore:
        """Files and memory in this process; see :attr:`store`."""
        if not isinstance(self._opened, EmbeddedRank):
            raise TypeError("page mode needs the store in its own process")
        return self._opened.opened

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
        plain = self.config.mode == "reuse"
        store = self._store = self._opened.start(
            StoreWork(
                self.config,
                self.layout.block_tokens,
                self._copy_in,
                self._summarizer(),
                plain_stretches(caches, self.layout.geometry) if plain else None,
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
        if self.config.mode == "page":
            self._use_memory_of(caches[0].device)
            self.offloader = self._open_offloader()
            self._choices = SelectorRegistry.of(
                self.config, self.layout, caches[0].device, self._chosen_near(caches[0])
            )
            if self._x_shape is not None:
                self._open_x_cache(self._x_shape, caches[0].device)
            if self.config.orders_tokens:
                self.ordering = TokenOrdering(
                    self.block_layout,
                    self.layout.geometry.layers,
                    self._context_layers,
                    self.config.sparse.sink_tokens,
                    by_co_activation=self.config.sparse.token_order == "coactivation",
                )
            self._port = self._port_in = PagedPort(
                select_kernels(caches[0].device),
                [c.view(c.shape[0], -1) for c in caches],
                self.block_layout,
                self.layout.geometry,
                self.store.frames,
                self.ordering,
            )
        else:
            geometry = self.layout.geometry
            self._port = self._port_in = OpaquePort(caches, geometry, store.save_frames)
            if store.load_frames is not store.save_frames:
                self._port_in = OpaquePort(caches, geometry, store.load_frames)
        self.layers = LayerCopier(
            self._port, self.layout, caches[0].device, self._layer_deadline(), self.counters
        )

    def _block_comparer(self, caches: Sequence[torch.Tensor]) -> BlockComparer | None:
        """Make the comparer of blocks of these caches; None: their dtype allows no comparison."""
        layout = self.layout
        kind = element_type(layout.dtype, layout.cache_dtype)
        if kind is None:
            return None
        return BlockComparer(
            [as_it_lies(cache) for cache in caches],
            layout.geometry,
            kind,
            layout.block_tokens,
            # Where layers hold states, blocks of the others have padding.
            frozenset()
            if layout.has_states
            else layers_of_tokens(layout.layer_names, routed=self._binding.routed),
            self.block_layout if self.config.orders_tokens else None,
        )

    def _layer_deadline(self) -> float:
        """Seconds for a copy of a layer: it waits for what the GPU has to do before, where other
        ranks may be late by one deadline for each drive that hangs."""
        return self.config.io.deadline * (len(self._opened.device_paths) + 1)

    def _blocks(self, cache: torch.Tensor) -> torch.Tensor:
        layout = self.layout
        if layout.has_states:
            return blocks_as_bytes(cache, layout.num_blocks, layout.geometry.payload_bytes)
        return whole_blocks(cache, layout.num_blocks)

    def _use_memory_of(self, device: torch.device) -> None:
        """Take the memory of the device that the options ask for."""
        config, geometry = self.config, self.layout.geometry
        held = take_summary_memory()
        if config.selector == "exact":
            return
        layout = block_layout(self.layout, config.page_tokens)
        if config.sparse.hbm_pages is not None:
            memory = hot_memory(config.sparse.hbm_pages, layout, geometry, device)
            self.store.keep_hot_pages(memory)
        if config.scores_channels and config.sparse.channel_pages == "hbm":
            places = self.store.device_places
            self.store.keep_on_device(channel_memory(places, layout, geometry, device))
        elif held is not None and self._own.plan.summaries_on_device:
            places = self.store.device_places
            self.store.keep_on_device(summary_memory(held, places, layout, geometry))

    def _open_offloader(self) -> Offloader | None:
        """The device that attends, if the options name one."""
        rank, options, layout = self._opened, self.config.offload, self.layout
        if options is None:
            return None
        if not isinstance(rank, EmbeddedRank):
            raise TypeError("page mode needs the store in its own process")
        setup = DeviceSetup(
            self.config,
            options,
            self.counters,
            self.rank,
            layout.tp_size,
            self.context_layout,
            layout.query_heads or layout.kv_heads,
            rank.opened,
            self.store.checksums,
            rank.drives,
        )
        # Its threads wait for reads: one deadline for each drive that hangs.
        return open_offloader(setup, self.config.io.deadline * (len(rank.device_paths) + 1))

    def _chosen_near(self, cache: torch.Tensor) -> Callable[[SparfSelector], Selector] | None:
        """The device that attends as who chooses for `sparf`; None: it does not."""
        near = self.offloader
        if near is None or not near.caps.chooses or not self.config.scores_channels:
            return None
        if cache.is_cuda:
            logger.info("ssdkv: offload: the GPU chooses, which has the windows' keys")
            return None
        return near.device.selector

    def _open_x_cache(self, shape: XShape, device: torch.device) -> None:
        layout, store = self.layout, self.store
        block, dtype = layout.block_tokens, layout.dtype
        inputs = InputLayout(layout.geometry, block, shape.hidden, dtype)
        opened = OpenInputs(layout.geometry.layers, block, shape.hidden, dtype, device)
        self.projector = LayerProjector(self._x_layers)
        self.x_cache = XCache(
            inputs,
            opened,
            InputProjector(inputs, self.block_layout, store.arena, self.projector),
        )
        store.divide_staging(inputs.pages)

    def begin_recording(self, batch: RowBatch, device: torch.device) -> None:
        """Find the tokens of this step whose X is kept: once, before its first layer ends.

        ``device``: of the model."""
        if self.x_cache is not None and self.step is not None and self.step.records_x:
            slots = batch.hbm_slots(self.layout.block_tokens)
            self.x_cache.begin_step(batch, self.step.x_requests, slots, device)

    def record_inputs(self, layer_name: str, device: torch.device) -> None:
        """Keep X of a layer of this step, where rows are stored as X. ``device``: of the model."""
        cache, projector, step = self.x_cache, self.projector, self.step
        if cache is None or projector is None or step is None:
            return
        layer = step.layer(layer_name)
        if cache.recording:
            cache.record(layer, projector.take(layer))
        offload = self.config.offload
        measured = offload is not None and offload.x_share == "auto" and step.decodes
        if measured and layer == self._context_layers[0]:
            cache.measure(device, layer)

    def _summarizer(self) -> KernelSummaryBuilder | None:
        geometry = self.layout.geometry
        return KernelSummaryBuilder(self.block_layout, geometry) if geometry.tail_pages else None

    def _copy_in(self, frames: NDArray[np.int32], block_ids: NDArray[np.int64]) -> None:
        if self._port_in is None:
            raise RuntimeError("vLLM has not registered the KV caches yet")
        self._fence.follow()
        self._port_in.load(frames, block_ids)

    # ---- one step ----

    def begin(self, plan: StepPlan) -> None:
        """Before the forward pass: contexts are brought up to date and their reads started."""
        store = self.rank_store
        if self.layers is not None:
            store.abandon(self.layers.drop())  # of a step that failed
        if plan.segments is not None:
            self._opened.change_segments(plan.segments)
        self._settled = plan.settled
        self._binding.take_changes(self._report)
        self._invalid_blocks.update(plan.invalid)
        for request_id in plan.forget:
            self.store.drop_context(request_id)
            self._poisoned.discard(request_id)
            self._forget_choices(request_id)
            if self.x_cache is not None:
                self.x_cache.forget(request_id)
        for delta in plan.contexts:
            if delta.start == 0:
                self._poisoned.discard(delta.request_id)
                self._forget_choices(delta.request_id)
            self.store.extend_context(delta.request_id, delta.start, delta.slots)
        if plan.discard:
            store.abandon(np.array(plan.discard, dtype=np.int64))
        if plan.trim is not None:
            store.trim(plan.trim)
        if plan.believed:
            store.confirm(plan.believed)
        if self.layers is not None:
            # Before the step's contexts are read: what makes room for its blocks is not in use.
            self.layers.begin(plan.save, self._reserve_early, has_inputs=bool(plan.x_slots))
        self.began = True
        if self.ordering is not None:
            self.ordering.begin(plan.save.block_ids)
        if plan.rows:
            self.step = PagedStep(
                self.store,
                self.layout,
                plan.rows,
                self._poisoned,
                self._context_layers,
                self._choices,
                self._guesses,
                self.deviation,
                self.offloader,
                self.x_cache,
            )
            if self.projector is not None:
                self.projector.recording = self.step.records_x
        if plan.timed and self._timer is not None:
            self._timer.begin(plan.step)

    def end(self, plan: StepPlan) -> None:
        """After the forward pass: finished blocks leave HBM, loads and writes are started."""
        self._fence.set()
        if self._timer is not None:
            self._timer.end()
        spoiled: list[int] = []
        if self.step is not None:
            spoiled = self._close_step(self.step)
            self._tell_streamed(self.step)
            self.step = None
        if self.projector is not None:
            self.projector.recording = False
        loads = self.loads
        if self._binding.changed(plan, self._report):
            loads.distrust()
        commit, bound = plan.commit, self._binding.holds(plan)
        for comparison in plan.compare:
            whole = bound and comparison.request_id not in self._poisoned
            differs = loads.compare(comparison, self._report, bound=whole)
            if differs and comparison.fence_block:
                self._invalid_blocks.add(comparison.fence_block)
        if not bound:
            commit = commit.under_keys_of_nobody()
            pairs = zip(commit.slots.tolist(), commit.epochs.tolist(), strict=True)
            self._report.unbound.extend(pairs)
        if len(commit.slots):
            # Older blocks first: their writes free the frames that this step's blocks need.
            self._commit(commit, ~_among(commit.slots, plan.save.slots.tolist()))
        if len(plan.save.slots):
            filled = 0 if self.layers is None else self.layers.end()
            early = np.arange(len(plan.save.slots)) < filled
            lost = _among(plan.save.slots, spoiled)
            if lost.any():
                self.rank_store.abandon(plan.save.slots[early & lost])
                self._skip(plan.save.part(lost))
            kept = plan.save.slots[early & ~lost]
            self._keep(kept, self.rank_store.tails[:0], commit, len(kept))
            self._save(plan.save.part(~(early | lost)), commit, plan.x_slots)
        if plan.x_slots and self.x_cache is not None:
            self.x_cache.release(plan.save.block_ids[_among(plan.save.slots, plan.x_slots)])
        if plan.copy_frames is not None:
            self._copy_frames(plan.copy_frames)
        for load in plan.loads:
            adapter = load.adapter
            same = bound and (adapter is None or self._binding.holds_adapter(adapter))
            if same or load.request_id in BACKGROUND:
                loads.start(load)
            else:
                loads.refuse(load, self._report)

    def give_up(self) -> None:
        """In place of :meth:`end`: the forward pass has failed. Nothing of the step is stored."""
        logger.error("ssdkv: the forward pass failed: no block of this step is stored")
        if self.step is not None:
            self.step.close()
            self.step = None
        if self.projector is not None:
            self.projector.recording = False
        if self.layers is not None:
            self.rank_store.abandon(self.layers.drop())

    def _close_step(self, step: PagedStep) -> list[int]:
        """Slots of the blocks that this step computed from a context it could not read."""
        step.close()
        step.count(self.counters)
        if self.x_cache is not None:
            self.x_cache.end_step(self.counters)
        if step.left_out and not self._told_left_out:
            self._told_left_out = True
            logger.warning(
                "ssdkv: DRAM has no room for what the selector must know of the pages of %d "
                "request(s), which attend to everything: raise sparse.summaries, dram_gib with it",
                step.left_out,
            )
        self._report.bad.extend((slot, -1) for slot in step.bad_slots)
        self._report.unread.extend((slot, -1) for slot in step.unread_slots)
        spoiled: list[int] = []
        for row in step.poisoned_rows():
            self._poisoned.add(row.request_id)
            self._forget_choices(row.request_id)
            self._report.poisoned.append(row.request_id)
            self._invalid_blocks.add(row.fence_block)
            first = row.first_position // self.layout.block_tokens
            spoiled.extend(self.store.context_from(row.request_id, first).tolist())
        return spoiled

    def _tell_streamed(self, step: PagedStep) -> None:
        """Tell of blocks that this step read from the devices, and that DRAM may have room for now:
        other requests have ended. There may be now: other requests have ended."""
        if not self.loads.may_promote:
            return
        rows, contexts = step.streamed()
        if not rows:
            return
        for row, blocks in zip(rows, self.store.streamed(contexts, PROMOTED), strict=True):
            if len(blocks):
                self._report.streamed.append((row.request_id, blocks))

    def _forget_choices(self, request_id: str) -> None:
        if self._choices is not None:
            self._choices.drop(request_id)

    def _save(self, save: CopyToDram, commit: Flush, x_slots: Sequence[int]) -> None:
        """Copy blocks to frames, and commit each at once: the frames may be too few for all.

        ``x_slots`` get X."""
        done = 0
        store = self.rank_store
        at_once = len(store.tails) or len(save.slots)
        while done < len(save.slots):
            wanted = save.slots[done : done + at_once]
            frames = store.reserve_frames(wanted, wait=self.config.mode == "page")
            if len(frames) == 0 or self._port is None:
                break
            part = slice(done, done + len(frames))
            as_x = _among(save.slots[part], x_slots)
            if self.offloader is not None:
                self.offloader.reclaim(wanted[: len(frames)])
            tails = store.tails[: len(frames)]
            blocks, index = save.block_ids[part], save.index[part]
            if self.x_cache is not None and as_x.any():
                self.x_cache.save(blocks[as_x], frames[as_x], self.store.frames)
            if not as_x.all():
                self._port.save(blocks[~as_x], frames[~as_x], tails, index[~as_x])
            self._keep(save.slots[part], tails, commit, int(np.count_nonzero(~as_x)))
            done += len(frames)
        if done < len(save.slots):
            self._skip(save.part(np.arange(len(save.slots)) >= done))
        self.counters.add("stores_skipped", len(save.slots) - done, cause="write_buffer")

    def _reserve_early(self, slots: SlotArray) -> NDArray[np.int32]:
        """Frames for the first of these slots, before the step that fills them."""
        frames = self.rank_store.reserve_frames(slots, wait=False, spare_contexts=True)
        if self.offloader is not None:
            self.offloader.reclaim(slots[: len(frames)])
        return frames

    def _keep(
        self, slots: SlotArray, tails: NDArray[np.uint64], commit: Flush, with_kv: int
    ) -> None:
        """These slots' frames are filled, ``with_kv`` of them by K and V, and their tails, if they
        have any: commit them."""
        if not len(slots):
            return
        if self.offloader is not None:
            geometry = self.layout.geometry
            self.offloader.count_stored(with_kv * geometry.kv_pages * geometry.payload_bytes)
        self.rank_store.filled(slots, tails)
        self._commit(commit, _among(commit.slots, slots.tolist()))

    def _skip(self, save: CopyToDram) -> None:
        """These blocks are not stored."""
        self._report.skipped.extend(zip(save.slots.tolist(), save.epochs.tolist(), strict=True))

    def _commit(self, commit: Flush, which: NDArray[np.bool_]) -> None:
        if which.any():
            keys = [key for key, wanted in zip(commit.keys, which.tolist(), strict=True) if wanted]
            slots, epochs = commit.slots[which], commit.epochs[which]
            self.rank_store.flush(slots, epochs, keys, bound=commit.bound)

    def _copy_frames(self, plan: CopyFrames) -> None:
        """Write copies of frames into other slots."""
        if self.offloader is not None:
            self.offloader.reclaim(plan.new)
        copied, wrong = self.store.copy(plan.old, plan.old_epochs, plan.new, plan.keys)
        self._commit(Flush(plan.new, plan.epochs, plan.keys), copied)
        new = zip(plan.new[~copied].tolist(), plan.epochs[~copied].tolist(), strict=True)
        self._report.failed_writes.extend(new)
        old = zip(plan.old[wrong].tolist(), plan.old_epochs[wrong].tolist(), strict=True)
        self._report.bad.extend(old)

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
        self._report_writes()
        self._report.bad.extend(self._store.take_scrubbed())
        self._report.mended.extend(self._store.take_mended())
        self._report.lost_devices.extend(self._opened.take_lost_devices())
        self._report.returned_devices.extend(self._opened.take_returned_devices())
        self._report.writing.extend(self._opened.take_writing())
        self._report.speeds.extend(self._opened.take_speeds())

    def _report_writes(self) -> None:
        for device, path in enumerate(self._opened.device_paths):
            total = int(self.counters.total("bytes_written", device=path))
            if total > self._told_written[device]:
                self._report.written.append((device, total - self._told_written[device]))
                self._told_written[device] = total

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
        gauges = store.frame_gauges()
        if isinstance(store, TieredStore):
            gauges |= store.choice_gauges()
        for name, value in gauges.items():
            self.counters.set(name, value)
        if self._choices is not None:
            for name, value in self._choices.gauges().items():
                self.counters.set(name, value)
        if self.x_cache is not None and self._x_shape and self.offloader is not None:
            storage = self.offloader.sharing.contexts.device_rate
            self._report.x_rates = self.x_cache.rates(self._x_shape, storage)
        self._opened.update_gauges()

    def close(self) -> None:
        """Write what is committed, stop the threads, release the files."""
        deadline_s = self.config.io.deadline
        ended = self.offloader is None or self.offloader.close(deadline_s)
        ended = (self.layers is None or self.layers.close(deadline_s)) and ended
        if self._store is not None:
            self._store.close(read_elsewhere=not ended)
        self._opened.close()


def _among(slots: NDArray[np.int64], others: Sequence[int]) -> NDArray[np.bool_]:
    """Mask of these slots that are among the others, [n]; a few of either, as a step saves."""
    known = set(others)
    return np.array([slot in known for slot in slots.tolist()], dtype=np.bool_)
