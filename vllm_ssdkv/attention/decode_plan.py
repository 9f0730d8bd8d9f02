"""Attention of a step as one native call per layer, and a second one where pages had to be read.

A step is planned once: its rows, where their blocks lie, and how they choose pages are the same in
every layer. Between two layers there is then nothing for Python to do (``csrc/decode``). Where a
layer chooses pages that DRAM does not have, native code stops behind the choice, and goes on with
what :meth:`SparseDecode.bring` has brought.

:meth:`DecodePlan.of` decides which steps have a plan. ``exact.py`` and ``sparse.py`` compute the
others, and they fold the same keys in the same order: a plan changes no bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from vllm_ssdkv import _kernels
from vllm_ssdkv.attention.exact import RowBatch
from vllm_ssdkv.kernels.dense import CpuKernels, select_kernels
from vllm_ssdkv.kernels.operands.block_layout import PLAIN, BlockLayout, Rows, Softmax
from vllm_ssdkv.kernels.step_clock import AttentionClock, StepClock
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.read.context_stream import ContextStream, Part

if TYPE_CHECKING:
    from vllm_ssdkv.attention.sparse import SparseDecode

_NOTHING: Final = _kernels.PlacedBlocks(
    Rows.build([], [], [], [], []).bound, np.zeros(0, np.uint64), np.zeros(0, np.int64)
)
"""Contexts of a layer in which nobody attends to a whole one."""


class DecodePlan:
    """Attention of one step's layers. Used by the thread of the forward pass."""

    def __init__(
        self,
        plan: _kernels.StepPlan,
        clock: AttentionClock,
        decode: SparseDecode | None,
        batch: RowBatch,
    ):
        """``decode``: of the rows of the ``batch`` that choose, if any may."""
        self._batch = batch
        self._plan = plan
        self._clock = clock
        self._decode = decode
        self._reads = decode is not None and decode.reads

    @classmethod
    def of(
        cls,
        batch: RowBatch,
        layout: BlockLayout,
        slot: BlockLayout,
        geometry: SlotGeometry,
        stream: ContextStream,
        decode: SparseDecode | None,
        query: torch.Tensor,
        clock: StepClock,
    ) -> DecodePlan | None:
        """Plan a step, if native code has all that its layers need.

        None where the model is not on a CPU, where a bench has a clock of its own, where a block of
        a context that is attended to whole has no frame, and where rows choose as
        :attr:`SparseDecode.runs_natively` says that native code does not.

        Args:
            batch: The step's rows.
            layout: Layout of a block in HBM.
            slot: Layout of a block in a slot.
            geometry: Geometry of the slots that contexts lie in.
            stream: Contexts that are attended to whole.
            decode: Rows that choose, if any may.
            query: Queries of the first layer, [T, Hq, D].
            clock: Gets the time of each part.
        """
        kernels = select_kernels(query.device)
        if not isinstance(kernels, CpuKernels) or not isinstance(clock, AttentionClock):
            return None
        if not stream.in_frames or (decode is not None and not decode.runs_natively):
            return None
        choosing = None if decode is None else decode.choosing_rows(batch, query)
        layers = () if choosing is None or decode is None else decode.layers
        plan = _kernels.StepPlan(
            layout.shape,
            slot.shape,
            geometry.header_bytes,
            batch.tokens,
            _kernels.PlacedBlocks(
                batch.window.bound, batch.window_ids.view(np.uint64), batch.window_position
            ),
            _streamed(batch, stream.whole(), layout),
            choosing,
            [layer in layers for layer in range(geometry.layers)],
            kernels.threads,
            decode is not None and decode.remembers,
        )
        return cls(plan, clock, decode, batch)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        cache: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        sliding_window: int | None = None,
        softmax: Softmax = PLAIN,
    ) -> None:
        """Attention of one layer for all rows; arguments as of ``attend_exact``.

        Args:
            layer: From 0.
            query: [T, Hq, D].
            cache: The layer's blocks in HBM, [num_blocks, ...].
            out: [T, Hq, D], written.
            scale: Of the logits.
            sliding_window: Tokens in HBM that a query sees, its own included.
            softmax: Of the layer.
        """
        decode, room, guess = self._decode, 0, None
        if decode is not None and self._reads:
            if decode.has_lost:
                self._plan.choose(decode.choosing_rows(self._batch, query))
            room, guess = decode.contexts.settle_reads(), decode.guess(layer)
        if decode is not None and decode.behind is not None:
            decode.begin_means(layer, self._batch, cache)
        ended = self._plan.run_layer(
            layer,
            query,
            cache,
            out,
            scale,
            self._clock,
            sliding_window,
            None if softmax.sinks is None else softmax.host_sinks,
            softmax.soft_cap,
            None if softmax.slopes is None else softmax.host_slopes,
            softmax.value_scale,
            room,
            guess,
        )
        if decode is not None and not ended:
            decode.bring(layer, self._plan, self._clock)
        elif decode is not None and self._reads:
            decode.remember(layer, self._plan.chosen, self._clock.fetched_at)

    def end(self) -> None:
        """End the step: keep and count what its layers chose."""
        if self._decode is not None:
            if not self._reads:
                self._decode.remember_step(self._plan.chosen)
            self._decode.count_native(self._plan.totals)


def _streamed(
    batch: RowBatch, parts: list[Part], layout: BlockLayout
) -> list[_kernels.PlacedBlocks]:
    """Rows over the contexts of each layer that are attended to whole. Most layers have the same
    part."""
    known: dict[int, _kernels.PlacedBlocks] = {}
    for part in parts:
        if id(part) in known:
            continue
        if not part.pairs:
            known[id(part)] = _NOTHING
            continue
        rows = batch.rows_over(part.begin, part.end)
        position = part.index * layout.block_tokens
        known[id(part)] = _kernels.PlacedBlocks(rows.bound, part.frame, position)
    return [known[id(part)] for part in parts]
