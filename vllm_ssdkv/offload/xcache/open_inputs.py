"""X of tokens whose blocks are not stored yet, in memory of the accelerator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import StepError

LEAST_MORE: Final = 8
"""Places by which memory grows, at least."""


class OpenInputs:
    """X by HBM block, until the block is full and stored. Used by the step's thread.

    A request has the blocks of one slot that is not full, and a step completes as many as its
    tokens fill. So this is a small part of a window; memory grows to what a step needs, and stays.

    Example:
        open_inputs.assign("request", blocks)
        open_inputs.record(layer, inputs, tokens, open_inputs.targets(blocks, offsets))
    """

    def __init__(
        self,
        layers: int,
        block_tokens: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        """Memory for no block yet: of each layer, [places, block_tokens, hidden]."""
        self._block_tokens, self._hidden = block_tokens, hidden
        shape = (0, block_tokens, hidden)
        self._memory = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self._free: list[int] = []
        self._places: dict[int, int] = {}
        self._blocks: dict[str, set[int]] = {}

    def __len__(self) -> int:
        """Blocks that have a place."""
        return len(self._places)

    @property
    def nbytes(self) -> int:
        """Bytes of all places."""
        return sum(layer.nbytes for layer in self._memory)

    def assign(self, request_id: str, blocks: Iterable[int]) -> None:
        """Give a request's HBM blocks places, those that have none.

        Raises:
            StepError: there is no memory for them.
        """
        own = self._blocks.setdefault(request_id, set())
        new = [block for block in blocks if block not in own]
        self.release([block for block in new if block in self._places])  # another request's before
        if len(self._free) < len(new):
            self._grow(max(LEAST_MORE, len(new) - len(self._free)))
        for block in new:
            self._places[block] = self._free.pop()
            own.add(block)

    def targets(self, blocks: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of :meth:`record` for tokens at ``offsets`` of HBM ``blocks``, [n] each."""
        places = np.array([self._places[block] for block in blocks.tolist()], dtype=np.int64)
        return places * self._block_tokens + offsets

    def record(
        self, layer: int, inputs: torch.Tensor, tokens: torch.Tensor, targets: torch.Tensor
    ) -> None:
        """Keep X of some tokens of a step.

        Args:
            layer: From 0.
            inputs: X of all tokens, [T, hidden].
            tokens: Those to keep, [n], int64.
            targets: See :meth:`targets`, [n], int64.

        Raises:
            StepError: X has another width than the model's hidden states.
        """
        if inputs.shape[-1] != self._hidden:
            raise StepError(
                f"X of layer {layer} has {inputs.shape[-1]} numbers a token, the model's hidden "
                f"states have {self._hidden}: set offload.x_share to 0"
            )
        rows = self._memory[layer].view(-1, self._hidden)
        rows.index_copy_(0, targets, inputs.index_select(0, tokens))

    def of(self, block: int) -> torch.Tensor:
        """X of an HBM block, [layers, block_tokens, hidden], a copy.

        Raises:
            KeyError: it has no place.
        """
        place = self._places[block]
        return torch.stack([layer[place] for layer in self._memory])

    def release(self, blocks: Sequence[int]) -> None:
        """These HBM blocks are stored, or never will be."""
        for block in blocks:
            if (place := self._places.pop(block, None)) is not None:
                self._free.append(place)
        for own in self._blocks.values():
            own.difference_update(blocks)

    def forget(self, request_id: str) -> None:
        """The request has lost its HBM blocks."""
        self.release(list(self._blocks.pop(request_id, ())))

    def _grow(self, more: int) -> None:
        """Make room for ``more`` blocks, layer by layer: never twice as much as is needed."""
        before = len(self._memory[0])
        try:
            for layer, old in enumerate(self._memory):
                new = old.new_zeros((more, *old.shape[1:]))
                self._memory[layer] = torch.cat([old, new])
        except torch.OutOfMemoryError as error:
            raise StepError(
                f"the accelerator has no memory for X of {before + more} blocks, beside what vLLM "
                "takes: lower --gpu-memory-utilization or --max-num-batched-tokens, or set "
                "offload.x_share to 0"
            ) from error
        self._free.extend(range(before, before + more))
