"""Mean V of requests that are decoded, token by token (SparQ, Ribar et al. 2024, step 5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.kernels.paged import PageKernels

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class MeanRows:
    """S requests of a step, the same in every layer.

    Attributes:
        places: Where their sums are, int64 [S].
        position: Of their current tokens, int64 [S].
        windows: HBM block ids of each one's window, that of the current token the last.
        full: Places of those whose token completes a block.
        tokens: With the current one, float32 [S, 1, 1].
    """

    places: NDArray[np.int64]
    position: NDArray[np.int64]
    windows: Sequence[NDArray[np.int64]]
    full: NDArray[np.int64]
    tokens: Floats


class RunningMeanV:
    """Sums of V of running requests, by layer, in fp32. Used by the thread of the forward pass.

    Where a request's decode begins, its sum is put together from those of its blocks, and V of the
    window is read this once; after that each token's V is added when it is its turn. Blocks are
    added in their order, each summed over its tokens first: a mean has the same bits wherever its
    request began or went on, after a hit, a preemption or a restart.
    """

    def __init__(self, layers: int, layout: BlockLayout):
        """``layout`` is that of blocks in HBM."""
        self._layout = layout
        shape = (0, layers, layout.kv_heads, layout.head_size)
        self._blocks: Floats = np.zeros(shape, dtype=np.float32)
        """Sum over complete blocks, [places, layers, kv_heads, head_size]."""
        self._rest: Floats = np.zeros(shape, dtype=np.float32)
        """Sum over the tokens after them."""
        self._tokens = np.zeros((0, layers), dtype=np.int64)
        """Tokens in both; 0: nothing is known."""
        self._place: dict[str, int] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        """Requests that are known."""
        return len(self._place)

    def drop(self, request_id: str) -> None:
        """The request does not run any more, or its last token's V is not to be trusted."""
        place = self._place.pop(request_id, None)
        if place is not None:
            self._tokens[place] = 0
            self._free.append(place)

    def rows(
        self,
        requests: Sequence[str],
        position: NDArray[np.int64],
        windows: Sequence[NDArray[np.int64]],
    ) -> MeanRows:
        """Requests with these names, [S], for :meth:`update` of every layer of a step."""
        places = np.array([self._place_of(request) for request in requests], dtype=np.int64)
        full = places[(position + 1) % self._layout.block_tokens == 0]
        tokens = (position + 1).astype(np.float32)[:, None, None]
        return MeanRows(places, position, windows, full, tokens)

    def update(
        self,
        kernels: PageKernels,
        layer: int,
        rows: MeanRows,
        newest: torch.Tensor,
        cache: torch.Tensor,
        context: Callable[[int], Floats],
    ) -> torch.Tensor:
        """Add the current token of S requests; the mean over all their tokens, it included.

        Args:
            kernels: Of the device that the cache lies on.
            layer: From 0.
            rows: The requests.
            newest: V of their current tokens, [S, kv_heads, head_size], as the cache has it.
            cache: The layer's blocks in HBM, [num_blocks, ...].
            context: Sums of V of the blocks before the window of request i of these, in order,
                [blocks, kv_heads, head_size].

        Returns:
            float32 [S, kv_heads, head_size], on the host. V of the newest tokens comes there from a
            GPU, too: it is little, and added in the same order everywhere.
        """
        places = rows.places
        known = self._tokens[places, layer]
        if not np.array_equal(known, rows.position):
            for i in np.flatnonzero(known != rows.position).tolist():
                at = int(rows.position[i])
                self._begin(kernels, layer, int(places[i]), at, cache, rows.windows[i], context(i))
        rest = self._rest[places, layer] + newest.float().cpu().numpy()
        self._rest[places, layer] = rest
        total = self._blocks[places, layer] + rest
        if len(rows.full):
            self._blocks[rows.full, layer] += self._rest[rows.full, layer]
            self._rest[rows.full, layer] = 0
        self._tokens[places, layer] = rows.position + 1
        return torch.from_numpy(total / rows.tokens)

    def _place_of(self, request: str) -> int:
        if request in self._place:
            return self._place[request]
        if not self._free:
            count = len(self._tokens)
            more = max(8, count)
            self._free = list(range(count, count + more))
            self._blocks = _longer(self._blocks, more)
            self._rest = _longer(self._rest, more)
            self._tokens = np.pad(self._tokens, ((0, more), (0, 0)))
        self._place[request] = self._free.pop()
        return self._place[request]

    def _begin(
        self,
        kernels: PageKernels,
        layer: int,
        place: int,
        position: int,
        cache: torch.Tensor,
        window: NDArray[np.int64],
        context: Floats,
    ) -> None:
        """The sums of all tokens before ``position``."""
        size = self._layout.block_tokens
        complete = position // size - len(context)
        inside = torch.zeros((complete, *self._blocks.shape[2:]), device=kernels.device)
        source = window[:complete] * cache.stride(0) * cache.itemsize + cache.data_ptr()
        step = inside.stride(0) * inside.itemsize
        target = inside.data_ptr() + np.arange(complete, dtype=np.int64) * step
        kernels.summarize(
            source.astype(np.uint64), self._layout, value_sum=target.astype(np.uint64)
        )
        self._blocks[place, layer] = np.add.reduce(
            np.concatenate([context, inside.cpu().numpy()]), axis=0
        )
        self._rest[place, layer] = 0
        for token in range(position % size):
            last = self._values(cache, window[complete : complete + 1], np.array([token]))
            self._rest[place, layer] += last[0]

    def _values(
        self, cache: torch.Tensor, blocks: NDArray[np.int64], token: NDArray[np.int64]
    ) -> Floats:
        """V of one token of each block, [n, kv_heads, head_size]."""
        layout = self._layout
        used = layout.block_bytes // layout.dtype.itemsize
        shape = layout.kv_heads, layout.groups, 2, layout.page_tokens, layout.head_size
        pages = cache[:, :used].view(len(cache), *shape)
        group, inside = np.divmod(token, layout.page_tokens)
        at = torch.from_numpy(blocks), torch.from_numpy(group), torch.from_numpy(inside)
        values: Floats = pages[at[0], :, at[1], 1, at[2]].float().cpu().numpy()
        return values


def _longer(sums: Floats, more: int) -> Floats:
    return np.concatenate([sums, np.zeros((more, *sums.shape[1:]), np.float32)])
