"""SparF: SparQ (Ribar et al. 2024) over pages of flash (InstInfer, Pan et al. 2024).

Misprints in InstInfer's Algorithm 1: the channel mask runs over d, the local mask is ``t > S - l``,
alpha sums over the token set. Per KV head:

1. the ``channels`` channels with the largest sums of ``|q_g|`` over the G query heads,
2. approximate logits of all tokens from them, in fp32, ``scale_g = sqrt(d |q_g[i]|_1 / |q_g|_1)``,
3. the tokens with the largest sums of logits over G. The window takes the place of SparQ's local
   tokens: all of it is attended to and counts against the budget,
4. ``alpha_g``: softmax mass of the chosen tokens, of all tokens, in the approximate logits,
5. ``out_g = alpha_g * attention over the chosen + (1 - alpha_g) * mean V`` of all tokens, if
   ``estimate_rest``: from an eighth of the channels alpha says too little on text, so it is off by
   default (``docs/decisions/018-tokens-by-key-and-no-mean-v.md``).

With granularity "token" pages change what is read and nothing else: the output is SparQ's for every
page size. With "page" pages are what is chosen, by the sum of their tokens' softmax weights, so
that what is read is the budget and no more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.sparse.protocol import Budget, ContextSummaries, Needs, Selection, page_budget
from vllm_ssdkv.sparse.scores import Scores, ScoringKernels
from vllm_ssdkv.sparse.selector_parts import SelectorParts


class SparfSelector:
    """Chooses tokens, or pages, by SparQ's scores. See ``protocol.Selector`` and ``scores.Scorer``.

    As a scorer it scores pages, whatever the granularity. ``window_lse`` is not looked at: the
    window's approximate logits come from its keys.
    """

    name = "sparf"

    def __init__(
        self,
        budget: Budget,
        channels: int,
        granularity: Literal["token", "page"],
        sink_tokens: int,
        kernels: ScoringKernels,
        *,
        estimate_rest: bool = False,
    ) -> None:
        """Choose ``budget`` tokens from ``channels`` channels.

        Args:
            budget: SparQ's k, with the window counted in.
            channels: SparQ's r, at least 1; the head size if that is less.
            granularity: What is chosen and counted.
            sink_tokens: First tokens of the context, always chosen; not in the paper. Rounded up
                to pages if those are chosen.
            kernels: Of selection.
            estimate_rest: SparQ's step 5.

        Raises:
            ValueError: ``channels`` is less than 1.
        """
        if channels < 1:
            raise ValueError(f"channels must be at least 1, not {channels}")
        self.budget = budget
        self.channels = channels
        self.estimate_rest = estimate_rest
        self.needs = Needs(channels=channels)
        self.granularity = granularity
        self.sink_tokens = sink_tokens
        self.kernels = kernels

    @classmethod
    def of(cls, parts: SelectorParts) -> SparfSelector:
        """As the options say."""
        options = parts.options
        return cls(
            parts.budget,
            options.channels or max(1, parts.head_size // 8),
            options.granularity,
            options.sink_tokens,
            parts.kernels(),
            estimate_rest=options.estimate_rest,
        )

    def score(
        self,
        query: torch.Tensor,
        context: ContextSummaries,
        scale: float,
        window_lse: torch.Tensor | None = None,
    ) -> Scores:
        """Scores of pages."""
        return self._score(query, context, scale, context.layout.page_tokens)

    def complete(
        self, selection: Selection, scores: Scores, context: ContextSummaries
    ) -> Selection:
        """The selection with its alpha, if the rest is to be estimated."""
        if not self.estimate_rest:
            return selection
        if scores.tokens is None:
            raise ValueError("these are not the scores of this selector")
        alpha = self.kernels.cover(selection, scores.tokens, context)
        return replace(selection, alpha=alpha)

    def select(
        self,
        query: torch.Tensor,
        context: ContextSummaries,
        scale: float,
        window_lse: torch.Tensor | None = None,
    ) -> Selection:
        """The pages that hold the chosen tokens, or the chosen pages."""
        if self.granularity == "page":
            scores = self.score(query, context, scale)
            pages = page_budget(self.budget, context)
            sinks = -(-self.sink_tokens // context.layout.page_tokens)
            return self.complete(self.kernels.choose(scores, pages, pages, sinks), scores, context)
        scores, tokens = self._score(query, context, scale, 1), self.token_budget(context)
        chosen = self.kernels.choose(scores, tokens, tokens, self.sink_tokens)
        return self.complete(_pages_of(chosen, context.layout.page_tokens), scores, context)

    def token_budget(self, context: ContextSummaries) -> NDArray[np.int32]:
        """Context tokens that each row may choose for each KV head, int32 [R]."""
        held = context.window_tokens.astype(np.int64)
        left = self.budget.context_tokens(context.context_tokens, held, context.ahead)
        return left.astype(np.int32)

    def _score(
        self, query: torch.Tensor, context: ContextSummaries, scale: float, page_tokens: int
    ) -> Scores:
        logits, first = self.kernels.channel_logits(query, context, scale, self.channels)
        return self.kernels.score_tokens(logits, first, query.shape[1], context, page_tokens)


def _pages_of(tokens: Selection, page_tokens: int) -> Selection:
    """The pages that hold the tokens of a selection of tokens, masked."""
    lists = np.repeat(np.arange(len(tokens.begin) - 1), np.diff(tokens.begin))
    pages, offset = np.divmod(tokens.pages, page_tokens)
    new = np.ones(len(pages), np.bool_)
    new[1:] = (pages[1:] != pages[:-1]) | (lists[1:] != lists[:-1])
    index: NDArray[np.int64] = np.cumsum(new) - 1
    mask = np.zeros((int(new.sum()), page_tokens), np.uint8)
    mask[index, offset] = 1
    begin = np.searchsorted(lists[new], np.arange(len(tokens.begin))).astype(np.int32)
    return Selection(pages[new].astype(np.int32), begin, tokens.mass, mask)
