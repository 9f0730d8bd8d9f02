"""Sparse attention of tokens that are decoded: select, fetch, attend, merge.

``docs/internals/sparse-decode.md`` has the steps and their invariant.

The window is attended to before, as for every row. Its log-sum-exp tells the selector how much of a
head's attention the context can still change. Pages are folded into the same online softmax, so
where they were, and in how many turns they came, changes nothing but the time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv import _kernels
from vllm_ssdkv.attention.compensate import compensate
from vllm_ssdkv.attention.exact import NO_LEASE, RowBatch
from vllm_ssdkv.attention.mean_value import MeanRows, RunningMeanV
from vllm_ssdkv.attention.native_choice import (
    is_native,
    native_choice,
    selection_of,
    selector_limits,
)
from vllm_ssdkv.attention.sparse_deviation import Compared, SparseDeviation
from vllm_ssdkv.kernels.dense import select_kernels, wait_for
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout, PartialState, on_host
from vllm_ssdkv.kernels.operands.page_list import SPLIT_PAGES, PageList
from vllm_ssdkv.kernels.operands.step_tables import TableRow
from vllm_ssdkv.kernels.paged import PageAttention, PageKernels, select_page_kernels
from vllm_ssdkv.kernels.step_clock import (
    AHEAD,
    ATTEND,
    FETCH,
    MERGE,
    SELECT,
    WAIT,
    AttentionClock,
    StepClock,
)
from vllm_ssdkv.offload.protocol import ContextKernels, ContextWork, Foldable
from vllm_ssdkv.sparse.concat import concat
from vllm_ssdkv.sparse.context_clusters import ContextClusters
from vllm_ssdkv.sparse.next_best import next_best
from vllm_ssdkv.sparse.prefetch import Prefetcher, SelectionHistory
from vllm_ssdkv.sparse.protocol import ContextSummaries, Needs, Selection, Selector
from vllm_ssdkv.sparse.selection_reuse import RowSizes, SelectionReuse
from vllm_ssdkv.sparse.sizes import ContextSizes
from vllm_ssdkv.store.cache.selected_pages import Asked
from vllm_ssdkv.store.read.channel_reader import ChannelReader
from vllm_ssdkv.store.read.gpu_pages import GpuFetch
from vllm_ssdkv.store.read.page_fetcher import Fetch
from vllm_ssdkv.store.read.selected_context import BlockPages, SelectedContexts

Attend = Callable[[ContextWork, PartialState, StepClock, Callable[[Foldable], None]], None]
"""Has a device attend to chosen pages, or calls the last argument, which attends here, for what it
does not attend to."""


@dataclass(slots=True)
class ChoiceCounts:
    """Counts of one step's choices, over all layers and KV heads.

    Attributes:
        lists: Lists of pages: one per row, layer and KV head.
        kept: Of these, the ones that a token before had chosen.
        selected: Pages in them.
        tokens: Tokens of these pages that are attended to.
        channel_bytes: Of K in the channels by which they were chosen.
        context: Pages that there were to choose from.
        missing: Sum over the lists of the softmax mass that, by the selector's estimate, neither
            window nor chosen pages cover.
        short: Lists that the budget ended before they had the mass that was wanted.
    """

    lists: int = 0
    kept: int = 0
    selected: int = 0
    tokens: int = 0
    channel_bytes: int = 0
    context: int = 0
    missing: float = 0.0
    short: int = 0


@dataclass(frozen=True, slots=True)
class _Choosing:
    """The rows that choose: the same in every layer, until a row is poisoned, and but for the
    position the same in every step, until the batch or a context is another one. All arrays [R].

    Attributes:
        batch: Tokens of the step, where those of each of its rows begin, and their context.
        alive: Positions in the contexts' rows, int64.
        rows: Their numbers in the batch, int64.
        token: Their query tokens, int32; ``index`` is the same for torch, on the queries' device.
        everything: Whether these are all tokens of the step, in order.
        position: Of the query tokens, int64.
        requests: Names.
        begin, end: Blocks of their contexts, int32.
        blocks: Number of these, int64.
        by: Number of the selector of each.
        alike: Places of the rows that choose by each selector.
        sizes: Of some of them, by the bytes of their numbers in these arrays; of all by none.
        means: Of some of them, by the bytes of their numbers in these arrays.
    """

    batch: tuple[int, NDArray[np.int32], NDArray[np.int64]]
    alive: NDArray[np.int64]
    rows: NDArray[np.int64]
    token: NDArray[np.int32]
    index: torch.Tensor
    everything: bool
    position: NDArray[np.int64]
    requests: list[str]
    begin: NDArray[np.int32]
    end: NDArray[np.int32]
    blocks: NDArray[np.int64]
    by: NDArray[np.int64]
    alike: list[NDArray[np.int64]]
    sizes: dict[bytes, ContextSizes] = field(default_factory=dict)
    means: dict[bytes, MeanRows] = field(default_factory=dict)

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Their part of a tensor over the step's query tokens."""
        return values if self.everything else values[self.index]

    def is_of(self, batch: RowBatch) -> bool:
        """Check whether the rows of a batch have the same query tokens and contexts."""
        tokens, begin, row = self.batch
        same = tokens == batch.tokens and np.array_equal(begin, batch.query_begin)
        return same and np.array_equal(row, batch.stream_row)

    def at(self, batch: RowBatch) -> _Choosing:
        """The same rows at the positions of a batch."""
        return _Choosing(
            self.batch,
            self.alive,
            self.rows,
            self.token,
            self.index,
            self.everything,
            batch.first_position[self.rows],
            self.requests,
            self.begin,
            self.end,
            self.blocks,
            self.by,
            self.alike,
        )

    def some(self, values: torch.Tensor, which: NDArray[np.int64]) -> torch.Tensor:
        """The part of some of them, by their places in these arrays."""
        return self.of(values)[which]


class SparseDecode:
    """The rows of one step that choose their pages. Used by the thread of the forward pass.

    While a device attends to chosen pages that thread waits, and the device's uses the contexts,
    the prefetcher and its counts within a lease (:class:`ChosenPages`).
    """

    def __init__(
        self,
        selectors: Mapping[int, Selector],
        contexts: SelectedContexts,
        layout: BlockLayout,
        layers: Sequence[int],
        means: RunningMeanV,
        requests: Sequence[str],
        deviation: SparseDeviation | None = None,
        guesses: Prefetcher | None = None,
        kept: SelectionReuse | None = None,
        clusters: ContextClusters | None = None,
        offload: Attend | None = None,
        latest: SparseDecode | None = None,
    ):
        """``selectors``: of the contexts' rows, by their numbers; ``layout`` is that of blocks in
        HBM; ``layers``, ascending, are those in which they choose; ``requests`` names those of all
        rows of the step; ``deviation`` compares what comes out with exact attention; with
        ``guesses``, which outlive the step, pages are read ahead; with ``kept``, which do so too,
        rows do not choose at every token; ``clusters`` likewise, for selectors that need them;
        ``offload`` attends to chosen pages, or loses their rows; ``latest``: of the step before,
        whose rows serve this one where nothing has changed."""
        self._of_rows = [selectors[row] for row in contexts.rows.tolist()]
        self._selectors = list(dict.fromkeys(self._of_rows))
        self.contexts = contexts
        self._layout = layout
        self._of_tokens = any(one.needs.channels for one in self._selectors)
        """Check whether alpha is that of tokens: that of pages counts attention sinks already."""
        run_bytes = layout.block_tokens * layout.dtype.itemsize
        self._channels = ChannelReader(contexts, layout.head_size, run_bytes)
        self._means = means
        self._requests = requests
        self._next: dict[int, int] = {} if latest is None else latest._next
        if list(self._next) != list(layers):
            self._next = dict(zip(layers, [*layers[1:], *layers[:1]], strict=True))
        """The layer in which rows choose next, behind the last one that of the next step."""
        self._deviation = deviation
        self._guesses = guesses
        self._kept = kept
        self._clusters = clusters
        self._offload = offload
        self._choosing: _Choosing | None = None
        self._before = latest._choosing if latest is not None and self._is_as(latest) else None
        """Rows of the step before, if they are these ones."""
        self._parts: list[tuple[NDArray[np.int64], Selection]] = []
        """What all rows chose in the latest layer, and which rows; empty where some did not."""
        self._groups: list[tuple[NDArray[np.int64], Selector, ContextSizes]] = []
        """Rows that native code has choose alike, by their places."""
        self.behind: tuple[NDArray[np.int64], MeanRows] | None = None
        """Rows, by their places, of which native code needs mean V that some layer does not have:
        see :meth:`begin_means`."""
        self.counts = ChoiceCounts()

    def _is_as(self, latest: SparseDecode) -> bool:
        """Check whether the same requests chose in the step before, by the same selectors, from the
        same blocks, and none of their rows was lost."""
        same = self._requests == latest._requests and self._of_rows == latest._of_rows
        return same and self.contexts.lies_as(latest.contexts)

    def attend(
        self,
        kernels: PageKernels,
        clock: StepClock,
        layer: int,
        query: torch.Tensor,
        value: torch.Tensor,
        state: PartialState,
        batch: RowBatch,
        cache: torch.Tensor,
        scale: float,
    ) -> None:
        """Fold the chosen pages of a layer into ``state``; blocks until they have arrived.

        Args:
            kernels: Of the device that ``query`` is on.
            clock: Gets the time of select, fetch, wait, attend and merge.
            layer: From 0.
            query: [T, Hq, D].
            value: V of the same tokens, [T, Hkv, D], as the cache has it by now.
            state: Of all T queries; it has seen the window.
            batch: The step's rows; those that choose have one query.
            cache: The layer's blocks in HBM, [num_blocks, ...].
            scale: Of the logits.
        """
        now = self._now(batch, query.device)
        alive = now.alive
        if layer not in self._next or len(alive) == 0:
            return
        seen = kernels.log_sum_exp(state, now.index)
        window = None if self._deviation is None else state.rows(now.index)
        mine = now.of(query)
        selection = self._select(clock, layer, now, batch, cache, mine, scale, seen)
        wanted, starts = self._locate(layer, alive, selection.pages, selection.begin)
        clock.lap(SELECT)
        pages = ChosenPages(self, layer, now, selection, wanted, starts, self._layout)

        if self._offload is None:
            pages.fold(kernels, query, state, scale, clock)
        else:
            every = ContextKernels(select_kernels(query.device), kernels)

            def here(some: Foldable) -> None:
                some.fold_by(every, query, state, scale, clock, NO_LEASE)

            self._offload(ContextWork(query, pages, scale, self._requests), state, clock, here)
        if selection.alpha is not None:
            mixed = np.flatnonzero(~np.isnan(selection.alpha).any(axis=1))
            mean = self._mean_value(kernels, layer, now, mixed, batch, cache, now.of(value))
            alpha = torch.from_numpy(selection.alpha[mixed]).to(query.device)
            sinks = state.softmax.sinks if self._of_tokens else None
            compensate(state, now.index[mixed], alpha, mean.to(query.device), sinks)
            clock.lap(MERGE)
        if self._deviation is not None and window is not None:
            queries = mine.cpu()
            compared = Compared(self.contexts, alive, self._layout, queries, scale, selection)
            self._deviation.compare(layer, compared, window, state.rows(now.index))
            clock.start()

    # ---- layers that are run natively: see decode_plan.py ----

    @property
    def runs_natively(self) -> bool:
        """Check whether native code does all of it but to read: rows choose by their own queries,
        as it knows how to; pages are attended to in DRAM; and nobody has to see the state of
        attention before the end of a layer."""
        if self._kept is not None or self._deviation is not None or self._offload is not None:
            return False
        channels = self.contexts.holds_channels
        for one in self._selectors:
            if not is_native(one, channels=channels):
                return False
        return self.contexts.read_in_dram

    @property
    def layers(self) -> Collection[int]:
        """Layers in which rows choose."""
        return self._next.keys()

    @property
    def reads(self) -> bool:
        """Check whether pages may have to be read."""
        return not self.contexts.in_frames

    @property
    def has_lost(self) -> bool:
        """Check whether rows have been lost since :meth:`choosing_rows`."""
        known = self._choosing
        return known is not None and len(self.contexts.alive()) < len(known.alive)

    def guess(self, layer: int) -> _kernels.GuessedPages | None:
        """Pages that the next layer will probably choose, where they are to be in memory when this
        one ends."""
        now, guesses, following = self._choosing, self._guesses, self._next.get(layer, layer)
        if now is None or guesses is None or following == layer:
            return None
        found = guesses.likely.recall(following, now.requests, now.blocks)
        if found is None:
            return None
        return _kernels.GuessedPages(following, found.rows, found.pages, found.begin)

    def table_rows(
        self, takes: Callable[[Selector], bool], position: Mapping[int, int]
    ) -> dict[int, TableRow] | None:
        """Rows that choose, for a device's tables, by their numbers in the step, whose tokens are
        at these positions; None where a selector is not one that a device ``takes``, or somebody
        has to see what rows choose. Rows that are lost have no context."""
        contexts, found = self.contexts, dict[int, TableRow]()
        seen = self._kept is not None or self._deviation is not None or self._offload is not None
        if seen or not contexts.read_in_dram:
            return None
        if not all(map(takes, self._selectors)):
            return None
        records = contexts.page_records(0)
        nothing = records[:0]
        for place, row in enumerate(contexts.rows.tolist()):
            if row in contexts.poisoned:
                first = int(contexts.end[place] - contexts.begin[place])
                found[row] = TableRow(first, nothing, nothing, 0, 0)
                continue
            blocks = slice(int(contexts.begin[place]), int(contexts.end[place]))
            begin = np.zeros(1, dtype=np.int32)
            count = np.array([blocks.stop - blocks.start], dtype=np.int32)
            window = position[row] + 1 - count * self._layout.block_tokens
            sizes = ContextSummaries(self._layout, begin, count, window.astype(np.int32))
            selector = self._of_rows[place]
            least, most, scores = selector_limits(selector, sizes)
            found[row] = TableRow(
                int(count[0]),
                contexts.frame_address[blocks],
                records[blocks] if scores else nothing,
                least,
                most,
            )
        return found

    def count_listed(self, chosen: int, short: int, read: int) -> None:
        """Count the pages that a device has chosen in this step's layers, its lists that have less
        mass than was wanted, and the pages that it has ``read`` for all rows, also those that take
        all of theirs: nobody knows for whom it lacked some. The mass that they miss stays with the
        device."""
        lists, counts = self._layout.kv_heads * len(self._next), self.counts
        rows, blocks = len(self.contexts.rows), len(self.contexts.slots)
        counts.lists += lists * rows
        counts.selected += chosen
        counts.short += short
        counts.tokens += chosen * self._layout.page_tokens
        counts.context += lists * blocks * self._layout.groups
        self.contexts.fetched.frame += read

    def choosing_rows(self, batch: RowBatch, query: torch.Tensor) -> _kernels.ChoosingRows | None:
        """The rows that choose, as native code takes them; None: all are lost. ``query`` [T, Hq, D]
        of any layer."""
        now, contexts, self.behind = self._now(batch, query.device), self.contexts, None
        if not len(now.alive):
            return None
        contexts.settle_reads()
        groups, self._groups, estimating = [], [], []
        for selector, which in zip(self._selectors, now.alike, strict=True):
            if not len(which):
                continue
            sizes = self._sizes(now, which)
            summaries = ContextSummaries(
                self._layout, sizes.row_begin, sizes.row_end, sizes.window_tokens, known_sizes=sizes
            )
            asking = functools.partial(now.some, query, which)
            choice = native_choice(selector, summaries, contexts, asking)
            places = which.astype(np.int32)
            groups.append(_kernels.ChoosingGroup(sizes.bound, places, choice))
            self._groups.append((which, selector, sizes))
            if isinstance(choice, _kernels.ScoredPages) and choice.estimates:
                estimating.append(which)
        means = self._find_means(now, np.concatenate(estimating)) if estimating else None
        return _kernels.ChoosingRows(
            self._sizes(now).bound,
            now.rows,
            now.token,
            now.position,
            contexts.frame_address,
            contexts.shared_slots,
            groups,
            contexts.tables,
            contexts.slots,
            None if means is None else self._means.sums,
            means,
        )

    def _find_means(self, now: _Choosing, which: NDArray[np.int64]) -> NDArray[np.int64]:
        """Place of the sums of V of each row that chooses, -1 but for ``which`` of them."""
        rows = self._mean_rows(now, which)
        self.behind = (which, rows) if self._means.behind(rows, list(self._next)) else None
        places = np.full(len(now.alive), -1, dtype=np.int64)
        places[which] = rows.places
        return places

    def begin_means(self, layer: int, batch: RowBatch, cache: torch.Tensor) -> None:
        """Put mean V together that native code needs in a layer, as far as it is not known: where
        requests begin to be decoded."""
        now = self._choosing
        if self.behind is not None and now is not None and layer in self._next:
            kernels = select_page_kernels(cache.device)
            self._begin_means(kernels, layer, now, *self.behind, batch, cache)

    @property
    def remembers(self) -> bool:
        """Check whether anybody asks later what native code has chosen."""
        return self._guesses is not None

    def remember(self, layer: int, lists: _kernels.ChosenLists, at: float) -> None:
        """The rows of this step have chosen pages of a layer, and none had to be read: they were
        looked up by the monotonic time ``at``."""
        now, guesses, chosen = self._choosing, self._guesses, lists.of(layer)
        if now is not None and guesses is not None and chosen is not None:
            guesses.likely.remember(layer, now.requests, now.blocks, *chosen)
            self.contexts.pass_over(at)
            guesses.counts.count(layer, now.requests, now.blocks, *chosen)

    def remember_step(self, lists: _kernels.ChosenLists) -> None:
        """The rows of this step have chosen pages of all layers, which were in frames."""
        now, guesses = self._choosing, self._guesses
        if now is not None and guesses is not None:
            guesses.likely.remember_step(now.requests, now.blocks, lists)

    def bring(self, layer: int, plan: _kernels.StepPlan, clock: AttentionClock) -> None:
        """Bring what a layer that has stopped needs, and have it go on."""
        now = self._choosing
        if now is None:
            raise RuntimeError("nobody chooses")
        heads, self._parts = self._layout.kv_heads, []
        for group, made in zip(self._groups, plan.choices(), strict=True):
            self._parts.append((group[0], selection_of(group[1], group[2], made, heads)))
        selection = concat(self._parts, heads, self._layout.page_tokens)
        wanted, starts = self._locate(layer, now.alive, selection.pages, selection.begin)
        asked = plan.asked()
        pages = ChosenPages(
            self,
            layer,
            now,
            selection,
            wanted,
            starts,
            self._layout,
            None if asked is None else Asked(*asked),
        )

        def attend(some: PageList) -> None:
            plan.resume(*some.on_host(), clock)

        pages.by_turns(attend, clock)

    def count_native(self, totals: _kernels.ChoiceTotals) -> None:
        """Count what the layers of the step chose."""
        counts = self.counts
        counts.lists += totals.lists
        counts.selected += totals.selected
        counts.tokens += totals.tokens
        counts.channel_bytes += totals.channel_bytes
        counts.context += totals.context
        counts.missing += totals.missing
        counts.short += totals.unmet
        self.contexts.fetched.frame += totals.framed
        self.contexts.fetched.cache += totals.held

    # ---- one layer ----

    def _now(self, batch: RowBatch, device: torch.device) -> _Choosing:
        """The rows of this step that choose, as far as nothing they need was lost."""
        alive = self.contexts.alive()
        if self._choosing is not None and len(alive) == len(self._choosing.alive):
            return self._choosing
        before = self._before
        if before is not None and len(before.alive) == len(alive) and before.is_of(batch):
            self._choosing = before.at(batch)
        else:
            place = np.full(int(batch.stream_row.max()) + 1, -1, dtype=np.int64)
            place[batch.stream_row] = np.arange(len(batch.stream_row))
            numbers = self.contexts.rows[alive]
            rows = place[numbers]
            token = batch.query_begin[rows]
            begin, end = self.contexts.begin[alive], self.contexts.end[alive]
            number_of = self._selectors.index
            by = np.array([number_of(self._of_rows[place]) for place in alive.tolist()], np.int64)
            self._choosing = _Choosing(
                (batch.tokens, batch.query_begin, batch.stream_row),
                alive,
                rows,
                token,
                torch.from_numpy(token.astype(np.int64)).to(device),
                np.array_equal(token, np.arange(batch.tokens)),
                batch.first_position[rows],
                [self._requests[row] for row in numbers.tolist()],
                begin,
                end,
                end.astype(np.int64) - begin,
                by,
                [np.flatnonzero(by == number) for number in range(len(self._selectors))],
            )
        return self._choosing

    def lists(
        self,
        alive: NDArray[np.int64],
        edges: NDArray[np.int32],
        part: slice | NDArray[np.int64],
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Begin and end of all lists of a selection in this part of its pages."""
        begin, end = edges[:-1], edges[1:]
        if not isinstance(part, slice):
            begin = np.searchsorted(part, begin).astype(np.int32)
            end = np.searchsorted(part, end).astype(np.int32)
        still = self.contexts.alive()
        if len(still) < len(alive):
            # A row that lacks a page is lost, and its pages must not be looked at.
            here = np.repeat(np.isin(alive, still), self._layout.kv_heads)
            begin, end = np.where(here, begin, 0), np.where(here, end, 0)
        return begin.astype(np.int32, copy=False), end.astype(np.int32, copy=False)

    def _select(
        self,
        clock: StepClock,
        layer: int,
        now: _Choosing,
        batch: RowBatch,
        cache: torch.Tensor,
        query: torch.Tensor,
        scale: float,
        seen: torch.Tensor,
    ) -> Selection:
        """Choose the pages of each row: by its own selector, now or for a token before."""
        alive = now.alive

        def choose(those: NDArray[np.int64]) -> Selection:
            parts = []
            for number, selector in enumerate(self._selectors):
                place = np.flatnonzero(now.by[those] == number)
                if len(place):
                    which = those[place]
                    summaries = self._summaries(
                        selector.needs, clock, layer, now, which, batch, cache
                    )
                    some = len(which) < len(alive)
                    by = query[which] if some else query
                    window = seen[which] if some else seen
                    if selector.needs.clusters and self._clusters is not None:
                        names = [now.requests[i] for i in which.tolist()]
                        chosen = self._clusters.select(
                            selector, layer, names, by, summaries, scale, window
                        )
                    else:
                        chosen = selector.select(by, summaries, scale, window)
                    self._count_channels(selector.needs, summaries)
                    if chosen.wanted:
                        self.counts.short += int(np.count_nonzero(chosen.mass < chosen.wanted))
                    parts.append((place, chosen))
            self._parts = parts if len(those) == len(alive) else []
            return concat(parts, self._layout.kv_heads, self._layout.page_tokens)

        self._parts = []
        sizes = self._sizes(now)
        if self._kept is None:
            selection = choose(np.arange(len(alive)))
        else:
            left = np.empty(len(alive), dtype=np.int64)
            for selector, mine in zip(self._selectors, now.alike, strict=True):
                window = sizes.window_tokens[mine].astype(np.int64)
                left[mine] = selector.budget.context_tokens(sizes.context_tokens[mine], window)
            selection, kept = self._kept.select(
                layer,
                now.requests,
                RowSizes(now.position, sizes.pages, left),
                query,
                choose,
            )
            self.counts.kept += kept * self._layout.kv_heads
        self._count(selection, sizes.all_pages)
        return selection

    def _mean_value(
        self,
        kernels: PageKernels,
        layer: int,
        now: _Choosing,
        mixed: NDArray[np.int64],
        batch: RowBatch,
        cache: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Mean V of the rows ``mixed`` of those that choose, whose newest V ``value`` has."""
        key = mixed.tobytes()
        if key not in now.means:
            now.means[key] = self._mean_rows(now, mixed)
        rows = now.means[key]
        self._begin_means(kernels, layer, now, mixed, rows, batch, cache)
        if len(mixed) < len(now.alive):
            value = value[torch.from_numpy(mixed).to(value.device)]
        return self._means.add(layer, rows, value)

    def _mean_rows(self, now: _Choosing, which: NDArray[np.int64]) -> MeanRows:
        requests = [now.requests[i] for i in which.tolist()]
        return self._means.rows(requests, now.position[which])

    def _begin_means(
        self,
        kernels: PageKernels,
        layer: int,
        now: _Choosing,
        which: NDArray[np.int64],
        rows: MeanRows,
        batch: RowBatch,
        cache: torch.Tensor,
    ) -> None:
        """Put mean V of the rows ``which`` of those that choose together, as far as it is not
        known."""

        def window(i: int) -> NDArray[np.int64]:
            begin, end = _windows(batch, now.rows[which[i : i + 1]])
            return batch.window_ids[begin[0] : end[0]]

        def context(i: int) -> NDArray[np.float32]:
            return self.contexts.values(layer, int(now.alive[which[i]]), self._layout.head_size)

        self._means.begin(kernels, layer, rows, cache, window, context)

    def _summaries(
        self,
        needs: Needs,
        clock: StepClock,
        layer: int,
        now: _Choosing,
        which: NDArray[np.int64],
        batch: RowBatch,
        cache: torch.Tensor,
    ) -> ContextSummaries:
        sizes = self._sizes(now, which)
        begin, end, window = sizes.row_begin, sizes.row_end, sizes.window_tokens
        ahead = 0 if self._kept is None else self._kept.steps - 1
        if not needs.channels:
            reads = needs.bounds or needs.spread or needs.codes
            held = self.contexts.page_records(layer) if reads else None
            return ContextSummaries(
                self._layout,
                begin,
                end,
                window,
                held if needs.bounds else None,
                held if needs.spread else None,
                held if needs.codes else None,
                ahead=ahead,
                known_sizes=sizes,
            )
        blocks = batch.window_ids * (cache.stride(0) * cache.itemsize) + cache.data_ptr()
        low, high = _windows(batch, now.rows[which])

        def zeros(nbytes: int) -> NDArray[np.uint8]:
            made: NDArray[np.uint8] = torch.zeros(
                nbytes, dtype=torch.uint8, pin_memory=cache.is_cuda
            ).numpy()
            return made

        def bring(channels: NDArray[np.int32]) -> NDArray[np.uint64]:
            clock.lap(SELECT)
            found = self._channels.bring(layer, now.alive[which], channels, zeros)
            clock.lap(WAIT)
            return found

        in_memory = self.contexts.holds_channels
        return ContextSummaries(
            self._layout,
            begin,
            end,
            window,
            channel_base=self.contexts.channels(layer) if in_memory else None,
            window_base=blocks.astype(np.uint64),
            window_begin=low,
            window_end=high,
            channel_source=None if in_memory else bring,
            ahead=ahead,
            known_sizes=sizes,
        )

    def _sizes(self, now: _Choosing, which: NDArray[np.int64] | None = None) -> ContextSizes:
        """Sizes of these rows of those that choose, or of all, worked out once per step."""
        key = b"" if which is None or len(which) == len(now.alive) else which.tobytes()
        if key not in now.sizes:
            begin, end, blocks, position = now.begin, now.end, now.blocks, now.position
            if which is not None and key:
                begin, end, blocks, position = (
                    begin[which],
                    end[which],
                    blocks[which],
                    position[which],
                )
            window = (position + 1 - blocks * self._layout.block_tokens).astype(np.int32)
            now.sizes[key] = ContextSizes(self._layout, begin, end, window)
        return now.sizes[key]

    def _locate(
        self,
        layer: int,
        rows: NDArray[np.int64],
        pages: NDArray[np.int32],
        begin: NDArray[np.int32],
    ) -> tuple[BlockPages, NDArray[np.int64]]:
        return self.contexts.locate(layer, rows, pages, begin, self._layout.page_tokens)

    def read_ahead(self, layer: int, now: _Choosing, selection: Selection, *, reads: bool) -> None:
        """Start to read what the next layer will probably choose, and what it may choose as far as
        devices are idle; after the last one, what the first will in the next step. ``reads``: this
        layer had to read; where DRAM has what is chosen, looking further is work for nothing."""
        if self._guesses is None:
            return
        following = self._next[layer]

        def prefetch(memory: SelectionHistory, latest: Selection, *, idle: bool) -> None:
            memory.remember(layer, now.requests, now.blocks, latest.pages, latest.begin)
            if self.contexts.in_frames:
                return
            found = memory.recall(following, now.requests, now.blocks)
            if found is not None:
                ahead, _ = self._locate(following, now.alive[found.rows], found.pages, found.begin)
                self.contexts.prefetch(ahead, found.begin, idle=idle)

        prefetch(self._guesses.likely, selection, idle=False)
        if self.contexts.in_frames:
            return
        heads = self._layout.kv_heads
        counted = self._guesses.counts.count(
            layer, now.requests, now.blocks, selection.pages, selection.begin
        )
        if reads and self._parts:
            parts = [
                (rows, next_best(part, counted.rows(rows, heads))) for rows, part in self._parts
            ]
            behind = concat(parts, heads, self._layout.page_tokens)
            prefetch(self._guesses.possible, behind, idle=True)

    def _count(self, selection: Selection, pages: int) -> None:
        """``pages``: of the rows' contexts, for one KV head."""
        counts, mask = self.counts, selection.token_mask
        missing, tokens = _kernels.count_choice(selection.mass, mask)
        counts.lists += len(selection.begin) - 1
        counts.selected += len(selection.pages)
        counts.tokens += len(selection.pages) * self._layout.page_tokens if mask is None else tokens
        counts.context += pages * self._layout.kv_heads
        counts.missing += missing

    def _count_channels(self, needs: Needs, summaries: ContextSummaries) -> None:
        layout = self._layout
        channels = min(needs.channels, layout.head_size)
        size = channels * layout.kv_heads * layout.dtype.itemsize
        self.counts.channel_bytes += summaries.sizes.all_pages * layout.page_tokens * size


class ChosenPages:
    """Chosen pages of one layer, which whoever attends to them fetches. See ``ContextPages``.

    One thread at a time: it uses contexts, prefetcher and counts within its lease only.

    Attributes:
        contexts: Of the rows that choose.
        layer: From 0.
        wanted: The pages, row after row and KV head after KV head.
    """

    def __init__(
        self,
        decode: SparseDecode,
        layer: int,
        now: _Choosing,
        selection: Selection,
        wanted: BlockPages,
        starts: NDArray[np.int64],
        layout: BlockLayout,
        asked: Asked | None = None,
    ):
        """``wanted``: all pages of the ``selection``, by the rows of ``now``; ``starts``: position
        of the first token of each; ``asked``: what has been taken for them already."""
        self._decode, self.contexts = decode, decode.contexts
        self.layer, self._now, self._selection = layer, now, selection
        self.wanted, self._starts, self._layout = wanted, starts, layout
        self._asked = asked
        self._fetch: Fetch | GpuFetch | None = None
        self._looked_ahead = False

    @property
    def slots(self) -> NDArray[np.int64]:
        """Slots of the pages."""
        return self.wanted.pages.slots

    @property
    def nbytes(self) -> int:
        """Bytes of K and V in them."""
        return len(self.wanted.pages) * self._layout.page_payload_bytes

    @property
    def selection_bytes(self) -> int:
        """Bytes of a bit per KV head and page of the contexts."""
        pages = int(self._now.blocks.sum()) * self._layout.groups
        return -(-pages * self._layout.kv_heads // 8)

    @property
    def rows(self) -> NDArray[np.int64]:
        """Rows that choose, by their positions in :attr:`contexts`, ascending, [R]."""
        return self._now.alive

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Query token of each of these, [R]."""
        return self._now.token

    @property
    def layer_pages(self) -> int:
        """Pages of a layer of a block."""
        return self._layout.kv_heads * self._layout.groups

    @property
    def token_mask(self) -> NDArray[np.uint8] | None:
        """Tokens of each page to attend to, [P, page_tokens]; None: all."""
        return self._selection.token_mask

    def some(self, which: NDArray[np.int64]) -> ChosenPages:
        """Some of the pages, by ascending position."""
        whole = self._selection
        part = dataclasses.replace(
            whole,
            pages=whole.pages[which],
            begin=np.searchsorted(which, whole.begin).astype(np.int32),
            token_mask=None if whole.token_mask is None else whole.token_mask[which],
        )
        return ChosenPages(
            self._decode,
            self.layer,
            self._now,
            part,
            self.wanted.part(which),
            self._starts[which],
            self._layout,
        )

    def fold(
        self,
        kernels: PageAttention,
        query: torch.Tensor,
        state: PartialState,
        scale: float,
        clock: StepClock,
        lease: AbstractContextManager[None] = NO_LEASE,
    ) -> None:
        """Fetch the pages and fold them into ``state``; blocks until they have arrived. Begins
        anew when it is called again."""

        def attend(listed: PageList) -> None:
            kernels.attend_pages(query, state, listed, self._layout, scale)
            wait_for(query.device)  # what is released may be written to

        self.by_turns(attend, clock, lease)

    def by_turns(
        self,
        attend: Callable[[PageList], None],
        clock: StepClock,
        lease: AbstractContextManager[None] = NO_LEASE,
    ) -> None:
        """Fetch the pages, as many at a time as there is room for, and have them attended to."""
        with lease:
            self._end_fetch()
            turns = [slice(None)] if self._asked is not None else self._turns()
        for left, part in zip(reversed(range(len(turns))), turns, strict=True):
            try:
                with lease:
                    listed = self._bring(part, clock, last=left == 0)
                attend(listed)
                clock.lap(ATTEND)
            finally:
                with lease:
                    self._end_fetch()
            clock.lap(FETCH)

    def fold_by(
        self,
        kernels: ContextKernels,
        query: torch.Tensor,
        state: PartialState,
        scale: float,
        clock: StepClock,
        lease: AbstractContextManager[None],
    ) -> None:
        """See :meth:`Foldable.fold_by`."""
        self.fold(kernels.paged, query, state, scale, clock, lease)

    def restart(self) -> None:
        """See :meth:`Foldable.restart`: each call begins anew."""

    def _turns(self) -> list[slice | NDArray[np.int64]]:
        return self.contexts.turns(self.wanted.pages, self._selection.begin, SPLIT_PAGES)

    def _bring(self, part: slice | NDArray[np.int64], clock: StepClock, *, last: bool) -> PageList:
        """Bring a part of the pages into memory, where they stay until :meth:`_end_fetch`."""
        contexts, selection = self.contexts, self._selection
        asked, self._asked = self._asked, None
        fetch = self._fetch = contexts.fetch_hot(self.wanted.part(part), asked)
        clock.lap(FETCH)
        if last and not self._looked_ahead:
            self._looked_ahead = True
            reads = fetch.from_ssd > 0
            self._decode.read_ahead(self.layer, self._now, selection, reads=reads)
        clock.lap(AHEAD)
        contexts.wait_for_io(fetch)
        clock.lap(WAIT)
        contexts.complete(fetch, self.wanted.blocks[part])
        clock.lap(FETCH)
        begin, end = self._decode.lists(self._now.alive, selection.begin, part)
        return PageList(
            self._now.token,
            self._now.position,
            begin,
            end,
            fetch.address,
            self._starts[part],
            None if selection.token_mask is None else selection.token_mask[part],
        )

    def _end_fetch(self) -> None:
        """Give back the pages of the latest turn, whoever brought them."""
        if self._fetch is not None:
            ended, self._fetch = self._fetch, None
            self.contexts.release(ended)


def _windows(
    batch: RowBatch, rows: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Begin and end of these rows' windows in ``batch.window_ids``."""
    window = batch.window
    return on_host(window.block_begin, np.int32)[rows], on_host(window.block_end, np.int32)[rows]
