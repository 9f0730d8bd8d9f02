"""Lists of pages that lie anywhere, for sparse decode attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _kernels
from vllm_ssdkv.kernels.operands.block_layout import IntArray, on_host

SPLIT_PAGES: Final = _kernels.SPLIT_PAGES
"""Pages of a list, counted from its first one, whose attention is one partial state. Calls that
have whole such parts of a list give together the bits of one call with all of it."""


@dataclass(frozen=True)
class PageList:
    """P pages of one layer for R rows and ``kv_heads`` KV heads. Holds references, copies nothing.

    KV head h of row r attends to the pages ``begin[i] .. end[i]``, ``i = r * kv_heads + h``, in
    that order. They may be some of what was selected: the rest comes in another call, and no bit
    depends on that if lists are cut at multiples of :data:`SPLIT_PAGES`.

    Attributes:
        query_token: Query token of each row, int32 [R]: its index in the query and the state. No
            token twice.
        query_position: Its position in the request, int64 [R].
        begin, end: See above, int32 [R * kv_heads], end exclusive.
        address: Absolute address of each page, uint64 [P]: K ``[page_tokens, head_size]``, then V
            of the same shape, at once after it. The caller keeps the memory alive.
        position: Position in the request of each page's first token, int64 [P]. Tokens after a
            row's own position are not looked at.
        token_mask: Tokens to attend to, uint8 [P, page_tokens] of 0 and 1; None: all.
    """

    query_token: IntArray
    query_position: IntArray
    begin: IntArray
    end: IntArray
    address: IntArray
    position: IntArray
    token_mask: IntArray | None = None

    def __post_init__(self) -> None:
        """Raise ``ValueError`` unless the arrays' shapes belong together."""
        rows, lists, pages = self.query_token.shape, self.begin.shape, self.address.shape
        if (
            any(len(shape) != 1 for shape in (rows, lists, pages))
            or tuple(self.query_position.shape) != tuple(rows)
            or tuple(self.end.shape) != tuple(lists)
            or tuple(self.position.shape) != tuple(pages)
            or (rows[0] == 0) != (lists[0] == 0)
            or (rows[0] and lists[0] % rows[0])
        ):
            raise ValueError(
                "a page list needs query_token and query_position [R], begin and end "
                "[R * kv_heads], address and position [P]; got "
                f"{tuple(rows)}, {tuple(self.query_position.shape)}, {tuple(lists)}, "
                f"{tuple(self.end.shape)}, {tuple(pages)}, {tuple(self.position.shape)}"
            )
        mask = self.token_mask
        if mask is not None and (len(mask.shape) != 2 or mask.shape[0] != pages[0]):
            raise ValueError(f"a token mask must be [{pages[0]}, page_tokens], got {mask.shape}")

    def on_host(
        self,
    ) -> tuple[
        NDArray[np.uint64],
        NDArray[np.int64],
        NDArray[np.int32],
        NDArray[np.int32],
        NDArray[np.uint8] | None,
    ]:
        """Address and position of the pages, begin and end of the lists, and mask, on the host."""
        return (
            on_host(self.address, np.uint64),
            on_host(self.position, np.int64),
            on_host(self.begin, np.int32),
            on_host(self.end, np.int32),
            None if self.token_mask is None else on_host(self.token_mask, np.uint8),
        )

    @cached_property
    def bound(self) -> tuple[_kernels.Rows, _kernels.Pages]:
        """The lists, on the host, as native kernels take them: checked."""
        address, position, begin, end, mask = self.on_host()
        rows = _kernels.Rows(
            on_host(self.query_token, np.int32),
            None,
            on_host(self.query_position, np.int64),
            begin,
            end,
            list_per_head=True,
        )
        return rows, _kernels.Pages(address, position, mask)
