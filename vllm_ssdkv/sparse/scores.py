"""Scores of context pages or tokens, and what makes and ranks them.

A table of scores has one line per row and KV head and one column per page or token of the row's
context. Tables of logits have one line per query head instead. How they lie is the affair of the
kernels that make them (:mod:`vllm_ssdkv.kernels.scoring`), which alone read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.sparse.protocol import ContextSummaries, Needs, Selection
from vllm_ssdkv.sparse.sizes import Offsets

Floats = NDArray[np.float32]
Table: TypeAlias = Floats | torch.Tensor
"""float32, see the module."""


@dataclass(frozen=True, slots=True)
class TokenLogits:
    """Approximate logits of all tokens of R rows, the window's at the end of each row.

    Attributes:
        logits: Table by query head.
        first: Columns of the rows, added up, int64 [R + 1].
        lse: Their log-sum-exp, float32 [R, q_heads].
    """

    logits: Table
    first: Offsets
    lse: Table


@dataclass(frozen=True, slots=True)
class PageLogits:
    """Logits of all pages of R rows, each of which stands for all of the page's tokens.

    Attributes:
        logits: Table by query head.
        first: Columns of the rows, added up, int64 [R + 1].
        lse: Log-sum-exp over all tokens of the pages, and the window where that is known, float32
            [R, q_heads].
        window_lse: That of the window, likewise, where it is known.
    """

    logits: Table
    first: Offsets
    lse: Table
    window_lse: Table | None


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores by which pages or tokens are chosen.

    Attributes:
        score: What ranks them, table by KV head.
        mass: Estimated share of softmax mass, mean over a KV head's query heads, such a table.
        window_mass: The window's share, float32 [R, kv_heads].
        first: Columns of the rows, added up, int64 [R + 1].
        tokens: The logits they come from, where these are needed again.
        of_pages: Likewise, where they come from logits of pages.
    """

    score: Table
    mass: Table
    window_mass: Table
    first: Offsets
    tokens: TokenLogits | None = None
    of_pages: PageLogits | None = None


@dataclass(frozen=True, slots=True)
class HostScores:
    """Scores as the host ranks them.

    Attributes:
        score, mass: As of :class:`Scores`, float32 [kv_heads, columns] of each row.
        window_mass: Likewise, float32 [R, kv_heads].
    """

    score: list[Floats]
    mass: list[Floats]
    window_mass: Floats


class Scorer(Protocol):
    """A selector's way of scoring, for others to choose by."""

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


class ScoringKernels(Protocol):
    """Kernels of a device for selection. Threads: as ``AttentionKernels``.

    All raise ``ValueError`` before any work if arguments do not fit. Queries are on the kernels'
    device, ``[R, q_heads, head_size]``; what a :class:`Selection` holds is on the host in any case,
    because the host fetches the pages.
    """

    def bound_logits(
        self, query: torch.Tensor, context: ContextSummaries, scale: float
    ) -> tuple[Table, Offsets]:
        """Upper bounds of the scaled logits of every context page, by query head.

        The sum over channels of ``max(q * min, q * max)`` (Quest, Tang et al. 2024): no logit of
        the page is larger, but for rounding. A page with a key that is not finite may get NaN in
        place of infinity, also for heads whose query has the other sign: devices multiply both
        bounds, one of them by zero.
        """
        ...

    def spread_logits(
        self, query: torch.Tensor, context: ContextSummaries, scale: float
    ) -> tuple[Table, Offsets]:
        """Logits of every context page from mean and variance of its keys, by query head.

        ``scale * q . mean + (scale * q)^2 . variance / 2``: the second cumulant of the page's
        logits with channels that vary on their own, which is the log of the mean of ``exp`` where
        the logits are normal.
        """
        ...

    def code_logits(
        self, query: torch.Tensor, context: ContextSummaries, scale: float, bits: int
    ) -> tuple[Table, Offsets]:
        """Logits of every context page from codes of ``bits``, by query head.

        The log of the mean over the page's tokens of ``exp`` of their logits, which are unbiased.
        CPUs look products up in tables of 7 bits: a token's logit is wrong by at most half a step
        of them times channels over the channels in half a byte.
        """
        ...

    def weigh(
        self,
        logits: Table,
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
        ...

    def channel_logits(
        self,
        query: torch.Tensor,
        context: ContextSummaries,
        scale: float,
        channels: int,
    ) -> tuple[Table, Offsets]:
        """Approximate logits of every token from ``channels`` channels, by query head.

        SparQ's steps 1 and 2 (Ribar et al. 2024): one set of channels per KV head, the largest sums
        of ``|q_g|`` over its query heads, equal ones by number; ``scale * sqrt(|q_g|_1 /
        |q_g[i]|_1)`` in place of ``scale``. Waits for the context's ``channel_source``.
        """
        ...

    def score_tokens(
        self,
        logits: Table,
        first: Offsets,
        query_heads: int,
        context: ContextSummaries,
        page_tokens: int,
    ) -> Scores:
        """Scores of the context's pages of ``page_tokens`` tokens from the logits of all tokens.

        A page's score is its mass: the mean over the query heads of the KV head of its tokens'
        softmax weights, added up. With ``page_tokens = 1`` columns are tokens, whose score is the
        sum of their logits over the query heads (not of their softmax; SparQ step 3).
        """
        ...

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
        ...

    def on_host(self, scores: Scores, context: ContextSummaries) -> HostScores:
        """Scores for ranking by other means than :meth:`choose`; views where they can be."""
        ...

    def cover(self, selection: Selection, tokens: TokenLogits, context: ContextSummaries) -> Floats:
        """Softmax mass of the chosen tokens and the window, float32 [R, q_heads]: SparQ's alpha."""
        ...

    def cover_pages(
        self, selection: Selection, pages: PageLogits, context: ContextSummaries
    ) -> Floats:
        """Softmax mass of whole pages and the window by logits of pages, float32 [R, q_heads]."""
        ...
