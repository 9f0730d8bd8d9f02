"""Scores of context pages or tokens, and the kernels that make and rank them.

A table of scores has one line per row and KV head and one column per page or token of the row's
context: column c of head h of row r lies at ``first[r] * heads + h * n + c``, where ``n = first[r +
1] - first[r]``. Tables of logits have one line per query head instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.attention.native import NativeKernels
from vllm_ssdkv.selection.protocol import ContextSummaries, Needs, Selection

Floats = NDArray[np.float32]
Offsets = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenLogits:
    """Approximate logits of all tokens of R rows, the window's at the end of each row.

    Attributes:
        logits: float32 table by query head.
        first: int64 [R + 1], see the module.
        lse: Their log-sum-exp, float32 [R, q_heads].
    """

    logits: Floats
    first: Offsets
    lse: Floats


@dataclass(frozen=True, slots=True)
class Scores:
    """By what pages or tokens are chosen.

    Attributes:
        score: What ranks them, float32 table by KV head.
        mass: Estimated share of softmax mass, mean over a KV head's query heads, such a table.
        window_mass: The window's share, float32 [R, kv_heads].
        first: int64 [R + 1], see the module.
        tokens: The logits they come from, where these are needed again.
    """

    score: Floats
    mass: Floats
    window_mass: Floats
    first: Offsets
    tokens: TokenLogits | None = None


class Scorer(Protocol):
    """A selector's way of scoring, for :class:`~.adaptive.AdaptiveSelector` to choose by."""

    name: str
    needs: Needs

    def score(
        self,
        query: torch.Tensor,
        context: ContextSummaries,
        scale: float,
        window_lse: torch.Tensor | None = None,
    ) -> Scores:
        """Scores of all context pages; arguments as of ``Selector.select``."""
        ...

    def complete(
        self, selection: Selection, scores: Scores, context: ContextSummaries
    ) -> Selection:
        """The selection of pages by these scores, with what attention needs beside."""
        ...


def offsets(counts: NDArray[np.int64]) -> Offsets:
    """Where each row's columns begin, and the end of the last, int64 [R + 1]."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


class ScoringKernels(NativeKernels):
    """The native kernels of page selection. ``threads`` as of ``CpuKernels``.

    Calls block until done with the GIL free; any thread may call. All raise ``ValueError`` before
    any work if arguments do not fit.
    """

    def bound_logits(
        self, query: torch.Tensor, context: ContextSummaries, scale: float
    ) -> tuple[Floats, Offsets]:
        """Upper bounds of the scaled logits of every context page, by query head.

        The sum over channels of ``max(q * min, q * max)`` (Quest, Tang et al. 2024): no logit of
        the page is larger, but for rounding.
        """
        if context.bounds_base is None:
            raise ValueError("page bounds are needed and not in the summaries")
        values = host_query(query, context)
        first = offsets(context.pages)
        logits = np.empty(first[-1] * values.shape[1], np.float32)
        self._native.bound_logits(
            values,
            scale,
            context.row_begin,
            context.row_end,
            context.bounds_base,
            first,
            logits,
            context.layout.block_tokens,
            context.layout.page_tokens,
            context.layout.kv_heads,
            self._codes[context.layout.dtype],
            self.threads,
        )
        return logits, first

    def weigh(
        self,
        logits: Floats,
        first: Offsets,
        window_lse: torch.Tensor | None,
        query_heads: int,
        context: ContextSummaries,
    ) -> Scores:
        """Softmax weights of pages whose tokens all have the page's logit.

        A KV head's weight is the mean over its query heads, each of which distributes a mass of 1
        over its context, and its window if ``window_lse`` is given: no head outvotes another by the
        size of its logits.
        """
        kv_heads = context.layout.kv_heads
        weights = np.empty(first[-1] * kv_heads, np.float32)
        window_mass = np.empty((len(context), kv_heads), np.float32)
        self._native.weigh(
            logits,
            first,
            None if window_lse is None else window_lse.contiguous().numpy(),
            weights,
            window_mass,
            query_heads,
            context.layout.page_tokens,
            self.threads,
        )
        return Scores(weights, weights, window_mass, first)

    def channel_logits(
        self, query: torch.Tensor, context: ContextSummaries, scale: float, channels: int
    ) -> tuple[Floats, Offsets]:
        """Approximate logits of every token from ``channels`` channels, by query head.

        SparQ's steps 1 and 2 (Ribar et al. 2024): one set of channels per KV head, the largest sums
        of ``|q_g|`` over its query heads, equal ones by number; ``scale * sqrt(|q_g|_1 /
        |q_g[i]|_1)`` in place of ``scale``.
        """
        if (
            context.channel_base is None
            or context.window_base is None
            or context.window_begin is None
            or context.window_end is None
        ):
            raise ValueError("channel-major K and the window's addresses are not in the summaries")
        layout = context.layout
        values = host_query(query, context)
        rows, query_heads, head_size = values.shape
        count = min(channels, head_size)
        chosen = np.empty((rows, layout.kv_heads, count), np.int32)
        reduced = np.empty((rows, query_heads, count), np.float32)
        self._native.choose_channels(values, scale, layout.kv_heads, chosen, reduced)
        first = offsets(context.context_tokens + context.window_tokens)
        logits = np.empty(first[-1] * query_heads, np.float32)
        self._native.channel_logits(
            chosen,
            reduced,
            context.row_begin,
            context.row_end,
            context.channel_base,
            context.window_begin,
            context.window_end,
            context.window_base,
            context.window_tokens,
            first,
            logits,
            layout.block_tokens,
            layout.page_tokens,
            layout.page_stride_bytes,
            head_size,
            self._codes[layout.dtype],
            self.threads,
        )
        return logits, first

    def score_tokens(
        self,
        logits: Floats,
        first: Offsets,
        query_heads: int,
        context: ContextSummaries,
        page_tokens: int,
    ) -> Scores:
        """Scores of the context's pages of ``page_tokens`` tokens from the logits of all tokens.

        A token's score is the sum of its logits over the query heads of the KV head (not of their
        softmax; SparQ step 3), a page's the largest of its tokens'. With
        ``page_tokens = 1`` columns are tokens.
        """
        kv_heads = context.layout.kv_heads
        columns = offsets(context.context_tokens // page_tokens)
        score = np.empty(columns[-1] * kv_heads, np.float32)
        mass = np.empty_like(score)
        lse = np.empty((len(context), query_heads), np.float32)
        window_mass = np.empty((len(context), kv_heads), np.float32)
        self._native.score_tokens(
            logits, first, columns, score, mass, lse, window_mass, page_tokens, self.threads
        )
        return Scores(score, mass, window_mass, columns, TokenLogits(logits, first, lse))

    def choose(
        self,
        scores: Scores,
        least: NDArray[np.int32],
        most: NDArray[np.int32],
        sinks: int = 0,
        p: float = 1.0,
    ) -> Selection:
        """The columns of highest score, until they and the window cover ``p`` of the mass.

        The first ``sinks`` columns go first, equal scores by number, NaN before all others, so that
        broken data is attended to and shows. Row r takes at least ``least[r]`` and at most
        ``most[r]`` (int32 [R]) for each KV head, sinks included; ``p`` of 1 or more is never
        reached. ``pages`` of the result are the columns.
        """
        pages, begin, mass = self._native.choose(
            scores.score,
            scores.mass,
            scores.window_mass,
            scores.first,
            least,
            most,
            sinks,
            p,
            self.threads,
        )
        return Selection(pages, begin, mass.reshape(scores.window_mass.shape))

    def cover(self, selection: Selection, tokens: TokenLogits, context: ContextSummaries) -> Floats:
        """Softmax mass of the chosen tokens and the window, float32 [R, q_heads]: SparQ's alpha."""
        alpha = np.empty_like(tokens.lse)
        self._native.cover(
            tokens.logits,
            tokens.first,
            tokens.lse,
            context.window_tokens,
            selection.pages,
            selection.begin,
            selection.token_mask,
            alpha,
            context.layout.page_tokens,
            self.threads,
        )
        return alpha


def host_query(query: torch.Tensor, context: ContextSummaries) -> Floats:
    """The query as float32 ``[R, q_heads, head_size]``; ``ValueError`` if it does not fit."""
    layout = context.layout
    if (
        query.dim() != 3
        or query.shape[0] != len(context)
        or query.shape[1] == 0
        or query.shape[1] % layout.kv_heads
        or query.shape[2] != layout.head_size
    ):
        raise ValueError(
            f"a query of {tuple(query.shape)} does not fit {len(context)} rows of {layout}"
        )
    values: Floats = query.detach().to("cpu", torch.float32).contiguous().numpy()
    return values
