"""Mean V of requests that are decoded, token by token (SparQ, Ribar et al. 2024, step 5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv import _kernels
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.kernels.paged import PageKernels

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class MeanRows:
    """S requests of a step, the same in every layer.

    Attributes:
        places: Where their sums are, int64 [S].
        position: Of their current tokens, int64 [S].
    """

    places: NDArray[np.int64]
    position: NDArray[np.int64]


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
        self.sums = self._bind()
        """View of the three for native code, made anew when :meth:`rows` makes room for more
        requests."""
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

    def rows(self, requests: Sequence[str], position: NDArray[np.int64]) -> MeanRows:
        """Requests with these names, [S], for all layers of a step."""
        return MeanRows(np.array([self._place_of(one) for one in requests], np.int64), position)

    def behind(self, rows: MeanRows, layers: Sequence[int]) -> bool:
        """Check whether :meth:`begin` has anything to do in any of these layers."""
        known = self._tokens[rows.places][:, layers]
        return not np.array_equal(known, np.broadcast_to(rows.position[:, None], known.shape))

    def begin(
        self,
        kernels: PageKernels,
        layer: int,
        rows: MeanRows,
        cache: torch.Tensor,
        window: Callable[[int], NDArray[np.int64]],
        context: Callable[[int], Floats],
    ) -> None:
        """Put the sums before the current tokens of S requests together, as far as they are not
        known.

        Args:
            kernels: Of the device that the cache lies on.
            layer: From 0.
            rows: The requests.
            cache: The layer's blocks in HBM, [num_blocks, ...].
            window: HBM block ids of the window of request i of these, that of its token the last.
            context: Sums of V of the blocks before this window, in order, [blocks, kv_heads,
                head_size].
        """
        known = self._tokens[rows.places, layer]
        if not np.array_equal(known, rows.position):
            for i in np.flatnonzero(known != rows.position).tolist():
                at = int(rows.position[i])
                self._begin(kernels, layer, int(rows.places[i]), at, cache, window(i), context(i))

    def add(self, layer: int, rows: MeanRows, newest: torch.Tensor) -> torch.Tensor:
        """Add V of the current tokens, [S, kv_heads, head_size], as the cache has it; the mean over
        all tokens, them included, float32 likewise, on the host. V of the newest tokens comes there
        from a GPU, too: it is little, and added in the same order everywhere."""
        values = newest.float().cpu().contiguous().numpy()
        return torch.from_numpy(self.sums.add(layer, rows.places, rows.position, values))

    def _bind(self) -> _kernels.ValueSums:
        return _kernels.ValueSums(self._blocks, self._rest, self._tokens, self._layout.block_tokens)

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
            self.sums = self._bind()
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
        self._tokens[place, layer] = position

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
