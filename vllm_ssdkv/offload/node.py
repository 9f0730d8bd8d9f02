"""Attention on nodes: each attends to the blocks that its drives have, and sends partial states.

Blocks with a frame in DRAM are attended to here, beside the window. The others lie on nodes, and
are attended to there; K and V do not travel. What a node cannot attend to in a step, since it is
gone, late, or finds a page wrong, is read over the wire in the same step, from the other copy if
there is one, and attended to here. From the next step on the node that has the other copy does it.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.attention.exact import StreamedContext
from vllm_ssdkv.attention.sparse import ChosenPages
from vllm_ssdkv.base.errors import NodeError, NodeFailedError, SSDKVError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.kernels.dense import AttentionKernels, select_kernels
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout, PartialState
from vllm_ssdkv.kernels.paged import select_page_kernels
from vllm_ssdkv.kernels.step_clock import ATTEND, MERGE, WAIT, StepClock
from vllm_ssdkv.node.client.attention import AttentionWire
from vllm_ssdkv.node.client.node_drives import NodeDrives
from vllm_ssdkv.node.client.volume_link import VolumeLink
from vllm_ssdkv.node.protocol.messages import MAX_STATES, Attend, AttendShape, pack, unpack
from vllm_ssdkv.offload.node_blocks import HERE, NodeBlocks, NodePart, RowBlocks, failing
from vllm_ssdkv.offload.offloader import KEYS
from vllm_ssdkv.offload.protocol import ContextWork
from vllm_ssdkv.store.tiered_store import TieredStore

logger = logging.getLogger(__name__)

I64 = NDArray[np.int64]

_OPEN_S: Final = 3.0
"""Deadline of a connection for attention, in seconds."""

_PAUSE_S: Final = 0.5
"""Pause between attempts to open one."""


class NodeWires:
    """Connections for attention to all nodes, opened again in a thread of its own.

    Whoever attends may be within a wire: only that thread gives its socket back. Others end it.

    Example:
        wires = NodeWires(drives.links, shape, counters)
        wires.current()
    """

    def __init__(self, links: Sequence[VolumeLink], shape: AttendShape, counters: Counters):
        """Open those that can be, and keep them open.

        Raises:
            NodeError: a node is there, and refuses.
        """
        self._links, self._shape, self._counters = links, shape, counters
        self._wires: list[AttentionWire | None] = [None] * len(links)
        self._ended: list[AttentionWire] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        for node in range(len(self._links)):
            self._open(node)
        for node, link in enumerate(self._links):
            link.on_change.append(functools.partial(self._changed, node))
        self._thread = threading.Thread(target=self._run, name="ssdkv-attend", daemon=True)
        self._thread.start()

    def current(self) -> list[AttentionWire | None]:
        """A wire to each node; None where there is none now. For the thread that attends."""
        with self._lock:
            ended, self._ended = self._ended, []
            found = list(self._wires)
        for wire in ended:
            wire.close()
        return found

    def fail(self, node: int, wire: AttentionWire | None) -> None:
        """A node did not answer as it should: its connection ends. For the same thread."""
        with self._lock:
            if wire is not None and self._wires[node] is wire:
                self._lose(node)
        if wire is not None:
            wire.close()
        self._wake.set()

    def _lose(self, node: int) -> None:
        """A node attends no longer: counted once, whoever notices first. Lock is held."""
        self._wires[node] = None
        self._counters.add("offload_failures", cause="error")

    def _changed(self, node: int, here: bool) -> None:
        """The volumes of a node are to be had, or are gone. Any thread; does not block."""
        with self._lock:
            wire = self._wires[node]
            if not here and wire is not None:
                self._lose(node)
                self._ended.append(wire)
                wire.abort()  # whoever waits for an answer need not wait for the deadline
        self._wake.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self._lock:
                missing = [node for node, wire in enumerate(self._wires) if wire is None]
            self._wake.wait(_PAUSE_S if missing else None)
            self._wake.clear()
            for node in missing:
                try:
                    self._open(node)
                except SSDKVError as error:
                    logger.warning(
                        "ssdkv: offload: the node %s does not take connections for attention: %s",
                        self._links[node].peer.address,
                        error,
                    )
                    self._stopping.wait(_PAUSE_S)
                except Exception:  # whatever it is, nodes must be found again
                    self._counters.add("thread_errors", 1, thread="node")
                    logger.exception(
                        "ssdkv: connecting to %s failed", self._links[node].peer.address
                    )
                    self._stopping.wait(_PAUSE_S)

    def _open(self, node: int) -> None:
        session = self._links[node].session
        if session is None or self._stopping.is_set():
            return
        wire = AttentionWire.open(session, self._shape, _OPEN_S)
        with self._lock:
            # A session that ends from here on finds the wire in its place.
            wanted = not self._stopping.is_set() and self._links[node].session is session
            if wanted:
                self._wires[node] = wire
        if not wanted:
            wire.close()

    def close(self, timeout_s: float) -> bool:
        """End all connections. False: the thread still runs."""
        with self._lock:
            self._stopping.set()
            wires = [*self._wires, *self._ended]
            self._wires, self._ended = [None] * len(self._wires), []
        self._wake.set()
        for wire in wires:
            if wire is not None:
                wire.close()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """Call to a node that is under way.

    Attributes:
        node: Its number.
        wire: To it.
        number: Of the call.
        blocks: That the layer is about.
        layer: Of the call.
        tokens: Query tokens of it; None: all.
        deadline: Of its answer, of the monotonic clock. Calls of a layer go out together, so that
            several nodes that hang cost a layer one deadline.
    """

    node: int
    wire: AttentionWire
    number: int
    blocks: RowBlocks
    layer: int
    tokens: torch.Tensor | None
    deadline: float

    @property
    def part(self) -> NodePart:
        """Blocks that the node has pages of."""
        return self.blocks.at[self.node]


@dataclass(frozen=True, slots=True, eq=False)
class _Missed:
    """Pages of a layer that no node attended to: slot and number in it, int64 [n]."""

    slots: I64
    numbers: I64


@dataclass(slots=True)
class NodeCounts:
    """Work of one step, in the order of :data:`KEYS`."""

    gains: list[float] = field(default_factory=lambda: [0.0] * len(KEYS))
    contexts: bool = False
    """True if anything was attended to on nodes."""


class NodeOffloader:
    """Has nodes attend. Used by the thread of the forward pass.

    Attributes:
        peer: None: pages do not come into memory of a device.

    Example:
        offloader = NodeOffloader(store, drives, layout, query_heads=32, deadline_s=20.0)
    """

    peer: Final = None

    def __init__(
        self,
        store: TieredStore,
        drives: NodeDrives,
        layout: BlockLayout,
        query_heads: int,
        slots: int,
        deadline_s: float,
        counters: Counters,
    ):
        """
        Args:
            store: Of the rank.
            drives: Its nodes.
            layout: Of a block of a context.
            query_heads: Of this rank.
            slots: Slot numbers are below this.
            deadline_s: Of each answer.
            counters: Of the rank.

        Raises:
            StoreError: a node refuses.
        """
        geometry = store.files.geometry
        dtype = str(layout.dtype).removeprefix("torch.")
        shape = AttendShape(
            geometry.layers,
            geometry.heads,
            geometry.groups,
            layout.page_tokens,
            query_heads,
            layout.head_size,
            dtype,  # type: ignore[arg-type]  # layouts have these three only
            slots,
        )
        self._store, self._layout, self._heads = store, layout, query_heads
        self._deadline_s, self._counters = deadline_s, counters
        self._links = drives.links
        self._wires = NodeWires(drives.links, shape, counters)
        self._blocks = NodeBlocks(store.files, store.checksums, drives, slots)
        self._now = NodeCounts()
        for cause in ("error", "deadline", "room"):
            counters.add("offload_failures", 0, cause=cause)
        self._told_in_use = -1

    @property
    def nodes_in_use(self) -> int:
        """Number of nodes that are to be had."""
        return sum(wire is not None for wire in self._wires.current())

    @property
    def in_use(self) -> bool:
        """Check whether any node is to be had."""
        here = self.nodes_in_use
        if here != self._told_in_use:
            self._told_in_use = here
            self._counters.set("offload_in_use", here)
        return here > 0

    def takes(self, tokens: int) -> bool:
        """Check whether so many queries fit into one call, and their states into its answer."""
        return tokens * self._heads * (self._layout.head_size + 2) * 4 <= MAX_STATES

    def locate(self, slots: I64, row: NDArray[np.signedinteger], names: Sequence[str]) -> RowBlocks:
        """Nodes of blocks without a frame, row after row; see :meth:`NodeBlocks.locate`."""
        while True:
            wires = self._wires.current()
            try:
                found = self._blocks.locate(slots, row, names, wires, self._deadline_s)
            except NodeFailedError as error:
                self._fail(error.node, wires[error.node], error)
                continue
            for node in self._blocks.full_nodes():
                self._count_full(node, wires[node])
            return found

    def _count_full(self, node: int, wire: AttentionWire | None) -> None:
        self._counters.add("offload_failures", cause="room")
        logger.warning(
            "ssdkv: offload: the node %s has room for %d blocks of contexts: others are read, and "
            "attended to here",
            self._links[node].peer.address,
            0 if wire is None else wire.room.blocks,
        )

    def call(
        self,
        node: int,
        blocks: RowBlocks,
        message: Attend,
        tokens: torch.Tensor | None,
    ) -> _Call | None:
        """Call a node about its part of ``blocks``, with these query ``tokens``, or all. None: it
        is out of reach."""
        wire = self._wires.current()[node]
        if wire is None:
            return None
        gains = self._now.gains
        deadline = time.monotonic() + self._deadline_s
        try:
            number = wire.send(message, self._deadline_s)
        except NodeError as error:
            self._fail(node, wire, error)
            return None
        self._now.contexts = True
        gains[0] += 1
        gains[1] += len(message.query)
        gains[2] += len(message.selection) + len(message.masks)
        return _Call(node, wire, number, blocks, message.layer, tokens, deadline)

    def take(self, call: _Call, state: PartialState) -> _Missed | None:
        """Wait for an answer and fold it in. What was missed; None: all of it."""
        tokens = state.m.shape[0] if call.tokens is None else len(call.tokens)
        heads, size = self._heads, self._layout.head_size
        try:
            with failing(call.node):
                answer = call.wire.receive(call.number, call.deadline)
                found = np.frombuffer(answer.states, dtype="<f4").copy()
                _check(found, tokens * heads * (size + 2))
                slots, numbers = unpack(answer.slots), unpack(answer.pages)
                pages = self._store.files.geometry.pages_per_layer
                call.blocks.check_missed(call.node, call.layer * pages, pages, slots, numbers)
        except (NodeError, ValueError) as error:
            self._fail(call.node, call.wire, error)
            return None
        values = torch.from_numpy(found)
        count = tokens * heads
        part = PartialState(
            values[count * size : count * (size + 1)].view(tokens, heads),
            values[count * (size + 1) :].view(tokens, heads),
            values[: count * size].view(tokens, heads, size),
        )
        if call.tokens is not None:
            part = _spread(part, call.tokens, state)
        select_kernels(state.acc.device).merge(state, part)
        gains = self._now.gains
        gains[3] += found.nbytes
        gains[4] += answer.wait_s
        gains[5] += answer.attend_s
        if len(slots):
            self._suspect(call, slots, numbers)
        return _Missed(slots, numbers)

    def _suspect(self, call: _Call, slots: I64, numbers: I64) -> None:
        """Pages are wrong or unreadable on a node: have the other copies attended to."""
        files = self._store.files
        distinct = np.unique(slots)
        doubled = distinct[files.placement.doubled(distinct)]
        if len(doubled):
            devices = self._blocks.devices_of(slots, numbers, call.node)
            # Of what an earlier answer of this layer has told already nobody knows the place.
            which = np.isin(slots, doubled) & (devices >= 0)
            files.mark_suspect(slots[which], devices[which].astype(np.uint16))
        self._blocks.reclaim(distinct)
        self._counters.add("offload_failures", cause="answer")
        logger.warning(
            "ssdkv: offload: the node %s cannot attend to pages of %d blocks: they are read",
            self._links[call.node].peer.address,
            len(distinct),
        )

    def _fail(self, node: int, wire: AttentionWire | None, error: Exception) -> None:
        self._wires.fail(node, wire)
        self._blocks.version += 1  # the layers to come are placed without it
        logger.error(
            "ssdkv: offload: the node %s does not attend until it is back: %s; its part is read "
            "from other copies, or computed again",
            self._links[node].peer.address,
            error,
        )

    @property
    def blocks(self) -> NodeBlocks:
        """Places of blocks."""
        return self._blocks

    def reclaim(self, slots: I64) -> None:
        """Slots get other bytes."""
        self._blocks.reclaim(slots)

    def count_stored(self, nbytes: int) -> None:
        """New K and V has gone to nodes."""
        self._counters.add("offload_bytes", nbytes, payload="kv")

    def count_here(self, seconds: float) -> None:
        """The step's thread has spent so long on handing in and folding."""
        self._now.gains[6] += seconds

    def count_step(self) -> None:
        """A step with contexts has ended."""
        self._blocks.end_step()
        now, self._now = self._now, NodeCounts()
        self._counters.add("offload_steps", by="device" if now.contexts else "step")
        self._counters.add_keyed(KEYS, now.gains)

    def close(self, timeout_s: float) -> bool:
        """End the connections; False: a thread still runs."""
        return self._wires.close(timeout_s)


def _spread(part: PartialState, tokens: torch.Tensor, like: PartialState) -> PartialState:
    """States of some query tokens as states of all, on the host."""
    count, heads, size = like.acc.shape
    full = PartialState.empty(count, heads, size, torch.device("cpu"))
    full.m[tokens], full.l[tokens], full.acc[tokens] = part.m, part.l, part.acc
    return full


@dataclass(slots=True)
class NodeRows:
    """Rows of one step whose contexts nodes attend to. Used by the thread of the forward pass.

    Attributes:
        offloader: Of the rank.
        names: Request of each row of the step.
    """

    offloader: NodeOffloader
    names: Sequence[str]
    _located: dict[int, tuple[object, RowBlocks]] = field(default_factory=dict)

    def of(self, key: object, slots: I64, row: NDArray[np.signedinteger]) -> RowBlocks:
        """Places of blocks, found once for each ``key``, which must live as long as this."""
        found = self._located.get(id(key))
        if found is None or not self._fits(found[1]):
            found = key, self.offloader.locate(slots, row, self.names)
            self._located[id(key)] = found
        return found[1]

    def _fits(self, blocks: RowBlocks) -> bool:
        return blocks.version == self.offloader.blocks.version


@dataclass(slots=True)
class NodeContext:
    """Contexts of a layer that nodes attend to. See ``LayerContext``.

    Attributes:
        streamed: The same, attended to by who folds them.
        rows: Of the step.
        following: Layer whose contexts come next; -1: none.
    """

    streamed: StreamedContext
    rows: NodeRows
    following: int = -1
    _blocks: RowBlocks | None = None
    _calls: list[_Call] = field(default_factory=list)

    def begin(self, query: torch.Tensor, scale: float) -> None:
        """See ``LayerContext``."""
        began = time.perf_counter()
        streamed, batch = self.streamed, self.streamed.batch
        away = streamed.stream.away(streamed.layer)
        if not len(away.slots):
            return
        blocks = self._blocks = self.rows.of(away, away.slots, away.row)
        place = np.full(int(batch.stream_row.max()) + 1, -1, dtype=np.int64)
        place[batch.stream_row] = np.arange(len(batch.stream_row))
        host = query if query.is_cpu else query.cpu()
        offloader = self.rows.offloader
        for node, part in blocks.at.items():
            of_batch = place[part.rows]
            counts = batch.query_count[of_batch].astype(np.int64)
            tokens = _tokens(batch.query_begin[of_batch].astype(np.int64), counts)
            every = np.array_equal(tokens, np.arange(batch.tokens))
            index = None if every else torch.from_numpy(tokens)
            message = Attend(
                streamed.layer,
                scale,
                part.packed,
                _bytes(host if index is None else host[index]),
                b"" if (counts == 1).all() else pack(counts),
                following=self.following,
            )
            call = offloader.call(node, blocks, message, index)
            if call is not None:
                self._calls.append(call)
        offloader.count_here(time.perf_counter() - began)

    def fold(
        self,
        kernels: AttentionKernels,
        query: torch.Tensor,
        state: PartialState,
        scale: float,
        clock: StepClock,
    ) -> None:
        """See ``LayerContext``."""
        streamed = self.streamed
        away, here = streamed.split()
        if here.pairs:
            here.fold(kernels, query, state, scale, clock)
        blocks = self._blocks
        if blocks is None:
            return
        began = time.perf_counter()
        left = self._left(blocks)
        for call in self._calls:
            missed = self.rows.offloader.take(call, state)
            if missed is None:
                left[call.part.which] |= self._of_node(blocks, call.part, call.node)
            elif len(missed.slots):
                self._mark(left, blocks, missed)
        clock.lap(WAIT)
        self.rows.offloader.count_here(time.perf_counter() - began)
        if left.any():
            self._read(away, blocks, left, kernels, query, state, scale, clock)

    def _left(self, blocks: RowBlocks) -> NDArray[np.bool_]:
        """Mask of blocks and KV heads that no node was asked for, [m, heads]."""
        layout = self.streamed.layout
        if blocks.whole and len(self._calls) == len(blocks.at):
            return np.zeros((len(blocks.slots), layout.kv_heads), dtype=np.bool_)
        asked = [call.node for call in self._calls]
        node = self._nodes(blocks, slice(None))
        left: NDArray[np.bool_] = ~np.isin(node, asked)
        return left

    def _nodes(self, blocks: RowBlocks, which: slice | I64) -> NDArray[np.int8]:
        """Node of each KV head of the layer of some blocks, [k, heads]."""
        layout = self.streamed.layout
        pages = layout.kv_heads * layout.groups
        first = self.streamed.layer * pages
        return blocks.nodes[which, first : first + pages : layout.groups]

    def _of_node(self, blocks: RowBlocks, part: NodePart, node: int) -> NDArray[np.bool_]:
        mine: NDArray[np.bool_] = self._nodes(blocks, part.which) == node
        return mine

    def _mark(self, left: NDArray[np.bool_], blocks: RowBlocks, missed: _Missed) -> None:
        layout = self.streamed.layout
        head = missed.numbers // layout.groups % layout.kv_heads
        for slot, one in {*zip(missed.slots.tolist(), head.tolist(), strict=True)}:
            left[blocks.slots == slot, one] = True

    def _read(
        self,
        away: StreamedContext,
        blocks: RowBlocks,
        left: NDArray[np.bool_],
        kernels: AttentionKernels,
        query: torch.Tensor,
        state: PartialState,
        scale: float,
        clock: StepClock,
    ) -> None:
        """Read what nodes did not attend to, and attend to it, KV heads that go together at a
        time."""
        sets, of = np.unique(left, axis=0, return_inverse=True)
        for number, heads in enumerate(sets):
            if not heads.any():
                continue
            slots = np.unique(blocks.slots[of.ravel() == number])
            away.stream.bring(away.layer, slots)
            part = PartialState(
                torch.full_like(state.m, -torch.inf),
                torch.zeros_like(state.l),
                torch.zeros_like(state.acc),
            )
            away.fold(kernels, query, part, scale, clock)
            each = part.m.shape[1] // len(heads)
            others = torch.from_numpy(np.repeat(~heads, each)).to(part.m.device)
            part.m[:, others], part.l[:, others], part.acc[:, others] = -torch.inf, 0.0, 0.0
            kernels.merge(state, part)
            clock.lap(MERGE)


def _check(states: NDArray[np.float32], length: int) -> None:
    """Check that states are those of the queries that were sent.

    Raises:
        NodeError: they are not.
    """
    if len(states) != length:
        raise NodeError("the node has answered for other queries")


def _bytes(query: torch.Tensor) -> bytes:
    """Queries on the host, as a message has them."""
    return query.contiguous().view(torch.uint8).numpy().tobytes()


def _tokens(begin: I64, counts: I64) -> I64:
    """Query tokens of rows, one behind the other."""
    edges = np.cumsum(counts) - counts
    found: I64 = np.repeat(begin - edges, counts) + np.arange(int(counts.sum()))
    return found


def attend_chosen(
    rows: NodeRows, work: ContextWork, pages: ChosenPages, state: PartialState, clock: StepClock
) -> None:
    """Have nodes attend to chosen pages without a frame, and fold all of them into ``state``."""
    began = time.perf_counter()
    contexts, wanted = pages.contexts, pages.wanted
    away = np.flatnonzero(~contexts.framed)
    row = np.searchsorted(contexts.end, away, side="right")
    of_step = contexts.rows[row]
    blocks = rows.of(contexts, contexts.slots[away], of_step)
    place = np.full(len(contexts.slots), -1, dtype=np.int64)
    place[away] = np.arange(len(away))
    entry = place[wanted.blocks]
    node = np.full(len(entry), HERE, dtype=np.int64)
    there = np.flatnonzero(entry >= 0)
    node[there] = blocks.nodes[entry[there], wanted.pages.numbers[there]]
    calls = []
    for number, part in blocks.at.items():
        if (mine := np.flatnonzero(node == number)).size:
            call = _call_chosen(rows, work, pages, (blocks, number, part), entry, mine)
            if call is None:
                node[mine] = HERE
            else:
                calls.append(call)
    rows.offloader.count_here(time.perf_counter() - began)
    kernels = select_page_kernels(work.query.device)
    here = np.flatnonzero(node == HERE)
    if len(here):
        pages.some(here).fold(kernels, work.query, state, work.scale, clock)
    again = np.zeros(len(node), dtype=np.bool_)
    for call in calls:
        missed = rows.offloader.take(call, state)
        if missed is None:
            again |= node == call.node
        elif len(missed.slots):
            names = missed.slots * blocks.nodes.shape[1] + missed.numbers
            asked = wanted.pages.slots * blocks.nodes.shape[1] + wanted.pages.numbers
            again |= (node == call.node) & np.isin(asked, names)
    clock.lap(WAIT)
    if again.any():
        pages.some(np.flatnonzero(again)).fold(kernels, work.query, state, work.scale, clock)
        clock.lap(ATTEND)


def _call_chosen(
    rows: NodeRows,
    work: ContextWork,
    pages: ChosenPages,
    at: tuple[RowBlocks, int, NodePart],
    entry: I64,
    mine: I64,
) -> _Call | None:
    """Ask one node for the chosen pages ``mine``, whose blocks are ``entry``."""
    blocks, node, part = at
    count = pages.layer_pages
    first = pages.layer * count
    chosen = np.full((len(blocks.slots), count), -1, dtype=np.int64)
    chosen[entry[mine], pages.wanted.pages.numbers[mine] - first] = mine
    step_rows = pages.contexts.rows[pages.rows]
    alive = np.isin(part.rows, step_rows)
    which = part.which if alive.all() else part.which[np.isin(blocks.row[part.which], step_rows)]
    here = blocks.nodes[which, first : first + count] == node
    bits = chosen[which][here]
    masks = b""
    if pages.token_mask is not None:
        masks = np.packbits(pages.token_mask[bits[bits >= 0]]).tobytes()
    tokens = pages.tokens[np.searchsorted(step_rows, part.rows[alive])].astype(np.int64)
    every = np.array_equal(tokens, np.arange(len(work.query)))
    index = None if every else torch.from_numpy(tokens)
    host = work.query if work.query.is_cpu else work.query.cpu()
    message = Attend(
        pages.layer,
        work.scale,
        pack(part.numbers[alive]),
        _bytes(host if index is None else host[index]),
        selection=np.packbits(bits >= 0).tobytes(),
        masks=masks,
    )
    return rows.offloader.call(node, blocks, message, index)
