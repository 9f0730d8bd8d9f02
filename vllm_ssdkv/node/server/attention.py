"""Attention on a node: queries come, partial states go, pages stay.

One connection of a worker's volume session, served by its thread. The engine tells where blocks lie
and which are a row's context; a call names a layer and rows, and sends queries. See
``docs/internals/offload.md``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _kernels
from vllm_ssdkv.base.errors import ProtocolError, SSDKVError
from vllm_ssdkv.base.metrics import Counters, counter_key
from vllm_ssdkv.config.node import NodeConfig
from vllm_ssdkv.node.protocol.channel import Channel, Frame
from vllm_ssdkv.node.protocol.messages import (
    MAX_STATES,
    Attend,
    Attended,
    AttendRoom,
    AttendShape,
    Forget,
    TellBlocks,
    TellRow,
    pack,
    unpack,
)
from vllm_ssdkv.node.server.attention_bounds import AttendBounds, BoundedCache, ToldRows, cut
from vllm_ssdkv.node.server.attention_pages import Fetch, NodePages, ToldBlocks
from vllm_ssdkv.node.server.openmp import team_threads
from vllm_ssdkv.node.server.volumes import VolumeSet
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

_ATTENDED: Final = (counter_key("node_bytes", direction="attended"),)

_FAR: Final = 1 << 40
"""Position of queries: contexts are before them as a whole."""

_ITEM_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(slots=True, eq=False)
class _Turn:
    """Pages that are in memory at once, and the lists of them. Entries are pages of rows.

    Attributes:
        blocks, numbers: Number of each entry's block, and of the page in it, int64 [E]; in the
            order of the lists.
        begin, end: Range of each row and KV head in the entries, int32.
        masks: Tokens to attend to, uint8 [E, page_tokens]; None: all.
    """

    blocks: I64
    numbers: I64
    begin: I32
    end: I32
    masks: NDArray[np.uint8] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(a.nbytes for a in (self.blocks, self.numbers, self.begin, self.end))

    def only(self, which: NDArray[np.bool_]) -> tuple[I64, I32, I32]:
        """Some of the entries, and the ranges in these."""
        before = np.concatenate([[0], np.cumsum(which)]).astype(np.int32)
        return np.flatnonzero(which), before[self.begin], before[self.end]


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """Turns of whole contexts."""

    turns: list[_Turn]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, and of the objects themselves."""
        return 512 + sum(512 + turn.nbytes for turn in self.turns)


@dataclass(frozen=True, slots=True, eq=False)
class _Queries:
    """Queries of one call, and their states.

    Attributes:
        data: The queries, bytes.
        acc, m, total: States, float32 [T, Hq, D], [T, Hq] and [T, Hq].
    """

    data: NDArray[np.uint8]
    acc: NDArray[np.float32]
    m: NDArray[np.float32]
    total: NDArray[np.float32]

    @classmethod
    def of(
        cls, data: NDArray[np.uint8], count: int, heads: int, head_size: int
    ) -> tuple[_Queries, NDArray[np.float32]]:
        """Queries that have seen no key, and the one stretch of memory that has their states."""
        size = count * heads
        state = np.zeros(size * (head_size + 2), dtype=np.float32)
        acc, m, total = np.split(state, [size * head_size, size * (head_size + 1)])
        m[:] = -np.inf
        shaped = acc.reshape(count, heads, head_size), m.reshape(count, heads)
        return cls(data, *shaped, total.reshape(count, heads)), state

    def part(self, begin: int, end: int, query_bytes: int) -> _Queries:
        """Some that follow each other."""
        return _Queries(
            self.data[begin * query_bytes : end * query_bytes],
            self.acc[begin:end],
            self.m[begin:end],
            self.total[begin:end],
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Rows of a call that are worked on together.

    Attributes:
        layer: Of the call.
        rows: Their numbers, as the call has them.
        lists: Slots of the blocks of each.
        counts: Queries of each; None: one each.
        queries: Of these rows.
    """

    layer: int
    rows: I64
    lists: list[I64]
    counts: I64 | None
    queries: _Queries

    @property
    def key(self) -> tuple[int, bytes, bytes]:
        """Tells plans apart."""
        return (
            self.layer,
            self.rows.tobytes(),
            b"" if self.counts is None else self.counts.tobytes(),
        )

    def per_query(self, of_rows: I32) -> I32:
        """Values of rows and KV heads as values of queries and KV heads."""
        if self.counts is None:
            return of_rows
        return np.repeat(of_rows.reshape(len(self.rows), -1), self.counts, axis=0).ravel()

    def contexts(self) -> tuple[I64, I64]:
        """Row, by its place in the part, and slot of each block, both [m]."""
        lengths = [len(one) for one in self.lists]
        none = np.zeros(0, dtype=np.int64)
        return np.repeat(np.arange(len(self.lists)), lengths), np.concatenate([*self.lists, none])


class _Selection:
    """Bits of a call for the pages of its rows, taken row after row."""

    def __init__(self, selection: bytes, masks: bytes, page_tokens: int):
        """As the message has them."""
        self._bits, self._at = np.frombuffer(selection, dtype=np.uint8), 0
        self._masks, self._mask_at = np.frombuffer(masks, dtype=np.uint8), 0
        self._tokens = page_tokens

    def take(self, count: int) -> tuple[I64, NDArray[np.uint8] | None]:
        """Selected ones of the next ``count`` pages, and the masks of these."""
        which = np.flatnonzero(_bits(self._bits, self._at, count))
        self._at += count
        if not len(self._masks):
            return which, None
        count = len(which) * self._tokens
        masks = _bits(self._masks, self._mask_at, count).reshape(-1, self._tokens)
        self._mask_at += count
        return which, masks

    def check(self) -> None:
        """Check that all was taken.

        Raises:
            ProtocolError: the call has bits of other pages.
        """
        if len(self._bits) != -(-self._at // 8):
            raise ProtocolError("body", f"a selection of {self._at} pages is of another length")
        if len(self._masks) and len(self._masks) != -(-self._mask_at // 8):
            raise ProtocolError("body", "masks are not those of the selected pages")


class _Constants:
    """Arrays that are alike in all calls, made once: a small call costs little more than these.

    Attributes:
        numbers: 0, 1, 2, ... as int32.
        far: Positions behind all contexts.
        zeros: Of int64.
    """

    __slots__ = ("far", "numbers", "zeros")

    def __init__(self) -> None:
        self._make(0)

    def grow(self, length: int) -> None:
        """Have at least so many entries of each."""
        if length > len(self.zeros):
            self._make(2 * length)

    def _make(self, length: int) -> None:
        self.numbers = np.arange(length, dtype=np.int32)
        self.far = np.full(length, _FAR, dtype=np.int64)
        self.zeros = np.zeros(length, dtype=np.int64)


class NodeAttention:
    """Attends to pages of one worker's volumes. One thread at a time.

    Example:
        attention = NodeAttention(shape, volumes, nbytes=1 << 30, threads=8, deadline_s=5.0)
        attention.tell_blocks(message)
        answer = attention.attend(Attend(0, 0.1, pack([1]), query))
    """

    def __init__(
        self,
        shape: AttendShape,
        volumes: VolumeSet,
        *,
        nbytes: int,
        threads: int,
        deadline_s: float,
    ):
        """``nbytes`` of memory for pages; ``threads`` of a kernel; ``deadline_s`` of a read.

        Raises:
            ProtocolError: the shape is none that pages have, or too large for the memory.
            StoreError: there is not so much memory.
        """
        if shape.query_heads % shape.kv_heads:
            raise ProtocolError("body", f"{shape} has query heads of no KV head")
        self._shape, self._threads = shape, threads
        item = _ITEM_BYTES[shape.dtype]
        payload = 2 * shape.page_tokens * shape.head_size * item
        try:
            geometry = SlotGeometry("paged", shape.layers, shape.kv_heads, shape.groups, payload)
        except ValueError as error:
            raise ProtocolError("body", str(error)) from error
        self._geometry = geometry
        self._query_bytes = shape.query_heads * shape.head_size * item
        self._constants = _Constants()
        self._code = getattr(_kernels, shape.dtype.upper())
        # Pages are blocks of their own.
        self._page = _kernels.BlockShape(
            shape.page_tokens,
            shape.page_tokens,
            payload,
            shape.kv_heads,
            shape.head_size,
            self._code,
        )
        self.bounds = AttendBounds.of(geometry, shape.slots, shape.page_tokens, nbytes)
        self._told = ToldBlocks(geometry, shape.slots, self.bounds.blocks, volumes)
        nbytes = max(nbytes, 4 * geometry.layer_bytes)
        self._pages = NodePages(geometry, self._told, volumes, nbytes, deadline_s)
        turns = 1 + self.bounds.blocks * geometry.pages_per_layer // max(1, self._pages.room)
        self._row_entries = geometry.heads * (1 + turns // 25)
        """Entries that take as much memory as a row's lists in all turns."""
        self._rows = ToldRows(self.bounds)
        self._plans: BoundedCache[tuple[int, bytes, bytes], _Plan] = BoundedCache(
            self.bounds.plan_bytes
        )
        self._ahead: tuple[_Turn, Fetch] | None = None
        self._attend_s = 0.0
        self.nbytes = 0
        """Bytes of K and V that were attended to."""

    # ---- what is told ----

    def tell_blocks(self, message: TellBlocks) -> None:
        """See :class:`TellBlocks`.

        Raises:
            ProtocolError: it does not fit the shape.
        """
        slots, pages = unpack(message.slots), self._geometry.kv_pages
        if not len(message.places) == len(message.digests) == 8 * len(slots) * pages:
            raise ProtocolError("body", f"{len(slots)} blocks have not {pages} pages each")
        places = np.frombuffer(message.places, dtype="<i8").reshape(-1, pages)
        digests = np.frombuffer(message.digests, dtype="<u8").reshape(-1, pages)
        self._end_ahead()
        self._pages.forget(slots)
        self._told.put(slots, places, digests)
        self._plans.clear()

    def tell_row(self, message: TellRow) -> None:
        """See :class:`TellRow`.

        Raises:
            ProtocolError: see :meth:`ToldRows.tell`; or there are no such slots.
        """
        self._told.numbers(unpack(message.slots))
        self._rows.tell(message)
        self._plans.clear()

    def forget(self, message: Forget) -> None:
        """See :class:`Forget`."""
        slots = unpack(message.slots)
        self._end_ahead()
        self._pages.forget(slots)
        self._told.forget(slots)
        self._rows.forget(unpack(message.rows))
        self._plans.clear()

    # ---- attending ----

    def attend(self, message: Attend) -> Attended:
        """Answer to a call. Blocks for reads.

        Raises:
            ProtocolError: the call does not fit what was told.
        """
        shape, query = self._shape, np.frombuffer(message.query, dtype=np.uint8)
        count = len(query) // self._query_bytes
        if len(query) != count * self._query_bytes:
            raise ProtocolError("body", "queries of another shape came")
        if count * shape.query_heads * (shape.head_size + 2) * 4 > MAX_STATES:
            raise ProtocolError("body", f"{count} queries came at once")
        queries, state = _Queries.of(query, count, shape.query_heads, shape.head_size)
        if message.layer >= shape.layers or message.following >= shape.layers:
            raise ProtocolError("body", f"a layer of {shape.layers} is asked for")
        waited, attended = self._pages.wait_s, self._attend_s
        selection = None
        if message.selection:
            selection = _Selection(message.selection, message.masks, shape.page_tokens)
        missed: list[tuple[I64, I64]] = []
        parts = self._parts(message, queries)
        for number, part in enumerate(parts):
            turns = self._plan(part) if selection is None else self._chosen(part, selection)
            following = None
            if selection is None and message.following >= 0 and number + 1 == len(parts):
                following = self._first_turn(replace(parts[0], layer=message.following))
            self._attend_part(part, turns, following, message.scale, selection is None, missed)
            if missed:
                missed = [_distinct(missed, self._geometry.kv_pages)]
        if selection is not None:
            selection.check()
        slots, pages = _distinct(missed, self._geometry.kv_pages)
        return Attended(
            state.tobytes(),
            pack(slots),
            pack(pages),
            self._pages.wait_s - waited,
            self._attend_s - attended,
        )

    def _parts(self, message: Attend, queries: _Queries) -> list[_Part]:
        """Rows of a call, cut so that the lists of each part are bounded.

        Raises:
            ProtocolError: rows were not told, or queries are not theirs.
        """
        rows = unpack(message.rows)
        lists = self._rows.called(rows)
        counts = self._counts(message.counts, len(rows), len(queries.m))
        lengths = [len(one) * self._geometry.pages_per_layer + self._row_entries for one in lists]
        if sum(lengths) <= self.bounds.entries:
            return [_Part(message.layer, rows, lists, counts, queries)]
        begin = np.arange(len(rows) + 1)
        if counts is not None:
            begin = np.concatenate([[0], np.cumsum(counts)])
        return [
            _Part(
                message.layer,
                rows[first:last],
                lists[first:last],
                None if counts is None else counts[first:last],
                queries.part(int(begin[first]), int(begin[last]), self._query_bytes),
            )
            for first, last in cut(lengths, self.bounds.entries)
        ]

    def _first_turn(self, part: _Part) -> _Turn | None:
        """First pages of rows in the layer that follows, if their plan is kept until then."""
        turns = self._plan(part)
        return turns[0] if turns and self._plans.get(part.key) is not None else None

    def _attend_part(
        self,
        part: _Part,
        turns: list[_Turn],
        following: _Turn | None,
        scale: float,
        exact: bool,
        missed: list[tuple[I64, I64]],
    ) -> None:
        """Attend to the pages of some rows, and begin to read those of the ``following`` turn."""
        fetch = self._begin(turns[0]) if turns else None
        for number, turn in enumerate(turns):
            mine, fetch = fetch, None
            if number + 1 < len(turns):
                fetch = self._begin(turns[number + 1])
            elif following is not None:
                self._ahead = following, self._pages.start(following.blocks, following.numbers)
            if mine is None:
                raise ProtocolError("order", "a turn was not begun")
            try:
                self._fold(turn, mine, part, scale, exact, missed)
            finally:
                self._pages.release(mine)

    def _begin(self, turn: _Turn) -> Fetch:
        """Start to read a turn's pages, unless that was done ahead."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            if ahead[0] is turn:
                return ahead[1]
            self._pages.release(ahead[1])
        return self._pages.start(turn.blocks, turn.numbers)

    def _end_ahead(self) -> None:
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            self._pages.release(ahead[1])

    def _fold(
        self,
        turn: _Turn,
        fetch: Fetch,
        part: _Part,
        scale: float,
        exact: bool,
        missed: list[tuple[I64, I64]],
    ) -> None:
        """Attend to the pages of a turn; note those that are not here in ``missed``."""
        address, here = self._pages.finish(fetch)
        begin, end, masks = turn.begin, turn.end, turn.masks
        if not here.all():
            bad = ~here
            if exact:  # whoever attends in our stead does so by block and KV head
                head = (turn.blocks * self._geometry.kv_pages + turn.numbers) // self._shape.groups
                bad = np.isin(head, head[bad])
            missed.append((self._told.slots[turn.blocks[bad]], turn.numbers[bad]))
            which, begin, end = turn.only(~bad)
            address = address[which]
            masks = None if masks is None else masks[which]
        began = time.perf_counter()
        shape, queries, constants = self._shape, part.queries, self._constants
        count, heads = queries.m.shape
        constants.grow(max(count, len(address)))
        _kernels.attend(
            _kernels.Vectors(
                queries.data.ctypes.data,
                self._code,
                self._query_bytes,
                count,
                heads,
                shape.head_size,
            ),
            scale,
            _kernels.State(queries.m, queries.total, queries.acc),
            _kernels.Rows(
                constants.numbers[:count],
                None,
                constants.far[:count],
                part.per_query(begin),
                part.per_query(end),
                list_per_head=True,
            ),
            _kernels.Pages(address, constants.zeros[: len(address)], masks),
            self._page,
            self._threads,
        )
        self.nbytes += len(address) * self._geometry.payload_bytes
        self._attend_s += time.perf_counter() - began

    # ---- lists ----

    def _counts(self, message_counts: bytes, rows: int, count: int) -> I64 | None:
        """Queries of each row; None: one each.

        Raises:
            ProtocolError: they are not those of the payload.
        """
        counts = unpack(message_counts) if message_counts else None
        total = rows if counts is None else int(counts.sum())
        wrong = counts is not None and (
            len(counts) != rows or (counts < 0).any() or (counts > count).any()
        )
        if wrong or total != count:
            raise ProtocolError("body", f"{count} queries came for {total}")
        return counts

    def _plan(self, part: _Part) -> list[_Turn]:
        """Turns of whole contexts. Kept, until something is told, as far as there is room."""
        found = self._plans.get(part.key)
        if found is None:
            row, slot = part.contexts()
            pair, block, page = self._here(part.layer, slot)
            found = _Plan(self._turns(part, row[pair], block, page, None))
            self._plans.put(part.key, found)
        return found.turns

    def _here(self, layer: int, slot: I64) -> tuple[I64, I64, I64]:
        """Block, by its place in ``slot`` and by its number, and page of the layer, of all that
        is here."""
        first, pages = self._geometry.first_page(layer), self._geometry.pages_per_layer
        numbers = self._told.numbers(slot)
        pair, page = np.nonzero(self._told.places[numbers, first : first + pages] >= 0)
        return pair, numbers[pair].astype(np.int64), page

    def _chosen(self, part: _Part, selection: _Selection) -> list[_Turn]:
        """Turns of the pages that were selected."""
        row, slot = part.contexts()
        pair, block, page = self._here(part.layer, slot)
        which, masks = selection.take(len(pair))
        return self._turns(part, row[pair[which]], block[which], page[which], masks)

    def _turns(
        self, part: _Part, row: I64, block: I64, page: I64, masks: NDArray[np.uint8] | None
    ) -> list[_Turn]:
        """Cut entries into turns that fit into memory, each with lists by row and KV head."""
        heads, groups = self._shape.kv_heads, self._shape.groups
        key = row * heads + page // groups
        order = np.argsort(key, kind="stable")
        lists = len(part.rows) * heads
        edges = np.concatenate([[0], np.cumsum(np.bincount(key, minlength=lists))])
        block, number = block[order], self._geometry.first_page(part.layer) + page[order]
        if masks is not None:
            masks = masks[order]
        room = max(groups, self._pages.room // groups * groups)
        if len(block) <= room:
            cuts: list[I64 | slice] = [slice(None)] if len(block) else []
        else:
            names = block * self._geometry.kv_pages + number
            distinct, place = np.unique(names, return_inverse=True)
            turn = place // room
            cuts = [np.flatnonzero(turn == i) for i in range(-(-len(distinct) // room))]
        return [
            _Turn(
                block[which],
                number[which],
                *_ranges(which, edges),
                None if masks is None else masks[which],
            )
            for which in cuts
        ]

    def close(self) -> bool:
        """End all reads; False: one does not end, and its memory stays."""
        self._end_ahead()
        return self._pages.close()


def _ranges(which: I64 | slice, edges: I64) -> tuple[I32, I32]:
    """Begin and end of each list in a part of the entries."""
    if not isinstance(which, slice):
        edges = np.searchsorted(which, edges)
    return edges[:-1].astype(np.int32), edges[1:].astype(np.int32)


def _bits(data: NDArray[np.uint8], begin: int, count: int) -> NDArray[np.uint8]:
    """Some bits, [count]; zeros behind the end."""
    skipped = begin % 8
    found = np.unpackbits(data[begin // 8 : -(-(begin + count) // 8)], count=skipped + count)
    return found[skipped:]


def _distinct(missed: list[tuple[I64, I64]], pages: int) -> tuple[I64, I64]:
    """Slots and numbers of pages, each once."""
    if not missed:
        none = np.zeros(0, dtype=np.int64)
        return none, none
    names = np.unique(np.concatenate([slots * pages + numbers for slots, numbers in missed]))
    return names // pages, names % pages


class AttentionLink:
    """Serves one connection for attention. Used by its thread.

    Example:
        AttentionLink(channel, volumes, config, counters).serve(count)
    """

    def __init__(
        self, channel: Channel, volumes: VolumeSet, config: NodeConfig, counters: Counters
    ):
        """``config`` and ``counters`` of the node."""
        self._channel, self._volumes = channel, volumes
        self._config, self._counters = config, counters
        self._attention: NodeAttention | None = None

    def serve(self, count: Callable[[str], None]) -> None:
        """Receive until the connection ends; ``count`` hears the name of each message.

        Raises:
            NodeError: why it ended.
        """
        try:
            while True:
                frame = self._channel.receive(None)
                count(type(frame.message).__name__)
                self._handle(frame)
        finally:
            if self._attention is not None:
                self._attention.close()

    def _handle(self, frame: Frame) -> None:
        message, attention = frame.message, self._attention
        if frame.payload_bytes or frame.descriptors:
            raise ProtocolError("order", f"a payload came with a {type(message).__name__}")
        if isinstance(message, AttendShape) and attention is None:
            bounds = self._begin(message).bounds
            self._channel.send(
                AttendRoom(bounds.blocks, bounds.listed),
                call_id=frame.call_id,
                answer=True,
                timeout=self._config.lease,
            )
        elif attention is None:
            raise ProtocolError("order", "a connection for attention begins with a shape")
        elif isinstance(message, Attend):
            self._attend(attention, message, frame.call_id)
        elif isinstance(message, TellBlocks):
            attention.tell_blocks(message)
        elif isinstance(message, TellRow):
            attention.tell_row(message)
        elif isinstance(message, Forget):
            attention.forget(message)
        else:
            raise ProtocolError("order", f"a {type(message).__name__} came for attention")

    def _begin(self, shape: AttendShape) -> NodeAttention:
        config = self._config
        try:
            self._attention = attention = NodeAttention(
                shape,
                self._volumes,
                nbytes=config.attend_bytes(),
                threads=team_threads(config.attend_threads),
                deadline_s=self._volumes.deadline_s,
            )
        except ProtocolError:
            raise
        except SSDKVError as error:
            raise ProtocolError("store", str(error)) from error
        return attention

    def _attend(self, attention: NodeAttention, message: Attend, call_id: int) -> None:
        before = attention.nbytes
        answer = attention.attend(message)
        self._channel.send(answer, call_id=call_id, answer=True, timeout=self._config.lease)
        self._counters.add_keyed(_ATTENDED, (attention.nbytes - before,))
