"""One interface to the kernels of selection, whatever device the queries are on.

``CpuScoringKernels`` runs the native ones of ``vllm_ssdkv._kernels``, ``TritonScoringKernels``
those of ``vllm_ssdkv.triton_kernels``; :func:`select_scoring_kernels` picks by device.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import UnsupportedError
from vllm_ssdkv.kernels.native import NativeKernels
from vllm_ssdkv.kernels.operands.block_layout import IntArray, on_device, on_host
from vllm_ssdkv.sparse.next_best import Ranked
from vllm_ssdkv.sparse.protocol import ContextSummaries, Selection
from vllm_ssdkv.sparse.scores import (
    Floats,
    HostScores,
    PageLogits,
    Scores,
    ScoringKernels,
    Table,
    TokenLogits,
)
from vllm_ssdkv.sparse.sizes import Offsets, offsets


class CpuScoringKernels(NativeKernels):
    """The native kernels. ``threads`` as of ``CpuKernels``; calls block until done, the GIL free.

    Column c of line h of row r of a table of H lines lies at ``first[r] * H + h * n + c``, where
    ``n = first[r + 1] - first[r]``.
    """

    def bound_logits(
        self, query: torch.Tensor, context: ContextSummaries, scale: float
    ) -> tuple[Floats, Offsets]:
        """See :meth:`ScoringKernels.bound_logits`."""
        records = require_records(context.bounds_base, "bounds")
        return self._page_logits(self._native.bound_logits, query, context, records, scale)

    def spread_logits(
        self, query: torch.Tensor, context: ContextSummaries, scale: float
    ) -> tuple[Floats, Offsets]:
        """See :meth:`ScoringKernels.spread_logits`."""
        records = require_records(context.spread_base, "spread")
        return self._page_logits(self._native.spread_logits, query, context, records, scale)

    def code_logits(
        self, query: torch.Tensor, context: ContextSummaries, scale: float, bits: int
    ) -> tuple[Floats, Offsets]:
        """See :meth:`ScoringKernels.code_logits`."""
        records = require_records(context.codes_base, "codes")
        write = functools.partial(self._native.code_logits, bits=bits)
        return self._page_logits(write, query, context, records, scale)

    def _page_logits(
        self,
        write: Callable[..., None],
        query: torch.Tensor,
        context: ContextSummaries,
        records: NDArray[np.uint64],
        scale: float,
    ) -> tuple[Floats, Offsets]:
        values = host_query(query, context)
        first = context.sizes.first_page
        logits = np.empty(first[-1] * values.shape[1], np.float32)
        write(
            values,
            scale,
            context.sizes.bound,
            records,
            logits=logits,
            threads=self.threads,
        )
        return logits, first

    def weigh(
        self,
        logits: Table,
        first: Offsets,
        window_lse: torch.Tensor | None,
        query_heads: int,
        context: ContextSummaries,
    ) -> Scores:
        """See :meth:`ScoringKernels.weigh`."""
        kv_heads = context.layout.kv_heads
        weights = np.empty(first[-1] * kv_heads, np.float32)
        window_mass = np.empty((len(context), kv_heads), np.float32)
        lse = np.empty((len(context), query_heads), np.float32)
        seen = None if window_lse is None else window_lse.contiguous().numpy()
        self._native.weigh(
            logits,
            first,
            seen,
            weights,
            window_mass,
            lse,
            query_heads,
            context.layout.page_tokens,
            self.threads,
        )
        pages = PageLogits(logits, first, lse, seen)
        return Scores(weights, weights, window_mass, first, of_pages=pages)

    def channel_logits(
        self,
        query: torch.Tensor,
        context: ContextSummaries,
        scale: float,
        channels: int,
    ) -> tuple[Floats, Offsets]:
        """See :meth:`ScoringKernels.channel_logits`."""
        base, window, window_begin = require_channels(context)
        source = context.channel_source
        layout = context.layout
        values = host_query(query, context)
        rows, query_heads, head_size = values.shape
        count = min(channels, head_size)
        chosen = np.empty((rows, layout.kv_heads, count), np.int32)
        reduced = np.empty((rows, query_heads, count), np.float32)
        self._native.choose_channels(values, scale, layout.kv_heads, chosen, reduced)
        if source is not None:
            base = source(chosen)
        first = context.sizes.first_token
        logits = np.empty(first[-1] * query_heads, np.float32)
        self._native.channel_logits(
            chosen,
            reduced,
            context.sizes.bound,
            base,
            window_begin,
            context.window_end,
            window,
            logits,
            source is not None,
            self.threads,
        )
        return logits, first

    def score_tokens(
        self,
        logits: Table,
        first: Offsets,
        query_heads: int,
        context: ContextSummaries,
        page_tokens: int,
    ) -> Scores:
        """See :meth:`ScoringKernels.score_tokens`."""
        kv_heads = context.layout.kv_heads
        columns = context.sizes.first_page
        if page_tokens != context.layout.page_tokens:
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
        """See :meth:`ScoringKernels.choose`."""
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
        mass = mass.reshape(tuple(scores.window_mass.shape))
        return Selection(pages, begin, mass, ranked=Ranked(self, scores))

    def on_host(self, scores: Scores, context: ContextSummaries) -> HostScores:
        """See :meth:`ScoringKernels.on_host`; views."""
        heads = context.layout.kv_heads
        cuts = scores.first[1:-1] * heads

        def rows(table: Table) -> list[Floats]:
            parts = np.split(_on_host(table), cuts)
            return [part.reshape(heads, -1) for part in parts]

        window = _on_host(scores.window_mass)
        return HostScores(rows(scores.score), rows(scores.mass), window)

    def cover(self, selection: Selection, tokens: TokenLogits, context: ContextSummaries) -> Floats:
        """See :meth:`ScoringKernels.cover`."""
        alpha: Floats = np.empty(tuple(tokens.lse.shape), np.float32)
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
            1,
            None,
            self.threads,
        )
        return alpha

    def cover_pages(
        self, selection: Selection, pages: PageLogits, context: ContextSummaries
    ) -> Floats:
        """See :meth:`ScoringKernels.cover_pages`: columns are pages, as if they were tokens."""
        alpha: Floats = np.empty(tuple(pages.lse.shape), np.float32)
        self._native.cover(
            pages.logits,
            pages.first,
            pages.lse,
            np.zeros(len(context), np.int32),
            selection.pages,
            selection.begin,
            None,
            alpha,
            1,
            context.layout.page_tokens,
            pages.window_lse,
            self.threads,
        )
        return alpha


class TritonScoringKernels:
    """The Triton kernels of one CUDA device (or, for tests, of Triton's interpreter).

    Tables are ``[R, lines, columns]`` on the device, as wide as the longest row needs. Rows' sizes
    and addresses come from the host. :meth:`choose` and :meth:`cover` answer to the host, so they
    wait for the current stream; with a ``channel_source`` so does :meth:`channel_logits`.
    """

    def __init__(self, device: torch.device) -> None:
        """Load the kernels; raises ``UnsupportedError`` if Triton cannot be imported."""
        self.device = device
        try:
            self._score = importlib.import_module("vllm_ssdkv.triton_kernels.score")
            self._codes = importlib.import_module("vllm_ssdkv.triton_kernels.codes")
            self._tokens = importlib.import_module("vllm_ssdkv.triton_kernels.tokens")
            self._choose = importlib.import_module("vllm_ssdkv.triton_kernels.choose")
        except ImportError as error:
            raise UnsupportedError(
                f"sparse selectors on {device} need Triton, which does not load: {error}"
            ) from error

    def _here(self, values: IntArray, dtype: torch.dtype) -> torch.Tensor:
        return on_device(values, dtype, self.device)

    def bound_logits(
        self, query: torch.Tensor, context: ContextSummaries, scale: float
    ) -> tuple[torch.Tensor, Offsets]:
        """See :meth:`ScoringKernels.bound_logits`."""
        records = require_records(context.bounds_base, "bounds")
        make = functools.partial(self._score.page_logits, spread=False)
        return self._page_logits(make, query, context, records, scale)

    def spread_logits(
        self, query: torch.Tensor, context: ContextSummaries, scale: float
    ) -> tuple[torch.Tensor, Offsets]:
        """See :meth:`ScoringKernels.spread_logits`."""
        records = require_records(context.spread_base, "spread")
        make = functools.partial(self._score.page_logits, spread=True)
        return self._page_logits(make, query, context, records, scale)

    def code_logits(
        self, query: torch.Tensor, context: ContextSummaries, scale: float, bits: int
    ) -> tuple[torch.Tensor, Offsets]:
        """See :meth:`ScoringKernels.code_logits`."""
        records = require_records(context.codes_base, "codes")
        make = functools.partial(self._codes.code_logits, bits=bits)
        return self._page_logits(make, query, context, records, scale)

    def _page_logits(
        self,
        make: Callable[..., None],
        query: torch.Tensor,
        context: ContextSummaries,
        records: NDArray[np.uint64],
        scale: float,
    ) -> tuple[torch.Tensor, Offsets]:
        shape = len(query), query.shape[1], _longest(context.pages)
        logits = torch.empty(shape, dtype=torch.float32, device=self.device)
        make(
            query.contiguous(),
            self._here(context.row_begin, torch.int32),
            self._here(context.row_end, torch.int32),
            self._here(records, torch.int64),
            logits,
            layout=context.layout,
            scale=scale,
        )
        return logits, context.sizes.first_page

    def weigh(
        self,
        logits: Table,
        first: Offsets,
        window_lse: torch.Tensor | None,
        query_heads: int,
        context: ContextSummaries,
    ) -> Scores:
        """See :meth:`ScoringKernels.weigh`."""
        layout = context.layout
        weights, window, lse = self._choose.weigh(
            logits, window_lse, layout.kv_heads, layout.page_tokens
        )
        pages = PageLogits(logits, first, lse, window_lse)
        return Scores(weights, weights, window, first, of_pages=pages)

    def channel_logits(
        self,
        query: torch.Tensor,
        context: ContextSummaries,
        scale: float,
        channels: int,
    ) -> tuple[torch.Tensor, Offsets]:
        """See :meth:`ScoringKernels.channel_logits`."""
        base, window, begin = require_channels(context)
        chosen, reduced = self._score.choose_channels(query, context.layout, channels, scale)
        if context.channel_source is not None:
            base = context.channel_source(on_host(chosen, np.int32))
        first = context.sizes.first_token
        logits = self._score.channel_logits(
            chosen,
            reduced,
            self._here(context.row_begin, torch.int32),
            self._here(context.row_end, torch.int32),
            self._here(base, torch.int64),
            self._here(begin, torch.int32),
            self._here(context.window_tokens, torch.int32),
            self._here(window, torch.int64),
            layout=context.layout,
            picked=context.channel_source is not None,
            max_tokens=_longest(np.diff(first)),
        )
        return logits, first

    def score_tokens(
        self,
        logits: Table,
        first: Offsets,
        query_heads: int,
        context: ContextSummaries,
        page_tokens: int,
    ) -> Scores:
        """See :meth:`ScoringKernels.score_tokens`."""
        columns = context.context_tokens // page_tokens
        score, mass, window, lse = self._tokens.score_tokens(
            logits,
            self._here(context.context_tokens, torch.int32),
            kv_heads=context.layout.kv_heads,
            page_tokens=page_tokens,
            max_columns=_longest(columns),
        )
        return Scores(score, mass, window, offsets(columns), TokenLogits(logits, first, lse))

    def choose(
        self,
        scores: Scores,
        least: NDArray[np.int32],
        most: NDArray[np.int32],
        sinks: int = 0,
        p: float = 1.0,
    ) -> Selection:
        """See :meth:`ScoringKernels.choose`; one copy to the host."""
        columns = np.diff(scores.first)
        room = max(1, _longest(np.minimum(most, columns)))
        pages, count, mass = self._choose.choose(
            scores.score,
            scores.mass,
            scores.window_mass,
            self._here(columns, torch.int32),
            self._here(least, torch.int32),
            self._here(most, torch.int32),
            max_chosen=room,
            sinks=sinks,
            p=p,
        )
        lists = count.numel()
        packed = torch.cat([count.flatten(), mass.flatten().view(torch.int32), pages.flatten()])
        answer = on_host(packed, np.int32)
        counts, table = answer[:lists], answer[2 * lists :].reshape(lists, room)
        begin = np.concatenate([np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)])
        covered = answer[lists : 2 * lists].view(np.float32).reshape(tuple(count.shape))
        taken = table[np.arange(room) < counts[:, None]]
        return Selection(taken, begin, covered, ranked=Ranked(self, scores))

    def on_host(self, scores: Scores, context: ContextSummaries) -> HostScores:
        """See :meth:`ScoringKernels.on_host`; copies, for which it waits."""
        columns = np.diff(scores.first).tolist()

        def rows(table: Table) -> list[Floats]:
            lines = _on_host(table)
            return [line[:, :width] for line, width in zip(lines, columns, strict=True)]

        window = _on_host(scores.window_mass)
        return HostScores(rows(scores.score), rows(scores.mass), window)

    def cover(self, selection: Selection, tokens: TokenLogits, context: ContextSummaries) -> Floats:
        """See :meth:`ScoringKernels.cover`."""
        mask = selection.token_mask
        alpha = self._tokens.cover(
            tokens.logits,
            tokens.lse,
            self._here(context.context_tokens, torch.int32),
            self._here(context.window_tokens, torch.int32),
            self._here(selection.pages, torch.int32),
            self._here(selection.begin, torch.int32),
            None if mask is None else torch.from_numpy(mask).to(self.device),
            page_tokens=context.layout.page_tokens,
        )
        return on_host(alpha, np.float32)

    def cover_pages(
        self, selection: Selection, pages: PageLogits, context: ContextSummaries
    ) -> Floats:
        """See :meth:`ScoringKernels.cover_pages`: columns are pages, as if they were tokens."""
        columns = self._here(context.pages, torch.int32)
        alpha = self._tokens.cover(
            pages.logits,
            pages.lse - math.log(context.layout.page_tokens),
            columns,
            torch.zeros_like(columns),
            self._here(selection.pages, torch.int32),
            self._here(selection.begin, torch.int32),
            None,
            page_tokens=1,
        )
        if pages.window_lse is not None:
            share = torch.exp(torch.as_tensor(pages.window_lse - pages.lse))
            alpha = torch.clamp(alpha + share, max=1.0)
        return on_host(alpha, np.float32)


@functools.cache
def select_scoring_kernels(device: torch.device) -> ScoringKernels:
    """The kernels for queries on ``device``, one object per device of a process.

    Raises ``UnsupportedError`` if there are none.
    """
    if device.type == "cpu":
        return CpuScoringKernels()
    if device.type == "cuda":
        return TritonScoringKernels(device)
    raise UnsupportedError(
        f"sparse selectors have no scoring kernels for {device.type} devices; set selector: exact"
    )


def require_records(base: NDArray[np.uint64] | None, kind: str) -> NDArray[np.uint64]:
    """Addresses of the blocks' records of pages; ``ValueError`` if the summaries lack them."""
    if base is None:
        raise ValueError(f"{kind} of pages are needed and not in the summaries")
    return base


def require_channels(
    context: ContextSummaries,
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.int32]]:
    """Addresses of channel-major K (to be asked for, where there is a source), those of the
    window's blocks, and where each row's begin; ``ValueError`` if the summaries lack them."""
    base = context.channel_base
    if base is None and context.channel_source is not None:
        base = np.zeros(0, np.uint64)
    if base is None or context.window_base is None or context.window_begin is None:
        raise ValueError("channel-major K and the window's addresses are not in the summaries")
    return base, context.window_base, context.window_begin


def _on_host(table: Table) -> Floats:
    values: Floats = table.cpu().numpy() if isinstance(table, torch.Tensor) else table
    return values


def _longest(counts: NDArray[np.integer]) -> int:
    return int(counts.max()) if len(counts) else 0


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
