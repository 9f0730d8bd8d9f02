"""Attention of a step's rows over their window in HBM and their streamed context.

One path serves prefill chunks and decode tokens: both are rows of queries at known positions.
Partials are folded into one online-softmax state in fp32, so the result does not depend on which
tier a block came from (log-sum-exp merge; Milakov and Gimelshein 2018, FlashAttention).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv import _kernels
from vllm_ssdkv.base.errors import WrongPagesError
from vllm_ssdkv.kernels.dense import AttentionKernels, BlockAttention, wait_for
from vllm_ssdkv.kernels.operands.block_layout import (
    PLAIN,
    BlockLayout,
    BlockSource,
    PartialState,
    Rows,
    Softmax,
    on_host,
)
from vllm_ssdkv.kernels.step_clock import ATTEND, MERGE, WAIT, StepClock
from vllm_ssdkv.offload.protocol import ContextKernels
from vllm_ssdkv.store.read.context_stream import ContextStream, Part, Piece

NO_LEASE: Final = nullcontext()
"""Lease of the thread of the forward pass, where nobody else uses the store's tables."""


@dataclass(frozen=True, slots=True)
class RowBatch:
    """The rows of a step in batch order, with their windows. Built once, used by every layer.

    Attributes:
        tokens: Query tokens of the step.
        query_begin, query_count: Query tokens of each row, int32 [R].
        first_position: Position of each row's first query token, int64 [R].
        window: Rows over the window's blocks.
        window_ids: HBM block ids of all windows, row after row, int64 [B].
        window_position: Position of each such block's first token, int64 [B].
        stream_row: Row's number in the step's context stream, int64 [R].
    """

    tokens: int
    query_begin: NDArray[np.int32]
    query_count: NDArray[np.int32]
    first_position: NDArray[np.int64]
    window: Rows
    window_ids: NDArray[np.int64]
    window_position: NDArray[np.int64]
    stream_row: NDArray[np.int64]
    _latest: dict[bool, tuple[Piece, Rows, NDArray[np.int64]]] = field(
        default_factory=dict, init=False
    )
    """Latest answer of :meth:`over` to each of the two threads that may ask."""

    def over(
        self, piece: Piece, block_tokens: int, *, device: bool = False
    ) -> tuple[Rows, NDArray[np.int64]]:
        """The rows over a piece of the context, and the position of each of its blocks.

        What lies in DRAM are the same blocks in every layer, so it is asked for again and again: by
        the thread of the forward pass, and at the same time by that of a ``device``.
        """
        latest = self._latest.get(device)
        if latest is not None:
            known, rows, position = latest
            if known.row_begin is piece.row_begin and known.row_end is piece.row_end:
                return rows, position
        rows = self.rows_over(piece.row_begin, piece.row_end)
        position = piece.index * block_tokens
        self._latest[device] = (piece, rows, position)
        return rows, position

    def rows_over(self, begin: NDArray[np.int32], end: NDArray[np.int32]) -> Rows:
        """The rows over blocks of their contexts, where row r of the stream has those from
        ``begin[r]`` up to ``end[r]``."""
        return Rows.build(
            self.query_begin,
            self.query_count,
            self.first_position,
            begin[self.stream_row],
            end[self.stream_row],
        )

    def hbm_slots(self, block_tokens: int) -> NDArray[np.int64]:
        """Place of each query token in HBM, [T]: its block's id times the tokens of a block, and
        its place in that."""
        row = np.repeat(np.arange(len(self.query_count)), self.query_count)
        position = self.first_position[row] + np.arange(self.tokens) - self.query_begin[row]
        first_block = on_host(self.window.block_begin, np.int64)[row]
        block = first_block + (position - self.window_position[first_block]) // block_tokens
        slots: NDArray[np.int64] = self.window_ids[block] * block_tokens + position % block_tokens
        return slots

    @classmethod
    def build(
        cls,
        query_start: NDArray[np.int64],
        seq_lens: NDArray[np.int64],
        block_table: NDArray[np.int32],
        hbm_start: NDArray[np.int64],
        stream_row: NDArray[np.int64],
        block_tokens: int,
    ) -> RowBatch:
        """Windows reach from block ``hbm_start[r]`` to the block of the row's last token.

        Args:
            query_start: Start of each row's queries, and the end of the last, [R + 1].
            seq_lens: Tokens of each row, queries included, [R].
            block_table: HBM block ids by row and block index, [R, >= blocks]; entries before
                ``hbm_start`` are stale and not looked at.
            hbm_start: First block index of each row that is in HBM, [R].
            stream_row: See the class.
            block_tokens: Tokens per block.
        """
        queries, counts, first, begin, end, ids, position = _kernels.windows(
            query_start, seq_lens, block_table, hbm_start, block_tokens
        )
        window = Rows.build(queries, counts, first, begin, end)
        return cls(int(query_start[-1]), queries, counts, first, window, ids, position, stream_row)


class LayerContext(Protocol):
    """Contexts of all rows in one layer, wherever they are attended to."""

    def begin(self, query: torch.Tensor, scale: float) -> None:
        """Let a device begin, if there is one. ``query`` [T, Hq, D]. Does not block."""
        ...

    def fold(
        self,
        kernels: AttentionKernels,
        query: torch.Tensor,
        state: PartialState,
        scale: float,
        clock: StepClock,
    ) -> None:
        """Fold the contexts into ``state``; blocks until they have been attended to."""
        ...


class _NoContext:
    """Contexts that nobody may attend to: they are lost, and their rows poisoned."""

    def begin(self, query: torch.Tensor, scale: float) -> None:
        """See :meth:`LayerContext.begin`."""

    def fold(
        self,
        kernels: AttentionKernels,
        query: torch.Tensor,
        state: PartialState,
        scale: float,
        clock: StepClock,
    ) -> None:
        """See :meth:`LayerContext.fold`."""


NO_CONTEXT: Final[LayerContext] = _NoContext()


@dataclass(frozen=True, slots=True)
class StreamedContext:
    """Contexts of a layer, or a part of them, that are attended to piece by piece, by who folds
    them.

    Attributes:
        stream: Of the step.
        layer: From 0.
        batch: The step's rows.
        layout: Of a block of the context.
        part: The part; None: all of them.
        device: Whether a device's thread folds it.
    """

    stream: ContextStream
    layer: int
    batch: RowBatch
    layout: BlockLayout
    part: Part | None = None
    device: bool = False

    def cut(self, share: float | None) -> tuple[StreamedContext, StreamedContext]:
        """A device's part, and the other. ``share``: see :meth:`ContextStream.parts`."""
        theirs, own = self.stream.parts(self.layer, share)
        return (
            StreamedContext(self.stream, self.layer, self.batch, self.layout, theirs, device=True),
            StreamedContext(self.stream, self.layer, self.batch, self.layout, own),
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of K and V of a block of a layer."""
        return self.layout.payload_bytes

    @property
    def pairs(self) -> int:
        """Blocks of all rows: those that rows share count for each."""
        return self._part.pairs

    @property
    def slots(self) -> NDArray[np.int64]:
        """Slots of the blocks."""
        return self.stream.slots_of(self.layer, self._part)

    @property
    def nbytes(self) -> int:
        """Bytes of K and V in this layer; blocks that rows share count once."""
        return self._part.blocks * self.block_bytes

    @property
    def selection_bytes(self) -> int:
        """See ``ContextPages``: all of them are attended to."""
        return 0

    @property
    def _part(self) -> Part:
        return self.stream.parts(self.layer, 1.0)[0] if self.part is None else self.part

    def begin(self, query: torch.Tensor, scale: float) -> None:
        """See :meth:`LayerContext.begin`: there is no device."""

    def fold(
        self,
        kernels: BlockAttention,
        query: torch.Tensor,
        state: PartialState,
        scale: float,
        clock: StepClock,
        lease: AbstractContextManager[None] = NO_LEASE,
    ) -> None:
        """See :meth:`LayerContext.fold`; the stream is used within the ``lease`` only."""
        pieces = self.stream.pieces(self.layer, self.part)
        while True:
            with lease:
                piece = next(pieces, None)
            clock.lap(WAIT)
            if piece is None:
                return
            rows, position = self.batch.over(piece, self.layout.block_tokens, device=self.device)
            source = BlockSource(None, piece.base, position, piece.digests)
            try:
                kernels.attend(query, state, rows, source, layout=self.layout, scale=scale)
            except WrongPagesError:
                with lease:
                    self.stream.refuse_piece()
            wait_for(query.device)  # the next piece reuses this one's memory
            clock.lap(ATTEND)

    def fold_by(
        self,
        kernels: ContextKernels,
        query: torch.Tensor,
        state: PartialState,
        scale: float,
        clock: StepClock,
        lease: AbstractContextManager[None],
    ) -> None:
        """See :meth:`Foldable.fold_by`."""
        self.fold(kernels.dense, query, state, scale, clock, lease)

    def restart(self) -> None:
        """See :meth:`Foldable.restart`."""
        self.stream.come_checked()
        if self._part.arriving:
            self.stream.restart(self.layer)


def attend_exact(
    kernels: AttentionKernels,
    query: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    batch: RowBatch,
    context: LayerContext,
    layout: BlockLayout,
    scale: float,
    clock: StepClock,
    chosen: Callable[[PartialState], None] | None = None,
    sliding_window: int | None = None,
    softmax: Softmax = PLAIN,
) -> None:
    """Attention of one layer for all rows of a step; blocks until the context has arrived.

    Args:
        kernels: Of the device that ``cache`` lies on.
        query: [T, Hq, D].
        cache: The layer's blocks in HBM, [num_blocks, ...].
        out: [T, Hq, D], written.
        batch: The step's rows.
        context: The layer's contexts, which a device may attend to while the window is.
        layout: Of a block in HBM.
        scale: Of the logits.
        clock: Gets the time of wait, attend and merge.
        chosen: Folds in the chosen pages of rows that choose, after the window; it keeps the clock.
        sliding_window: Tokens that a query sees, its own included, no more than are in HBM: there
            is no ``context`` then.
        softmax: Of the layer. Its sinks count in what selectors are told of the window.
    """
    clock.start()
    context.begin(query, scale)
    state = PartialState.empty(batch.tokens, query.shape[1], query.shape[2], query.device, softmax)
    source = BlockSource.of_cache(cache, batch.window_ids, batch.window_position)
    kernels.attend(query, state, batch.window, source, layout, scale, sliding_window)
    clock.lap(ATTEND)
    if chosen is not None:
        chosen(state)
    context.fold(kernels, query, state, scale, clock)
    kernels.finish(state, out)
    clock.lap(MERGE)
