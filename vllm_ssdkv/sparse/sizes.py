"""Sizes of the contexts and windows of a step's rows, and what follows from them.

All of it is the same in every layer: it is worked out once per step, not once per layer.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _kernels
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout

if TYPE_CHECKING:
    from vllm_ssdkv.sparse.protocol import Budget

Offsets = NDArray[np.int64]


def offsets(counts: NDArray[np.int64]) -> Offsets:
    """Offsets of each row's columns, and the end of the last, int64 [R + 1]."""
    first = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=first[1:])
    return first


class ContextSizes:
    """Sizes of R rows. Arrays are made when they are first asked for; nobody may write to them.

    Attributes:
        row_begin, row_end, window_tokens: As of ``ContextSummaries``.
        budgets: Context pages that each row may choose for each KV head, int32 [R], by budget and
            tokens ahead, as far as somebody has asked for them (``protocol.page_budget``).
    """

    def __init__(
        self,
        layout: BlockLayout,
        row_begin: NDArray[np.int32],
        row_end: NDArray[np.int32],
        window_tokens: NDArray[np.int32],
    ) -> None:
        self._layout = layout
        self.row_begin = row_begin
        self.row_end = row_end
        self.window_tokens = window_tokens
        self.budgets: dict[tuple[Budget, int], NDArray[np.int32]] = {}

    @cached_property
    def pages(self) -> NDArray[np.int64]:
        """Context pages of each row and KV head, int64 [R]."""
        return (self.row_end.astype(np.int64) - self.row_begin) * self._layout.groups

    @cached_property
    def context_tokens(self) -> NDArray[np.int64]:
        """Context tokens of each row, int64 [R]."""
        return self.pages * self._layout.page_tokens

    @cached_property
    def first_page(self) -> Offsets:
        """Columns of a table with one for each context page, int64 [R + 1]."""
        return offsets(self.pages)

    @cached_property
    def first_token(self) -> Offsets:
        """Columns of a table with one for each token, the window's included, int64 [R + 1]."""
        return offsets(self.context_tokens + self.window_tokens)

    @cached_property
    def bound(self) -> _kernels.Contexts:
        """The sizes as native kernels take them: checked."""
        return _kernels.Contexts(
            self._layout.shape,
            self.row_begin,
            self.row_end,
            self.window_tokens,
            self.first_page,
            self.first_token,
        )

    @cached_property
    def all_pages(self) -> int:
        """Context pages of all rows, for one KV head."""
        return int(self.pages.sum())
