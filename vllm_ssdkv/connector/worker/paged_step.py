"""One step of page mode on one rank: which rows there are and where their context comes from.

Built when the scheduler's plan arrives, before the forward pass, so that the first reads are under
way while the first layer computes. The attention backend uses it layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.attention.decode_plan import DecodePlan
from vllm_ssdkv.attention.exact import NO_CONTEXT, LayerContext, RowBatch, StreamedContext
from vllm_ssdkv.attention.sparse import SparseDecode
from vllm_ssdkv.attention.sparse_deviation import SparseDeviation
from vllm_ssdkv.base.errors import StepError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.connector.kv_layout import KVLayout, block_layout
from vllm_ssdkv.connector.messages import Row, SlotArray
from vllm_ssdkv.connector.worker.selector_registry import SelectorRegistry
from vllm_ssdkv.connector.worker.step_keys import CHOICE_KEYS, STEP_KEYS
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout, PartialState
from vllm_ssdkv.kernels.operands.step_tables import TableRow
from vllm_ssdkv.kernels.paged import select_page_kernels
from vllm_ssdkv.kernels.step_clock import AttentionClock, StepClock
from vllm_ssdkv.offload.offloader import Offloader
from vllm_ssdkv.offload.protocol import ContextWork, Foldable
from vllm_ssdkv.offload.xcache.x_cache import XCache
from vllm_ssdkv.sparse.context_clusters import ContextClusters
from vllm_ssdkv.sparse.prefetch import Prefetcher
from vllm_ssdkv.sparse.protocol import Selector
from vllm_ssdkv.store.context_store import ContextStore
from vllm_ssdkv.store.read.context_frames import NO_SLOTS
from vllm_ssdkv.store.read.context_stream import ContextStream

OFFLOADED_TOKENS: Final = 16
"""Query tokens of each row, at most, in a step whose contexts a device attends to. More are parts
of prompts: bound by arithmetic, which the accelerator is better at."""


class PagedStep:
    """Rows of one step. Used by the thread that runs the forward pass only."""

    def __init__(
        self,
        store: ContextStore,
        layout: KVLayout,
        rows: Sequence[Row],
        poisoned: set[str],
        context_layers: Sequence[int],
        choices: SelectorRegistry | None = None,
        guesses: Prefetcher | None = None,
        deviation: SparseDeviation | None = None,
        offloader: Offloader | None = None,
        x_cache: XCache | None = None,
    ):
        """``poisoned`` are requests that wait to be computed again: they get no context.
        ``context_layers``, ascending, attend to contexts; the others to HBM's window alone. Without
        ``choices`` all rows attend to everything; with a ``deviation`` what those that choose get
        is compared with that. Without ``guesses``, which outlive the step, no page is read ahead.
        An ``offloader`` has its device attend to contexts, where all rows are short. Contexts that
        are X need the ``x_cache``.
        Blocks while summaries are read, if any are."""
        self._rows = tuple(rows)
        self._requests = [row.request_id for row in self._rows]
        self._by_block = {row.write_block: i for i, row in enumerate(self._rows)}
        self.layers = {name: i for i, name in enumerate(layout.layer_names)}
        self._geometry = layout.geometry
        self._token_bytes = 2 * layout.head_size * layout.dtype.itemsize
        self.clock: StepClock = AttentionClock()
        before = [row.hbm_start if context_layers else 0 for row in self._rows]
        contexts = store.contexts(self._requests, before)
        self._hopeless: set[int] = set()
        for i, row in enumerate(self._rows):
            if row.request_id in poisoned or len(contexts[i]) < before[i]:
                self._hopeless.add(i)
                contexts[i] = NO_SLOTS
        self._offloader = offloader
        tokens = [row.tokens for row in self._rows]
        self._near = None
        """Offloader that attends to the contexts of this step; None: the step's thread does."""
        if offloader is not None and max(tokens) <= OFFLOADED_TOKENS:
            self._near = offloader if offloader.takes(sum(tokens)) else None
        elsewhere = self._near is not None and self._near.caps.elsewhere
        if elsewhere:
            guesses = None
        self._lost = False
        """True if a device holds the step's contexts, and does not give them back."""
        self._decode: SparseDecode | None = None
        self.left_out = 0
        """Rows that would choose, if DRAM had room for their summaries."""
        selectors = {} if choices is None else choices.of_rows(self._rows, contexts)
        choosing = list(selectors)
        self._later = [] if choices is None else choices.later(self._rows)
        if choices is not None and choosing:
            chosen = store.choose(contexts, choosing)
            self.left_out = len(chosen.left_out)
            choosing = chosen.rows.tolist()
            self._decode = SparseDecode(
                selectors,
                chosen,
                block_layout(layout, choices.page_tokens),
                context_layers[choices.dense_layers :],
                choices.means,
                self._requests,
                None if deviation is None else deviation.of_step(),
                guesses,
                choices.kept,
                choices.clusters,
                None if self._near is None else self._attend_chosen,
                choices.latest,
            )
            choices.latest = self._decode
        self._clusters = None if choices is None else choices.clusters
        self._clustered: set[int] = (
            set() if choices is None else choices.clustered(self._rows, self._later)
        )
        dense_layers = 0 if choices is None else choices.dense_layers
        self._store, self._choosing, self._contexts = store, choosing, contexts
        self._x_cache = x_cache
        self._x_stream: ContextStream | None = None
        as_x = [row.as_x for row in self._rows]
        if any(as_x):
            theirs = [c if x else NO_SLOTS for c, x in zip(contexts, as_x, strict=True)]
            self._x_stream = store.stream_x(theirs, context_layers)
            contexts = [NO_SLOTS if x else c for c, x in zip(contexts, as_x, strict=True)]
        self.plans: dict[int, tuple[RowBatch, DecodePlan | None]] = {}
        """Batches that :meth:`plan` has planned for, by their identity, with their plans."""
        peer = None if self._near is None else self._near.device.peer
        self._stream = store.stream(
            contexts,
            choosing,
            dense_layers,
            context_layers,
            peer,
            elsewhere=elsewhere,
        )
        walks = (self._stream, self._x_stream)
        self._streams = [stream for stream in walks if stream is not None]
        """Walks over contexts: over K and V, and over X."""

    def rows_of(
        self, write_blocks: Sequence[int], first: Sequence[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Index of each of the batch's rows, and of its first block that is read from HBM, [R].

        Args:
            write_blocks: HBM block that each one's first query token is written to.
            first: Position of this token.

        Raises:
            StepError: the scheduler's plan has no such row, or says another position.
        """
        index = [self._by_block.get(block, -1) for block in write_blocks]
        planned = [-1 if i < 0 else self._rows[i].first_position for i in index]
        if planned != first:
            raise StepError(
                f"vLLM computes tokens from the positions {first} on in the HBM blocks "
                f"{write_blocks}, and the step was planned for {planned}"
            )
        starts = [self._rows[i].hbm_start for i in index]
        return np.array(index, dtype=np.int64), np.array(starts, dtype=np.int64)

    def plan(
        self, batch: RowBatch, layout: BlockLayout, slot: BlockLayout, query: torch.Tensor
    ) -> DecodePlan | None:
        """Plan the step's layers for native code, and keep the plan in :attr:`plans`; None: they
        are attended to by :meth:`context` and :meth:`choosing`. Layers with caches of other sizes
        have another batch.

        Args:
            batch: Rows of the layer.
            layout: Of a block in HBM.
            slot: Of a block in a slot.
            query: [T, Hq, D].
        """
        plan = None
        # Else somebody has to see what happens between layers.
        if self._near is None and self._x_stream is None and not self._clustered:
            plan = DecodePlan.of(
                batch, layout, slot, self._geometry, self._stream, self._decode, query, self.clock
            )
        self.plans[id(batch)] = batch, plan
        return plan

    def context(self, layer_name: str, batch: RowBatch, layout: BlockLayout) -> LayerContext:
        """The layer's contexts. ``layout``: of a block of them."""
        layer = self.layers[layer_name]
        if self._lost:
            return NO_CONTEXT
        context = self._device_context(layer, batch, layout)
        if self._x_cache is None or self._x_stream is None or not self._x_stream.blocks(layer):
            return context
        return self._x_cache.context(context, self._x_stream, layer, batch)

    def _device_context(self, layer: int, batch: RowBatch, layout: BlockLayout) -> LayerContext:
        """Contexts that are K and V."""
        streamed = StreamedContext(self._stream, layer, batch, layout)
        if self._near is None or not self._stream.blocks(layer):
            return streamed
        return self._near.context(streamed, self._requests, self._lose)

    def _attend_chosen(
        self,
        work: ContextWork,
        state: PartialState,
        clock: StepClock,
        here: Callable[[Foldable], None],
    ) -> None:
        """Have the device attend to chosen pages, or ``here``."""
        if self._near is None:
            here(work.pages)
        elif not self._near.attend(work, state, here, clock):
            self._lose()

    def _lose(self) -> None:
        """A device does not give the step's contexts back: nobody else may use them."""
        self._lost = True

    def choosing(
        self,
        layer_name: str,
        query: torch.Tensor,
        value: torch.Tensor,
        batch: RowBatch,
        cache: torch.Tensor,
        scale: float,
    ) -> Callable[[PartialState], None] | None:
        """Folds the layer's chosen pages into a state that has seen the window; None: nobody
        chooses. ``value``: V of the same tokens, [T, Hkv, D]; the others as in ``attend_exact``."""
        decode, layer = self._decode, self.layers[layer_name]
        if self._clusters is not None and self._clustered:
            self._note_prompts(self._clusters, layer, query, batch)
        if decode is None or self._lost:
            return None

        def fold(state: PartialState) -> None:
            kernels = select_page_kernels(query.device)
            decode.attend(kernels, self.clock, layer, query, value, state, batch, cache, scale)

        return fold

    def _note_prompts(
        self, clusters: ContextClusters, layer: int, query: torch.Tensor, batch: RowBatch
    ) -> None:
        """Keep the queries of prompts whose requests will choose by clusters."""
        for place, row in enumerate(batch.stream_row.tolist()):
            if row in self._clustered:
                part = slice(begin := int(batch.query_begin[place]), begin + self._rows[row].tokens)
                clusters.note_prompt(layer, self._rows[row].request_id, query[part])

    def poisoned_rows(self) -> list[Row]:
        """Rows whose output must be thrown away."""
        poisoned = self._hopeless.union(*[stream.poisoned for stream in self._streams])
        if self._lost:
            poisoned |= {i for i, slots in enumerate(self._contexts) if len(slots)}
        if self._decode is not None:
            poisoned |= self._decode.contexts.poisoned
        return [self._rows[i] for i in sorted(poisoned)]

    @property
    def bad_slots(self) -> list[int]:
        """Slots with wrong bytes, or that are given up."""
        chosen = [] if self._decode is None else self._decode.contexts.bad
        return [*[slot for stream in self._streams for slot in stream.bad], *chosen]

    @property
    def unread_slots(self) -> list[int]:
        """Slots that could not be read, and may be later."""
        chosen = [] if self._decode is None else self._decode.contexts.unread
        return [*[slot for stream in self._streams for slot in stream.unread], *chosen]

    @property
    def x_requests(self) -> list[str | None]:
        """Request of each row of the plan that is stored as X; None: it is not."""
        return [row.request_id if row.as_x else None for row in self._rows]

    @property
    def decodes(self) -> bool:
        """Check whether there are contexts, and no part of a prompt is computed."""
        short = max(row.tokens for row in self._rows) <= OFFLOADED_TOKENS
        return short and any(map(len, self._contexts))

    @property
    def records_x(self) -> bool:
        """Check whether any row is stored as X."""
        return any(row.as_x for row in self._rows)

    def count(self, counters: Counters, *, on_device: bool = False) -> None:
        """Add what the step did to the worker's counters. Where a device attends,
        :meth:`count_listed` adds the choices."""
        plans = [plan for _, plan in self.plans.values() if plan is not None]
        for plan in plans:
            plan.end()
        in_dram = on_ssd = used = 0
        for stream in self._streams:
            in_dram += stream.pages_in_dram
            on_ssd += stream.pages_on_ssd
            used += stream.pages_used * self._geometry.payload_bytes
        streamed = (in_dram, on_ssd, in_dram + on_ssd > 0, used)
        gains = (*streamed, len(plans) > 0, self.left_out, *self.clock.seconds)
        counters.add_keyed(STEP_KEYS, gains)
        if self._decode is not None and not on_device:
            counters.add_keyed(CHOICE_KEYS, self._chosen(self._decode))
        if self._offloader is not None and any(map(len, self._contexts)):
            self._offloader.count_step()

    def _chosen(self, decode: SparseDecode) -> tuple[float, ...]:
        """Gains of :data:`CHOICE_KEYS`."""
        counts, contexts, page = decode.counts, decode.contexts, self._geometry.page_bytes
        token, channel = contexts.fetched, contexts.fetched_channels
        summary = contexts.fetched_summaries
        hot, frame, cache, ssd = token.hot, token.frame, token.cache, token.ssd
        in_dram = counts.channel_bytes if contexts.holds_channels else 0
        # Written out: every step does this, behind a model that has emptied the caches.
        return (
            counts.lists > 0,
            contexts.pages_used * self._geometry.payload_bytes,
            counts.lists,
            counts.kept,
            counts.selected,
            counts.context,
            counts.missing,
            counts.short,
            hot,
            frame,
            cache,
            ssd,
            token.ahead,
            token.hits,
            hot * page,
            frame * page,
            cache * page,
            ssd * page,
            0,
            channel.frame * page + in_dram,
            channel.cache * page,
            channel.ssd * page,
            0,
            summary.frame * page,
            summary.cache * page,
            summary.ssd * page,
            counts.tokens * self._token_bytes,
            counts.channel_bytes,
        )

    def streamed(self) -> tuple[list[Row], list[SlotArray]]:
        """Rows that attend to everything, now and later, and the slots of their contexts; none
        where no block was read from devices."""
        if not sum([stream.pages_on_ssd for stream in self._streams]):  # as in most steps
            return [], []
        lost = set().union(*(stream.poisoned for stream in self._streams))
        others = {*self._hopeless, *lost, *self._choosing, *self._later}
        which = [i for i in range(len(self._rows)) if i not in others]
        return [self._rows[i] for i in which], [self._contexts[i] for i in which]

    def give_back(self) -> None:
        """Give back what was borrowed. What a device does not give back stays as it is."""
        if self._x_stream is not None:
            self._x_stream.close()
        if not self._lost:
            self._stream.close()
            if self._decode is not None:
                self._decode.contexts.close()

    def rebalance(self) -> None:
        """Divide DRAM anew at the end of the step."""
        # With their blocks in HBM: nobody reads those, until they leave it.
        known = self._store.whole_contexts(self._requests)
        self._store.rebalance_dram(known, self._choosing, self._later)

    def table_rows(self, pages: Callable[[Selector], bool]) -> dict[int, TableRow] | None:
        """Rows for a device's tables, by the HBM block that each one's token is written to; None:
        a row has more than one token, or chooses by a selector that ``pages`` does not take, or
        somebody has to see what happens between layers.

        A row that is lost already has no context there.
        """
        decode, found = self._decode, dict[int, TableRow]()
        if self._near is not None or self._x_stream is not None or self._clustered:
            return None
        if any(row.tokens != 1 for row in self._rows):
            return None
        positions = {i: row.first_position for i, row in enumerate(self._rows)}
        choosing = {} if decode is None else decode.table_rows(pages, positions)
        if choosing is None:
            return None
        held = self._stream.frames
        nothing = np.zeros(0, dtype=np.uint64)
        for i, row in enumerate(self._rows):
            frames = held.address[held.begin[i] : held.end[i]]
            every = len(frames) * self._geometry.groups
            exact = TableRow(row.hbm_start, frames, nothing, every, every)
            found[row.write_block] = choosing.get(i, exact)
        return found

    def slots_of_rows(self) -> list[SlotArray]:
        """Slots of the blocks of each of :meth:`table_rows`."""
        return self._contexts

    def longest_window(self, block_tokens: int) -> int:
        """Blocks of so many tokens that a row has in HBM, with those of its new tokens, at most."""
        ends = [row.first_position + row.tokens for row in self._rows]
        starts = [row.hbm_start for row in self._rows]
        return max(-(-end // block_tokens) - i for end, i in zip(ends, starts, strict=True))

    def count_listed(
        self, counters: Counters, blocks: Sequence[int], chosen: Sequence[int], short: Sequence[int]
    ) -> None:
        """Add what a device chose for the rows of :meth:`table_rows` to the worker's counters.

        Args:
            counters: See above.
            blocks: HBM block by which each row is known.
            chosen: Pages that each row chose, in all layers.
            short: Lists of each row that the budget ended before they had the mass wanted.
        """
        if self._decode is None:
            return
        place = {block: i for i, block in enumerate(blocks)}
        mine = [place[self._rows[i].write_block] for i in self._choosing]
        self._decode.count_listed(
            sum(chosen[i] for i in mine),
            sum(short[i] for i in mine),
            sum(chosen[: len(blocks)]),
        )
        counters.add_keyed(CHOICE_KEYS, self._chosen(self._decode))

    def count_misses(self, served: _io.Served) -> None:
        """Note where pages came from that a device has asked for. :meth:`count_listed` takes all
        for pages of frames."""
        if self._decode is not None:
            self._decode.contexts.note_misses(served.held, served.read, served.lost)

    def lose(self, blocks: Sequence[int]) -> None:
        """A device could not attend to the whole contexts of rows, by the HBM blocks that their
        tokens are written to."""
        self._hopeless.update(self._by_block[block] for block in blocks)
