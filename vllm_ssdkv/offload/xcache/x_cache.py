"""A rank's X-cache: X of some rows is recorded, stored, and projected again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.attention.exact import LayerContext, RowBatch
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.offload.xcache.input_layout import InputLayout
from vllm_ssdkv.offload.xcache.open_inputs import OpenInputs
from vllm_ssdkv.offload.xcache.projected_context import InputProjector, ProjectedContext
from vllm_ssdkv.offload.xcache.x_rule import XRates, XShape
from vllm_ssdkv.store.cache.frames import FrameCache
from vllm_ssdkv.store.read.context_stream import ContextStream


@dataclass(slots=True)
class _Recorded:
    """Tokens of a step whose X is kept, and where, int64 [n] on the accelerator."""

    tokens: torch.Tensor
    targets: torch.Tensor


class XCache:
    """See the module. Used by the thread that runs the forward pass.

    Example:
        cache.begin_step(batch, ["a", None], slot_mapping, device)
        cache.record(layer, inputs)

    Attributes:
        inputs: Layout of X in slots.
        projector: Of stored X.
    """

    def __init__(self, inputs: InputLayout, opened: OpenInputs, projector: InputProjector):
        """``opened``: X of blocks that are not stored yet."""
        self.inputs, self.projector = inputs, projector
        self._open = opened
        self._recorded: _Recorded | None = None

    @property
    def open_blocks(self) -> int:
        """Blocks of which X is in memory of the accelerator."""
        return len(self._open)

    def begin_step(
        self,
        batch: RowBatch,
        requests: Sequence[str | None],
        slot_mapping: NDArray[np.int64],
        device: torch.device,
    ) -> None:
        """Find the tokens of a step whose X is kept.

        Args:
            batch: The step's rows.
            requests: Request of each row of the plan whose X is kept; None: it is not.
            slot_mapping: HBM block times tokens of a block, and the offset in it, of each token.
            device: Of the model.
        """
        tokens: list[NDArray[np.int64]] = []
        for place, row in enumerate(batch.stream_row.tolist()):
            request_id = requests[row]
            if request_id is None:
                continue
            first = int(batch.query_begin[place])
            own = np.arange(first, first + int(batch.query_count[place]))
            tokens.append(own)
            blocks = slot_mapping[own] // self.inputs.block_tokens
            self._open.assign(request_id, np.unique(blocks).tolist())
        if not tokens:
            self._recorded = None
            return
        which = np.concatenate(tokens)
        blocks, offsets = np.divmod(slot_mapping[which], self.inputs.block_tokens)
        targets = self._open.targets(blocks, offsets)
        self._recorded = _Recorded(
            torch.from_numpy(which).to(device), torch.from_numpy(targets).to(device)
        )

    @property
    def recording(self) -> bool:
        """Check whether the step has rows whose X is kept."""
        return self._recorded is not None

    def record(self, layer: int, inputs: torch.Tensor) -> None:
        """Keep X of a layer, [T, hidden], of the rows that are to be kept."""
        if (recorded := self._recorded) is not None:
            self._open.record(layer, inputs, recorded.tokens, recorded.targets)

    def end_step(self, counters: Counters) -> None:
        """The forward pass has ended; ``counters`` are the rank's."""
        self._recorded = None
        self.projector.count(counters)

    def measure(self, device: torch.device, layer: int) -> None:
        """See :meth:`InputProjector.measure`; within a forward pass."""
        self.projector.measure(device, layer)

    def rates(self, shape: XShape, storage: float) -> XRates | None:
        """Rates for the choice of the share; None: they are not known yet.

        Args:
            shape: Of the layers.
            storage: See ``XRates``; 0: not known.
        """
        copying, projecting = self.projector.copying, self.projector.projecting
        if not (storage and copying and projecting):
            return None
        return XRates(storage, shape.x_bytes / copying, shape.flop / projecting)

    def save(
        self, blocks: Sequence[Sequence[int]], frames: NDArray[np.int32], table: FrameCache
    ) -> None:
        """Copy X of full HBM blocks, those of a slot each, to frames [n] of a ``table``."""
        for own, frame in zip(blocks, frames.tolist(), strict=True):
            inputs = torch.cat([self._open.of(block) for block in own], dim=1)
            self.inputs.put(inputs, table.view(frame))

    def release(self, blocks: Sequence[int]) -> None:
        """These HBM blocks are stored, or never will be."""
        self._open.release(blocks)

    def forget(self, request_id: str) -> None:
        """The request has lost its HBM blocks."""
        self._open.forget(request_id)

    def context(
        self, others: LayerContext, stream: ContextStream, layer: int, batch: RowBatch
    ) -> LayerContext:
        """Contexts of a layer: ``others`` and those of the ``stream``, which are X."""
        return ProjectedContext(others, stream, layer, batch, self.projector)
