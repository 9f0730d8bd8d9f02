"""Random attention problems over paged KV with their answers, for benchmarks and kernel tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_ssdkv.kernels.operands.block_layout import (
    FLOAT8,
    PLAIN,
    BlockLayout,
    BlockSource,
    PartialState,
    Rows,
    Softmax,
)
from vllm_ssdkv.profiling.dense_oracle import paged_attention, write_block


@dataclass(frozen=True, slots=True)
class RowShape:
    """One ragged row: queries, tokens before the first of them, and how many keys are there.

    The keys that are there stand at ``key_begin`` and after. There may be fewer than up to the last
    query, as when part of the context lies elsewhere: then whole blocks of them, since only a
    request's newest block is ever partly written.
    """

    queries: int
    context: int
    key_begin: int
    keys: int

    def held(self, block_tokens: int) -> int:
        """``keys``, rounded down to whole blocks unless they reach the last query."""
        reach = self.key_begin + self.keys >= self.context + self.queries
        return self.keys if reach else self.keys - self.keys % block_tokens


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """Rows of queries over blocks of a cache; every byte that nobody may use is NaN.

    ``query [T, Hq, D]``, ``cache [num_blocks, block elements]``, ``block_ids`` and ``position``
    int64 ``[B]``, all on the CPU unless moved by :meth:`to`.
    """

    layout: BlockLayout
    query: torch.Tensor
    cache: torch.Tensor
    block_ids: torch.Tensor
    position: torch.Tensor
    rows: Rows
    scale: float
    sliding_window: int | None = None
    softmax: Softmax = PLAIN

    def source(self) -> BlockSource:
        """The blocks, addressed in the cache."""
        return BlockSource.of_cache(self.cache, self.block_ids, self.position)

    def state(self) -> PartialState:
        """A state that has seen nothing."""
        tokens, heads, size = self.query.shape
        return PartialState.empty(tokens, heads, size, self.query.device, self.softmax)

    def to(self, device: torch.device) -> AttentionProblem:
        """The same problem on ``device``, but for slopes."""
        return AttentionProblem(
            self.layout,
            self.query.to(device),
            self.cache.to(device),
            self.block_ids.to(device),
            self.position.to(device),
            self.rows.to(device),
            self.scale,
            self.sliding_window,
            self.softmax,
        )

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output ``[T, Hq, D]`` and log-sum-exp ``[T, Hq]`` in float64, by the definition.

        Tokens of no row have zeros and ``-inf``.
        """
        out = torch.zeros(self.query.shape, dtype=torch.float64)
        lse = torch.full(self.query.shape[:2], -torch.inf, dtype=torch.float64)
        columns = (
            self.rows.query_begin,
            self.rows.query_count,
            self.rows.first_position,
            self.rows.block_begin,
            self.rows.block_end,
        )
        for row in range(len(self.rows)):
            begin, count, first, low, high = (int(column[row]) for column in columns)
            blocks = [self.cache[self.block_ids[index]] for index in range(low, high)]
            out[begin : begin + count], lse[begin : begin + count] = paged_attention(
                self.query[begin : begin + count],
                [block.view(torch.uint8) for block in blocks],
                self.position[low:high].tolist(),
                self.layout,
                scale=self.scale,
                first_position=first,
                sliding_window=self.sliding_window,
                softmax=self.softmax,
            )
        return out, lse


def attention_problem(
    layout: BlockLayout,
    group: int,
    shapes: Sequence[RowShape],
    seed: int,
    *,
    query_dtype: torch.dtype | None = None,
    idle_tokens: int = 0,
    sliding_window: int | None = None,
    softmax: Softmax = PLAIN,
) -> AttentionProblem:
    """Build a problem: blocks in random places of a larger cache, listed in random order.

    ``group`` query heads share a KV head; ``query_dtype`` defaults to the layout's, or float32;
    ``idle_tokens`` tokens that belong to no row lie before each row's queries.
    """
    random = torch.Generator().manual_seed(seed)
    begin, tokens, held = [], 0, []
    for shape in shapes:
        begin.append(tokens + idle_tokens)
        tokens += idle_tokens + shape.queries
        held.append(-(-shape.held(layout.block_tokens) // layout.block_tokens))
    total = sum(held)
    cache = torch.full(
        (total + 2, layout.block_bytes // layout.dtype.itemsize), torch.nan, dtype=layout.dtype
    )
    block_ids = torch.randperm(total + 2, generator=random)[:total]
    position = torch.zeros(total, dtype=torch.int64)
    ends = torch.tensor([0, *held]).cumsum(0)
    for row, shape in enumerate(shapes):
        order = torch.randperm(held[row], generator=random)
        keys = shape.held(layout.block_tokens)
        for index in range(held[row]):
            at = int(ends[row]) + int(order[index])
            first = index * layout.block_tokens
            position[at] = shape.key_begin + first
            size = (2, layout.block_tokens, layout.kv_heads, layout.head_size)
            key, value = torch.randn(size, generator=random).to(layout.dtype)
            key[keys - first :] = torch.nan
            value[keys - first :] = torch.nan
            write_block(layout, cache[block_ids[at]].view(torch.uint8), key, value)
    heads = layout.kv_heads * group
    query = torch.randn((tokens, heads, layout.head_size), generator=random)
    return AttentionProblem(
        layout,
        query.to(query_dtype or (torch.float32 if layout.dtype in FLOAT8 else layout.dtype)),
        cache,
        block_ids,
        position,
        Rows.build(
            begin,
            [shape.queries for shape in shapes],
            [shape.context for shape in shapes],
            ends[:-1].tolist(),
            ends[1:].tolist(),
        ),
        layout.head_size**-0.5,
        sliding_window,
        softmax,
    )
