"""Input and output of a selector; every selector and its callers rest on this.

A *row* is the single query token of a request in decode (prefill is exact and selects nothing). Its
keys are the *context*, complete blocks in DRAM and on SSD, and the *window*, the newest tokens in
HBM with the current one among them. A selector chooses context pages, for each KV head on its own;
the window is attended to in any case. Pages are numbered from the start of the context: page =
block index * groups + group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.clustering.clusters import Clusters
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.sparse.sizes import ContextSizes

if TYPE_CHECKING:
    from vllm_ssdkv.sparse.next_best import Ranked


@dataclass(frozen=True, slots=True)
class Budget:
    """Limit on the earlier tokens that a row may attend to, those of window and sinks included.

    Exactly one of the two is set: ``share`` of all earlier tokens, above 0 and at most 1, or a
    number of ``tokens``, at least 0. Raises ``ValueError`` otherwise. The current token is free
    (SparQ's k + 1).
    """

    share: float | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        """Check that one kind of budget is given, within its range."""
        if (self.share is None) == (self.tokens is None):
            raise ValueError(f"a budget is either a share or a number of tokens, not {self}")
        if self.share is not None and not 0 < self.share <= 1:
            raise ValueError(f"a budget's share must be above 0 and at most 1, not {self.share}")
        if self.tokens is not None and self.tokens < 0:
            raise ValueError(f"a budget must be at least 0 tokens, not {self.tokens}")

    def context_tokens(
        self,
        context_tokens: NDArray[np.int64],
        window_tokens: NDArray[np.int64],
        ahead: int = 0,
    ) -> NDArray[np.int64]:
        """Context tokens that rows of these sizes (int64 ``[R]``) may still choose, rounded down.

        What the window holds is paid for first. Where it takes the whole budget, nothing is left.
        With ``ahead``, so much that the budget holds for each of so many tokens that follow, all
        of which will be attended to.
        """
        held = window_tokens - 1 + ahead
        if self.share is None:
            allowed = np.full_like(context_tokens, self.tokens or 0)
        else:
            whole = (context_tokens + held).astype(np.float64)
            allowed = np.floor(whole * self.share).astype(np.int64)
        left: NDArray[np.int64] = np.minimum(np.maximum(allowed - held, 0), context_tokens)
        return left


@dataclass(frozen=True, slots=True)
class Needs:
    """Parts of a :class:`ContextSummaries` that a selector reads, beside the rows' sizes.

    ``bounds``: ``bounds_base``. ``spread``: ``spread_base``. ``codes``, of so many bits:
    ``codes_base``. ``channels``, how many per KV head: ``channel_base`` or ``channel_source``, and
    ``window_base``. ``clusters``: of the rows' pages.
    """

    bounds: bool = False
    spread: bool = False
    codes: int = 0
    channels: int = 0
    clusters: bool = False


@dataclass(frozen=True, slots=True)
class ContextSummaries:
    """Summaries of R rows' contexts in one layer. Holds references, copies nothing.

    Row r has the context blocks ``row_begin[r] .. row_end[r]`` (int32 ``[R]``, end exclusive) of B
    blocks, in context order, all of them complete. Addresses are absolute, uint64 ``[B]``, of
    memory that the kernels reach (on a GPU its own, or pinned host memory), which the caller keeps
    alive and unchanged until they are done.

    Attributes:
        layout: Sizes and dtype of a block; its page stride is that of ``window_base``'s pages.
        row_begin, row_end: See above.
        window_tokens: Tokens of each row that the window holds, the current one included, int32
            [R]; at least 1.
        bounds_base: Each block's page bounds, ``[kv_heads, groups, 2, head_size]`` of the layout's
            dtype: minimum, then maximum over the page's tokens of each channel of K. None where no
            selector needs them.
        spread_base: Likewise mean, then variance, rounded from float32.
        codes_base: Each block's K in a few bits, a record for each KV head (``docs/format.md``).
        channel_base: Each block's K once more, channel-major: ``[kv_heads, head_size,
            block_tokens]`` of the layout's dtype. None where no selector needs it.
        window_base: The window's blocks, token-major, as attention reads them, absolute addresses,
            uint64 [W]: row r has ``window_begin[r] .. window_end[r]`` (int32 [R]) of them; its
            tokens go on where the context ends. Only where channels are needed.
        window_begin, window_end: See ``window_base``.
        ahead: Tokens that follow for which the selection will be kept, all of which will be
            attended to: the budget must hold then, too.
        channel_source: In place of ``channel_base``, where K is not in DRAM: given the channels of
            each row and KV head, int32 ``[R, kv_heads, count]``, ascending, it answers with the
            addresses of only these of each block, ``[kv_heads, count, block_tokens]``. Blocks while
            they are read; the addresses hold until it is called again.
        clusters: Clusters of each row's pages, one for each KV head, [R][kv_heads]; they cover all
            pages of the context. None: each page is by itself.
        known_sizes: Where another layer has worked them out already.
    """

    layout: BlockLayout
    row_begin: NDArray[np.int32]
    row_end: NDArray[np.int32]
    window_tokens: NDArray[np.int32]
    bounds_base: NDArray[np.uint64] | None = None
    spread_base: NDArray[np.uint64] | None = None
    codes_base: NDArray[np.uint64] | None = None
    channel_base: NDArray[np.uint64] | None = None
    window_base: NDArray[np.uint64] | None = None
    window_begin: NDArray[np.int32] | None = None
    window_end: NDArray[np.int32] | None = None
    channel_source: Callable[[NDArray[np.int32]], NDArray[np.uint64]] | None = None
    ahead: int = 0
    clusters: Sequence[tuple[Clusters, ...]] | None = None
    known_sizes: InitVar[ContextSizes | None] = None
    sizes: ContextSizes = field(init=False)

    def __post_init__(self, known_sizes: ContextSizes | None) -> None:
        """Sizes are those that are known, or made."""
        made = known_sizes or ContextSizes(
            self.layout, self.row_begin, self.row_end, self.window_tokens
        )
        object.__setattr__(self, "sizes", made)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.row_begin)

    @property
    def pages(self) -> NDArray[np.int64]:
        """Context pages of each row and KV head, int64 [R]."""
        return self.sizes.pages

    @property
    def context_tokens(self) -> NDArray[np.int64]:
        """Context tokens of each row, int64 [R]."""
        return self.sizes.context_tokens


@dataclass(frozen=True, slots=True)
class Selection:
    """The pages to attend to, row after row and KV head after KV head.

    Attributes:
        pages: Page numbers, int32 [P], ascending within each row and head, none twice.
        begin: Where each (row, KV head) begins in ``pages``, and the end of the last, int32
            [R * kv_heads + 1]; head h of row r is entry ``r * kv_heads + h``.
        mass: Estimated softmax mass that window and pages cover, mean over the query heads of each
            KV head, float32 [R, kv_heads] within 0..1. Exactly 1 where everything is covered; NaN
            where the selector has no estimate.
        token_mask: Which tokens of each page to attend to, uint8 [P, page_tokens] of 0 and 1.
            None: all of them.
        alpha: If set, attention's output is not final: it becomes ``alpha * out + (1 - alpha) *
            mean_value`` with the mean V of all the row's tokens. float32 [R, q_heads]; rows of
            NaN are final.
        wanted: Mass that was to be covered, within the budget; 0: the budget alone decided.
        ranked: Of pages that were chosen by scores of pages, what tells which come next.
    """

    pages: NDArray[np.int32]
    begin: NDArray[np.int32]
    mass: NDArray[np.float32]
    token_mask: NDArray[np.uint8] | None = None
    alpha: NDArray[np.float32] | None = None
    wanted: float = 0.0
    ranked: Ranked | None = None

    @classmethod
    def of(cls, lists: Sequence[NDArray[np.int32]], mass: NDArray[np.float32]) -> Selection:
        """The selection of ascending page numbers, one list for each row and KV head in turn."""
        begin = np.zeros(len(lists) + 1, np.int32)
        np.cumsum([len(pages) for pages in lists], out=begin[1:])
        return cls(np.concatenate([np.empty(0, np.int32), *lists]), begin, mass)


class Selector(Protocol):
    """Chooses context pages for rows. Immutable; any thread, several at once.

    Attributes:
        name: As in the option.
        needs: What has to be in the summaries.
        budget: The most that it chooses.
    """

    name: str
    needs: Needs
    budget: Budget

    def select(
        self,
        query: torch.Tensor,
        context: ContextSummaries,
        scale: float,
        window_lse: torch.Tensor | None = None,
    ) -> Selection:
        """The pages that R rows need: a pure function of query, context and window.

        Waits for nothing but a ``channel_source``; the GIL is free while kernels run.

        Args:
            query: [R, q_heads, head_size] on the kernels' device, of any dtype of
                ``attention.blocks.DTYPES``, heads contiguous.
            context: Summaries of the same R rows.
            scale: Of the logits, as in attention.
            window_lse: Log-sum-exp of the scaled logits over the window, float32 [R, q_heads]. It
                tells how much of each head's attention is paid for already: pages are then chosen
                for the heads that look behind the window. None: heads count alike and ``mass`` is
                that of the context alone. The answer depends on it, so pass it always or never.

        Raises:
            ValueError: shapes or dtypes do not fit, or a summary that ``needs`` names is missing.
        """
        ...


def page_budget(budget: Budget, context: ContextSummaries) -> NDArray[np.int32]:
    """Context pages that each row may choose for each KV head, int32 [R]: rounded down."""
    key = budget, context.ahead
    found = context.sizes.budgets.get(key)
    if found is None:
        held = context.window_tokens.astype(np.int64)
        tokens = budget.context_tokens(context.context_tokens, held, context.ahead)
        found = (tokens // context.layout.page_tokens).astype(np.int32)
        context.sizes.budgets[key] = found
    return found
