"""Page mode of a rank: its contexts, what chooses pages of them, and what attends to them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from vllm_ssdkv.attention.exact import RowBatch
from vllm_ssdkv.attention.sparse_deviation import SparseDeviation
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.connector.kv_layout import KVLayout, block_layout
from vllm_ssdkv.connector.messages import RankReport, StepPlan
from vllm_ssdkv.connector.worker.device_memory import (
    hot_memory,
    summary_memory,
    take_summary_memory,
)
from vllm_ssdkv.connector.worker.layer_projector import LayerProjector
from vllm_ssdkv.connector.worker.paged_port import PagedPort
from vllm_ssdkv.connector.worker.paged_step import PagedStep
from vllm_ssdkv.connector.worker.rank_store import EmbeddedRank
from vllm_ssdkv.connector.worker.selector_registry import SelectorRegistry
from vllm_ssdkv.connector.worker.token_ordering import TokenOrdering
from vllm_ssdkv.kernels.dense import select_kernels
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
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
from vllm_ssdkv.store.context_store import ContextStore

if TYPE_CHECKING:
    from vllm_ssdkv.connector.worker.device_decode import DeviceDecode

logger = logging.getLogger(__name__)

PROMOTED = 1 / 8
"""Fraction of the blocks that a step reads from devices that is brought into DRAM at a time: hits
that come meanwhile wait no longer than this fraction of a step."""


@dataclass(frozen=True, slots=True)
class ContextLayers:
    """Layers of a model that attend to contexts.

    Attributes:
        numbers: Their numbers, ascending.
        inputs: vLLM's attention layers, in the order of slots, where contexts may be stored as X.
        x_shape: Shape of these layers; None: no context is stored as X.
        plain: Whether their logits, and those of the model's other layers, are products of queries
            and keys alone, and none has attention sinks.
    """

    numbers: Sequence[int] = ()
    inputs: Sequence[torch.nn.Module] = ()
    x_shape: XShape | None = None
    plain: bool = True


@dataclass(slots=True, eq=False)
class PageMode:
    """Contexts of a rank, and the step that attends to them. Used by the worker's thread.

    Attributes:
        config: The options.
        layout: Layout of this rank's KV.
        store: The store, in this process.
        layers: Layers that attend to contexts.
        block_layout: Layout of a block in HBM.
        context_layout: Layout of a block in a slot, whose pages are padded.
        choices: Selectors of requests; None: all attend to everything.
        offloader: Has a device attend to contexts, in steps that begin later; benches set their
            own.
        ordering: Says how tokens of blocks that leave HBM are ordered; None: by position.
        x_cache: Keeps contexts as X, and projects them; None: none are stored so.
        projector: Projector of the layers, if there is an ``x_cache``.
        deviation: Set by benches: compares sparse attention with exact, in steps that begin later.
        layer_ended: Set by benches: called when a layer has its attention.
        device: Attends on a GPU to the steps that it serves, without the host; None: nobody does.
        step: The step under way.
    """

    config: SSDKVConfig
    layout: KVLayout
    store: ContextStore
    layers: ContextLayers
    block_layout: BlockLayout
    context_layout: BlockLayout
    choices: SelectorRegistry | None
    offloader: Offloader | None
    ordering: TokenOrdering | None
    x_cache: XCache | None
    projector: LayerProjector | None
    deviation: SparseDeviation | None = None
    layer_ended: Callable[[], None] | None = None
    device: DeviceDecode | None = None
    step: PagedStep | None = None
    _guesses: Prefetcher | None = None
    _poisoned: set[str] = field(default_factory=set)
    """Requests that wait to be computed again."""
    _told_left_out: bool = False

    @classmethod
    def open(
        cls,
        config: SSDKVConfig,
        layout: KVLayout,
        rank: EmbeddedRank[ContextStore],
        layers: ContextLayers,
        device: torch.device,
    ) -> PageMode:
        """Open what the options ask for: selectors, a device that attends, X.

        Args:
            config: The options.
            layout: Layout of this rank's KV.
            rank: This rank's part of a store, which runs.
            layers: Layers that attend to contexts.
            device: Device of the caches in HBM.
        """
        store, hbm = rank.store, block_layout(layout, config.page_tokens)
        slot = hbm.with_page_stride(layout.geometry.page_bytes)
        _use_memory_of(device, config, layout, rank, store)
        offloader = _open_offloader(config, layout, rank, store, slot)
        near = _chosen_near(config, offloader, device)
        choices = SelectorRegistry.of(config, layout, device, near)
        projector = x_cache = None
        if layers.x_shape is not None:
            projector = LayerProjector(layers.inputs)
            per_slot = layers.x_shape.blocks_per_slot(layout.block_tokens, config.window_tokens)
            inputs = InputLayout(
                layout.geometry, layout.block_tokens, layers.x_shape.hidden, layout.dtype, per_slot
            )
            x_cache = _open_x_cache(inputs, store, projector, device, hbm)
        ordering = None
        if config.orders_tokens:
            ordering = TokenOrdering(
                hbm,
                layout.geometry.layers,
                layers.numbers,
                config.sparse.sink_tokens,
                by_co_activation=config.sparse.token_order == "coactivation",
            )
        return cls(
            config,
            layout,
            store,
            layers,
            hbm,
            slot,
            choices,
            offloader,
            ordering,
            x_cache,
            projector,
            _guesses=Prefetcher() if config.sparse.prefetch else None,
        )

    def port(self, caches: Sequence[torch.Tensor]) -> PagedPort:
        """Make the way between these caches, by layer, and frames of the store."""
        return PagedPort(
            select_kernels(caches[0].device),
            [self.flat(cache) for cache in caches],
            self.block_layout,
            self.layout.geometry,
            self.store.frames,
            self.ordering,
        )

    def flat(self, cache: torch.Tensor) -> torch.Tensor:
        """View a layer's cache in HBM as [num_blocks, elements], whatever vLLM calls their type."""
        return cache.view(cache.shape[0], -1).view(self.block_layout.dtype)

    def computes_again(self, request_id: str) -> bool:
        """Check whether a request waits to be computed again: its context could not be read."""
        return request_id in self._poisoned

    # ---- one step ----

    def update_contexts(self, plan: StepPlan) -> None:
        """Bring the contexts of requests up to date. Before this, what steps that the device has
        done have borrowed is given back: else there may be no room for what follows."""
        if self.device is not None:
            self.device.leases.settle()
        for request_id in plan.forget:
            self.store.drop_context(request_id)
            self._begin_again(request_id)
            if self.x_cache is not None:
                self.x_cache.forget(request_id)
        for delta in plan.contexts:
            if delta.start == 0:
                self._begin_again(delta.request_id)
            self.store.extend_context(delta.request_id, delta.start, delta.slots)

    def _begin_again(self, request_id: str) -> None:
        self._poisoned.discard(request_id)
        self._forget_choices(request_id)

    def begin(self, plan: StepPlan) -> None:
        """Begin a step: the reads of its contexts are started."""
        if self.ordering is not None:
            self.ordering.begin(plan.save.block_ids)
        if not plan.rows:
            return
        self.step = PagedStep(
            self.store,
            self.layout,
            plan.rows,
            self._poisoned,
            self.layers.numbers,
            self.choices,
            self._guesses,
            self.deviation,
            self.offloader,
            self.x_cache,
        )
        if self.projector is not None:
            self.projector.recording = self.step.records_x
        if self.device is not None:
            self.device.begin(self.step)

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
        layer = step.layers[layer_name]
        if cache.recording:
            cache.record(layer, projector.take(layer))
        offload = self.config.offload
        measured = offload is not None and offload.x_share == "auto" and step.decodes
        if measured and layer == self.layers.numbers[0]:
            cache.measure(device, layer)

    def end(
        self, counters: Counters, report: RankReport, invalid: set[int], *, may_promote: bool
    ) -> list[int]:
        """End the step, if there is one, and report it: slots of the blocks that it computed from
        a context it could not read. HBM blocks of these requests become ``invalid``."""
        step, self.step = self.step, None
        spoiled: list[int] = []
        if step is not None:
            spoiled = self._close(step, counters, report, invalid)
            if may_promote:
                self._report_streamed(step, report)
        if self.projector is not None:
            self.projector.recording = False
        return spoiled

    def give_up(self, counters: Counters) -> None:
        """End a step whose forward pass has failed."""
        if self.offloader is not None:
            self.offloader.device.end_step()  # it knows where contexts of this step are
        if self.step is not None:
            self._end_step(self.step)
            self.step = None
        if self.x_cache is not None:
            self.x_cache.end_step(counters)
        if self.projector is not None:
            self.projector.recording = False

    def _end_step(self, step: PagedStep) -> None:
        """Give back what was borrowed; once the device has done what it was given so far, if it may
        still have frames of steps before in use."""
        if self.device is None:
            step.give_back()
        else:
            self.device.withdraw()
            self.device.leases.end_step(step.give_back)
        step.rebalance()

    def _close(
        self, step: PagedStep, counters: Counters, report: RankReport, invalid: set[int]
    ) -> list[int]:
        device = self.device
        if device is not None and not step.plans:  # no layer was attended to here
            device.end(step, counters, self.config.io.deadline)
            step.rebalance()
            step.count(counters, on_device=True)
        else:
            self._end_step(step)
            step.count(counters)
        if self.x_cache is not None:
            self.x_cache.end_step(counters)
        if step.left_out and not self._told_left_out:
            self._told_left_out = True
            logger.warning(
                "ssdkv: DRAM has no room for what the selector must know of the pages of %d "
                "request(s), which attend to everything: raise sparse.summaries, dram_gib with it",
                step.left_out,
            )
        report.bad += [(slot, -1) for slot in step.bad_slots]
        report.unread += [(slot, -1) for slot in step.unread_slots]
        spoiled: list[int] = []
        for row in step.poisoned_rows():
            self._poisoned.add(row.request_id)
            self._forget_choices(row.request_id)
            report.poisoned.append(row.request_id)
            invalid.add(row.fence_block)
            first = row.first_position // self.layout.block_tokens
            spoiled.extend(self.store.context_from(row.request_id, first).tolist())
        return spoiled

    def _report_streamed(self, step: PagedStep, report: RankReport) -> None:
        """Report blocks that this step read from devices, and that DRAM may have room for now:
        other requests have ended."""
        rows, contexts = step.streamed()
        if not rows:
            return
        for row, blocks in zip(rows, self.store.streamed(contexts, PROMOTED), strict=True):
            if len(blocks):
                report.streamed.append((row.request_id, blocks))

    def _forget_choices(self, request_id: str) -> None:
        if self.choices is not None:
            self.choices.drop(request_id)

    # ---- results ----

    def update_gauges(self, counters: Counters, report: RankReport) -> None:
        """Refresh the gauges of choices, and report how fast X comes and is projected."""
        if self.choices is not None:
            for name, value in self.choices.gauges().items():
                counters.set(name, value)
        shape = self.layers.x_shape
        if self.x_cache is not None and shape is not None and self.offloader is not None:
            storage = self.offloader.sharing.contexts.device_rate
            report.x_rates = self.x_cache.rates(shape, storage)

    def close(self, timeout_s: float) -> bool:
        """End the device that attends; False: it may still read pages."""
        if self.device is not None:
            self.device.close()
        return self.offloader is None or self.offloader.close(timeout_s)


def _use_memory_of(
    device: torch.device,
    config: SSDKVConfig,
    layout: KVLayout,
    rank: EmbeddedRank[ContextStore],
    store: ContextStore,
) -> None:
    """Take the memory of the device that the options ask for."""
    geometry, held = layout.geometry, take_summary_memory()
    if config.selector == "exact":
        return
    hbm = block_layout(layout, config.page_tokens)
    if config.sparse.hbm_pages is not None:
        store.keep_hot_pages(hot_memory(config.sparse.hbm_pages, hbm, geometry, device))
    if held is not None and rank.opened.plan.summaries_on_device:
        store.keep_on_device(summary_memory(held, store.device_places, hbm, geometry))


def _open_offloader(
    config: SSDKVConfig,
    layout: KVLayout,
    rank: EmbeddedRank[ContextStore],
    store: ContextStore,
    slot: BlockLayout,
) -> Offloader | None:
    """The device that attends, if the options name one."""
    if config.offload is None:
        return None
    setup = DeviceSetup(
        config,
        config.offload,
        rank.counters,
        rank.rank,
        layout.ranks,
        slot,
        layout.query_heads or layout.kv_heads,
        rank.opened,
        store.checksums,
        rank.drives,
    )
    # Its threads wait for reads: one deadline for each drive that hangs.
    return open_offloader(setup, config.io.deadline * (len(rank.device_paths) + 1))


def _chosen_near(
    config: SSDKVConfig, near: Offloader | None, device: torch.device
) -> Callable[[SparfSelector], Selector] | None:
    """The device that attends as who chooses for `sparf`; None: it does not."""
    if near is None or not near.caps.chooses or not config.scores_channels:
        return None
    if device.type == "cuda":
        logger.info("ssdkv: offload: the GPU chooses, which has the windows' keys")
        return None
    return near.device.selector


def _open_x_cache(
    inputs: InputLayout,
    store: ContextStore,
    projector: LayerProjector,
    device: torch.device,
    hbm: BlockLayout,
) -> XCache:
    opened = OpenInputs(
        inputs.geometry.layers, inputs.block_tokens, inputs.hidden, inputs.dtype, device
    )
    store.divide_staging(inputs.pages)
    return XCache(inputs, opened, InputProjector(inputs, hbm, store.arena, projector))
