"""Contexts that are stored as X: projected to K and V again, and attended to as any block."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.attention.exact import LayerContext, RowBatch
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.kernels.dense import AttentionKernels, wait_for
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout, BlockSource, PartialState, Rows
from vllm_ssdkv.kernels.step_clock import ATTEND, WAIT, StepClock
from vllm_ssdkv.offload.share_rule import SMOOTH
from vllm_ssdkv.offload.xcache.input_layout import InputLayout
from vllm_ssdkv.store.memory.arena import Arena
from vllm_ssdkv.store.read.context_stream import ContextStream, Piece

PROJECTED_TOKENS: Final = 1024
"""Tokens that are projected at once, about: activations of so many take memory of the
accelerator."""


MEASURED_EVERY: Final = 1024
"""Steps after which copying and projecting are measured again where no context is X."""

TRIALS: Final = 8
"""Calls of a measurement."""


class Projection(Protocol):
    """Projection of X by the model's own layers."""

    def project(
        self, layer: int, inputs: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as the layer attends to them, after norms and position embedding.

        Args:
            layer: From 0.
            inputs: X, [N, hidden], on the device that computes the model.
            positions: Of the tokens in their requests, [N], int64, on the same device.

        Returns:
            K and V, [N, Hkv, D].
        """
        ...


class InputProjector:
    """Brings X of blocks from memory of the host, and has it projected. Used by the step's thread.

    Attributes:
        layout: Of a block of K and V in HBM.
        copying: Seconds per token of X, from memory of the host to the accelerator; 0: not known.
        projecting: Seconds per token, of a layer; 0: not known.
    """

    def __init__(
        self, inputs: InputLayout, layout: BlockLayout, arena: Arena, projection: Projection
    ):
        """``arena``: has frames and staging buffers."""
        self._inputs, self.layout = inputs, layout
        self._arena, self._projection = arena, projection
        self._scratch: torch.Tensor | None = None
        self.at_once = max(1, PROJECTED_TOKENS // layout.block_tokens)
        self.copying = self.projecting = 0.0
        self._seconds, self._blocks, self._idle = 0.0, 0, 0

    def project(
        self,
        kernels: AttentionKernels,
        layer: int,
        base: NDArray[np.uint64],
        position: NDArray[np.int64],
    ) -> BlockSource:
        """K and V of blocks, valid until the next call.

        Args:
            kernels: Of the device.
            layer: From 0.
            base: Absolute addresses of the layer in the blocks' slots, [n], n <= ``at_once``.
            position: Of each block's first token, [n].
        """
        begin = time.perf_counter()
        device, tokens = kernels.device, self.layout.block_tokens
        inputs = self._bring(device, base, position // tokens)
        positions = torch.from_numpy((position[:, None] + np.arange(tokens)).ravel()).to(device)
        key, value = self._project(layer, inputs, positions)
        if self._scratch is None:
            self._scratch = torch.zeros(
                (self.at_once, self.layout.block_bytes // self.layout.dtype.itemsize),
                dtype=self.layout.dtype,
                device=device,
            )
        places = np.arange(len(base) * tokens, dtype=np.int64)
        kernels.store_kv(key, value, self._scratch, places, self.layout)
        wait_for(device)
        self._seconds += time.perf_counter() - begin
        self._blocks += len(base)
        return BlockSource.of_cache(self._scratch, np.arange(len(base)), position)

    def measure(self, device: torch.device, layer: int) -> None:
        """Find out what copying and projecting take, if that was not seen for a while."""
        self._idle += 1
        if self.projecting and self._idle < MEASURED_EVERY:
            return
        nbytes = self._inputs.geometry.layer_bytes
        blocks = min(self.at_once, self._arena.nbytes // nbytes)
        base = np.uint64(self._arena.address) + np.arange(blocks, dtype=np.uint64) * np.uint64(
            nbytes
        )
        best = math.inf, math.inf
        for _ in range(TRIALS):  # kernels are compiled in the first
            self.copying = self.projecting = 0.0
            inputs = torch.ones_like(self._bring(device, base, np.arange(blocks)))
            self._project(layer, inputs, torch.arange(len(inputs), device=device))
            best = min(best[0], self.copying), min(best[1], self.projecting)
        self.copying, self.projecting = best

    def _bring(
        self, device: torch.device, base: NDArray[np.uint64], index: NDArray[np.int64]
    ) -> torch.Tensor:
        """X of blocks on the device; as for :meth:`InputLayout.get`."""
        begin = time.perf_counter()
        inputs = self._inputs.get(self._arena, base, index).to(device)
        wait_for(device)
        self.copying = _smooth(self.copying, (time.perf_counter() - begin) / len(inputs))
        return inputs

    def _project(
        self, layer: int, inputs: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        begin = time.perf_counter()
        found = self._projection.project(layer, inputs, positions)
        wait_for(inputs.device)
        self.projecting = _smooth(self.projecting, (time.perf_counter() - begin) / len(inputs))
        self._idle = 0
        return found

    def count(self, counters: Counters) -> None:
        """Add what was done since the last call to the rank's counters."""
        if self._blocks:
            counters.add("x_cache_bytes", self._blocks * self._inputs.nbytes)
            counters.add("x_cache_projection_seconds", self._seconds)
        self._blocks, self._seconds = 0, 0.0


def _smooth(known: float, seen: float) -> float:
    """Seconds per token, by the latest ones. A slow one, as the first is, counts for little."""
    if not known:
        return seen
    return known + (SMOOTH if seen < known else SMOOTH / 4) * (seen - known)


@dataclass(frozen=True, slots=True)
class ProjectedContext:
    """Contexts of a layer, of which those of some rows are X. See ``LayerContext``.

    The step's thread projects and attends to X, while a device, if there is one, attends to the
    other rows. Each has a stream of its own, with staging buffers of its own.

    Attributes:
        others: Contexts of the other rows.
        stream: Of the rows whose contexts are X.
        layer: From 0.
        batch: The step's rows.
        projector: Of the rank.
    """

    others: LayerContext
    stream: ContextStream
    layer: int
    batch: RowBatch
    projector: InputProjector

    def begin(self, query: torch.Tensor, scale: float) -> None:
        """See ``LayerContext``."""
        self.others.begin(query, scale)

    def fold(
        self,
        kernels: AttentionKernels,
        query: torch.Tensor,
        state: PartialState,
        scale: float,
        clock: StepClock,
    ) -> None:
        """See ``LayerContext``."""
        layout = self.projector.layout
        for piece in self.stream.pieces(self.layer):
            clock.lap(WAIT)
            for base, index, rows in self._parts(piece):
                source = self.projector.project(
                    kernels, self.layer, base, index * layout.block_tokens
                )
                kernels.attend(query, state, rows, source, layout=layout, scale=scale)
            wait_for(query.device)
            clock.lap(ATTEND)
        self.others.fold(kernels, query, state, scale, clock)

    def _parts(self, piece: Piece) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.int64], Rows]]:
        """A piece in parts that are projected at once: addresses, block indices, rows."""
        batch, at_once = self.batch, self.projector.at_once
        for first in range(0, len(piece.base), at_once):
            part = slice(first, first + at_once)
            count = len(piece.base[part])
            begin, end = (
                np.clip(edge - first, 0, count)[batch.stream_row]
                for edge in (piece.row_begin, piece.row_end)
            )
            rows = Rows.build(
                batch.query_begin, batch.query_count, batch.first_position, begin, end
            )
            yield piece.base[part], piece.index[part], rows
