"""Twin of an accelerator that attends over a link: it takes time, but no core.

The thread that attends sleeps for as long as the bytes would take over the link, and answers with
states that were computed beforehand. So one core is enough to measure what is won where the host
attends beside an accelerator.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.kernels.dense import CpuKernels
from vllm_ssdkv.kernels.operands.block_layout import (
    BlockLayout,
    BlockSource,
    PartialState,
    Rows,
    on_host,
)


class LinkedAccelerator(CpuKernels):
    """Kernels whose attention over one context is known, and takes the time of a link.

    Blocks at absolute addresses are the context's, in its order from its first block on; any other
    call is computed at once. One row of queries.

    Example:
        twin = LinkedAccelerator(query, base, position, layout, scale)
        twin.bandwidth = 10e9
        attend_exact(twin, query, cache, out, batch, context, layout, scale, clock)
    """

    def __init__(
        self,
        query: torch.Tensor,
        base: NDArray[np.uint64],
        position: NDArray[np.int64],
        layout: BlockLayout,
        scale: float,
        sleep: Callable[[float], None] = time.sleep,
    ):
        """Compute what the query [T, Hq, D] gets of the first blocks, for any number of them.

        Args:
            query: Of one row.
            base: Absolute addresses of the context's blocks, [B].
            position: Of each block's first token, [B].
            layout: Of a block.
            scale: Of the logits.
            sleep: Waits for so many seconds.
        """
        super().__init__(1)
        self.bandwidth = float("inf")
        """Bytes per second."""
        self._sleep = sleep
        self._base = base.copy()
        tokens, heads, size = query.shape
        state = PartialState.empty(tokens, heads, size, query.device)
        self._states = [_copied(state)]
        for block in range(len(base)):
            rows = Rows.build([0], [tokens], [int(position.max()) + layout.block_tokens], [0], [1])
            one = slice(block, block + 1)
            source = BlockSource(None, base[one], position[one])
            super().attend(query, state, rows, source, layout, scale)
            self._states.append(_copied(state))

    def attend(
        self,
        query: torch.Tensor,
        state: PartialState,
        rows: Rows,
        source: BlockSource,
        layout: BlockLayout,
        scale: float,
        sliding_window: int | None = None,
    ) -> None:
        """See :meth:`AttentionKernels.attend`.

        Raises:
            ValueError: these are not the first blocks of the context.
        """
        if source.tensor is not None:
            super().attend(query, state, rows, source, layout, scale, sliding_window)
            return
        base = on_host(source.base, np.uint64)
        if not np.array_equal(base, self._base[: len(base)]):
            raise ValueError("the twin knows the first blocks of one context only")
        self.merge(state, self._states[len(base)])
        nbytes = len(base) * layout.payload_bytes
        if nbytes:
            self._sleep(nbytes / self.bandwidth)


def _copied(state: PartialState) -> PartialState:
    return PartialState(state.m.clone(), state.l.clone(), state.acc.clone())
