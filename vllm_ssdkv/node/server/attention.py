"""Attention on a node: queries come, partial states go, pages stay.

One connection of a worker's volume session, served by its thread. The engine tells where blocks lie
and which are a row's context; a call names a layer and rows, and sends queries. See
``docs/internals/offload.md``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
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
    AttendShape,
    Done,
    Forget,
    TellBlocks,
    TellRow,
    pack,
    unpack,
)
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
_MOST_PLANS: Final = 4096


@dataclass(slots=True, eq=False)
class _Turn:
    """Pages that are in memory at once, and the lists of them. Entries are pages of rows.

    Attributes:
        slots, numbers: Of each entry, int64 [E]; in the order of the lists.
        begin, end: Range of each query and KV head in the entries, int32.
        masks: Tokens to attend to, uint8 [E, page_tokens]; None: all.
    """

    slots: I64
    numbers: I64
    begin: I32
    end: I32
    masks: NDArray[np.uint8] | None = None

    def only(self, which: NDArray[np.bool_]) -> tuple[I64, I32, I32]:
        """Some of the entries, and the ranges in these."""
        before = np.concatenate([[0], np.cumsum(which)]).astype(np.int32)
        return np.flatnonzero(which), before[self.begin], before[self.end]


@dataclass(frozen=True, slots=True, eq=False)
class _Queries:
    """Queries of one call, and their states, which are one stretch of memory.

    Attributes:
        data: The queries, bytes.
        count: Number of them.
        state: acc, m, l, float32.
    """

    data: NDArray[np.uint8]
    count: int
    state: NDArray[np.float32]

    @classmethod
    def of(cls, data: NDArray[np.uint8], count: int, heads: int, head_size: int) -> _Queries:
        """Queries that have seen no key."""
        state = np.zeros(count * heads * (head_size + 2), dtype=np.float32)
        state[count * heads * head_size : count * heads * (head_size + 1)] = -np.inf
        return cls(data, count, state)


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
            ProtocolError: the shape is none that pages have.
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
        self._told = ToldBlocks(geometry, shape.slots, volumes)
        nbytes = max(nbytes, 4 * geometry.layer_bytes)
        self._pages = NodePages(geometry, self._told, volumes, shape.slots, nbytes, deadline_s)
        self._rows: dict[int, I64] = {}
        self._plans: dict[tuple[int, bytes, bytes], list[_Turn]] = {}
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
        known = slots[self._told.rows(slots) != 0]
        if len(known):
            self._pages.forget(known)
        self._told.put(slots, places, digests)
        self._plans.clear()

    def tell_row(self, message: TellRow) -> None:
        """See :class:`TellRow`."""
        before = self._rows.get(message.row, np.zeros(0, dtype=np.int64))
        if message.keep > len(before):
            raise ProtocolError("body", "a row is to keep more blocks than it has")
        slots = unpack(message.slots)
        self._told.rows(slots)
        self._rows[message.row] = np.concatenate([before[: message.keep], slots])
        self._plans.clear()

    def forget(self, message: Forget) -> None:
        """See :class:`Forget`."""
        slots = unpack(message.slots)
        self._end_ahead()
        self._told.forget(slots)
        self._pages.forget(slots)
        for row in unpack(message.rows).tolist():
            self._rows.pop(row, None)
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
        queries = _Queries.of(query, count, shape.query_heads, shape.head_size)
        if message.layer >= shape.layers or message.following >= shape.layers:
            raise ProtocolError("body", f"a layer of {shape.layers} is asked for")
        waited, attended = self._pages.wait_s, self._attend_s
        exact = not message.selection
        if exact:
            turns = self._plan(message.layer, message.rows, message.counts, count)
        else:
            turns = self._chosen(message, count)
        following: _Turn | None = None
        if exact and message.following >= 0:
            next_turns = self._plan(message.following, message.rows, message.counts, count)
            following = next_turns[0] if next_turns else None
        missed: list[tuple[I64, I64]] = []
        fetch = self._begin(turns[0]) if turns else None
        for number, turn in enumerate(turns):
            mine, fetch = fetch, None
            if number + 1 < len(turns):
                fetch = self._begin(turns[number + 1])
            elif following is not None:
                self._ahead = following, self._pages.start(following.slots, following.numbers)
            if mine is None:
                raise ProtocolError("order", "a turn was not begun")
            try:
                self._fold(turn, mine, queries, message.scale, exact, missed)
            finally:
                self._pages.release(mine)
        slots, pages = _distinct(missed, self._geometry.kv_pages)
        return Attended(
            queries.state.tobytes(),
            pack(slots),
            pack(pages),
            self._pages.wait_s - waited,
            self._attend_s - attended,
        )

    def _begin(self, turn: _Turn) -> Fetch:
        """Start to read a turn's pages, unless that was done ahead."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            if ahead[0] is turn:
                return ahead[1]
            self._pages.release(ahead[1])
        return self._pages.start(turn.slots, turn.numbers)

    def _end_ahead(self) -> None:
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            self._pages.release(ahead[1])

    def _fold(
        self,
        turn: _Turn,
        fetch: Fetch,
        queries: _Queries,
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
                head = (turn.slots * self._geometry.kv_pages + turn.numbers) // self._shape.groups
                bad = np.isin(head, head[bad])
            missed.append((turn.slots[bad], turn.numbers[bad]))
            which, begin, end = turn.only(~bad)
            address = address[which]
            masks = None if masks is None else masks[which]
        began = time.perf_counter()
        shape, constants = self._shape, self._constants
        count, heads = queries.count, shape.query_heads
        constants.grow(max(count, len(address)))
        acc_end = count * heads * shape.head_size
        m_end = acc_end + count * heads
        _kernels.attend_pages(
            queries.data.ctypes.data,
            self._code,
            self._query_bytes,
            scale,
            queries.state[acc_end:m_end].reshape(count, heads),
            queries.state[m_end:].reshape(count, heads),
            queries.state[:acc_end].reshape(count, heads, shape.head_size),
            constants.numbers[:count],
            constants.far[:count],
            begin,
            end,
            address,
            constants.zeros[: len(address)],
            masks,
            shape.page_tokens,
            shape.kv_heads,
            heads,
            shape.head_size,
            self._code,
            self._threads,
        )
        self.nbytes += len(address) * self._geometry.payload_bytes
        self._attend_s += time.perf_counter() - began

    # ---- lists ----

    def _contexts(self, rows: bytes) -> tuple[I64, I64]:
        """Row, by its place in the call, and slot of each block of some rows, both [m].

        Raises:
            ProtocolError: a row was not told.
        """
        lists = []
        for row in unpack(rows).tolist():
            if row not in self._rows:
                raise ProtocolError("order", f"row {row} was not told")
            lists.append(self._rows[row])
        lengths = [len(one) for one in lists]
        none = np.zeros(0, dtype=np.int64)
        return np.repeat(np.arange(len(lists)), lengths), np.concatenate([*lists, none])

    def _counts(self, message_counts: bytes, rows: int, count: int) -> I64 | None:
        """Queries of each row; None: one each.

        Raises:
            ProtocolError: they are not those of the payload.
        """
        counts = unpack(message_counts) if message_counts else None
        total = rows if counts is None else int(counts.sum())
        wrong = counts is not None and (len(counts) != rows or (counts < 0).any())
        if wrong or total != count:
            raise ProtocolError("body", f"{count} queries came for {total}")
        return counts

    def _plan(self, layer: int, rows: bytes, counts: bytes, count: int) -> list[_Turn]:
        """Turns of whole contexts. Kept, until something is told."""
        key = layer, rows, counts
        found = self._plans.get(key)
        if found is None:
            row, slot = self._contexts(rows)
            of_rows = self._counts(counts, len(rows) // 8, count)
            pair, page = self._here(layer, slot)
            found = self._turns(layer, row[pair], slot[pair], page, of_rows, len(rows) // 8, None)
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[key] = found
        elif not counts and count != len(rows) // 8:
            raise ProtocolError("body", f"{count} queries came for {len(rows) // 8}")
        return found

    def _here(self, layer: int, slot: I64) -> tuple[I64, I64]:
        """Block, by its place in ``slot``, and page of the layer of all that is here."""
        first, pages = self._geometry.first_page(layer), self._geometry.pages_per_layer
        places = self._told.places[self._told.rows(slot), first : first + pages]
        pair, page = np.nonzero(places >= 0)
        return pair, page

    def _chosen(self, message: Attend, count: int) -> list[_Turn]:
        """Turns of the pages that were selected."""
        row, slot = self._contexts(message.rows)
        of_rows = self._counts(message.counts, len(message.rows) // 8, count)
        pair, page = self._here(message.layer, slot)
        if len(message.selection) != -(-len(pair) // 8):
            raise ProtocolError("body", f"a selection of {len(pair)} pages is of another length")
        bits = np.unpackbits(np.frombuffer(message.selection, dtype=np.uint8), count=len(pair))
        which = np.flatnonzero(bits)
        masks = None
        if message.masks:
            tokens = self._shape.page_tokens
            if len(message.masks) != -(-len(which) * tokens // 8):
                raise ProtocolError("body", "masks are not those of the selected pages")
            of_tokens = np.frombuffer(message.masks, dtype=np.uint8)
            masks = np.unpackbits(of_tokens, count=len(which) * tokens).reshape(-1, tokens)
        pair, page = pair[which], page[which]
        rows = len(message.rows) // 8
        return self._turns(message.layer, row[pair], slot[pair], page, of_rows, rows, masks)

    def _turns(
        self,
        layer: int,
        row: I64,
        slot: I64,
        page: I64,
        counts: I64 | None,
        rows: int,
        masks: NDArray[np.uint8] | None,
    ) -> list[_Turn]:
        """Cut entries into turns that fit into memory, each with lists by row and KV head."""
        heads, groups = self._shape.kv_heads, self._shape.groups
        key = row * heads + page // groups
        order = np.argsort(key, kind="stable")
        lists = rows * heads
        edges = np.concatenate([[0], np.cumsum(np.bincount(key, minlength=lists))])
        slot, number = slot[order], self._geometry.first_page(layer) + page[order]
        if masks is not None:
            masks = masks[order]
        room = max(groups, self._pages.room // groups * groups)
        if len(slot) <= room:
            parts: list[I64 | slice] = [slice(None)] if len(slot) else []
        else:
            names = slot * self._geometry.kv_pages + number
            distinct, place = np.unique(names, return_inverse=True)
            turn = place // room
            parts = [np.flatnonzero(turn == i) for i in range(-(-len(distinct) // room))]
        return [
            _Turn(
                slot[part],
                number[part],
                *_per_query(part, edges, counts, heads),
                None if masks is None else masks[part],
            )
            for part in parts
        ]

    def close(self) -> bool:
        """End all reads; False: one does not end, and its memory stays."""
        self._end_ahead()
        return self._pages.close()


def _per_query(part: I64 | slice, edges: I64, counts: I64 | None, heads: int) -> tuple[I32, I32]:
    """Begin and end of each query's lists in a part of the entries."""
    if not isinstance(part, slice):
        edges = np.searchsorted(part, edges)
    begin, end = edges[:-1].astype(np.int32), edges[1:].astype(np.int32)
    if counts is None:
        return begin, end
    return (
        np.repeat(begin.reshape(-1, heads), counts, axis=0).ravel(),
        np.repeat(end.reshape(-1, heads), counts, axis=0).ravel(),
    )


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
            self._begin(message)
            self._channel.send(
                Done(), call_id=frame.call_id, answer=True, timeout=self._config.lease
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

    def _begin(self, shape: AttendShape) -> None:
        config = self._config
        try:
            self._attention = NodeAttention(
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

    def _attend(self, attention: NodeAttention, message: Attend, call_id: int) -> None:
        before = attention.nbytes
        answer = attention.attend(message)
        self._channel.send(answer, call_id=call_id, answer=True, timeout=self._config.lease)
        self._counters.add_keyed(_ATTENDED, (attention.nbytes - before,))
