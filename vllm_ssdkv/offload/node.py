"""Attention on nodes: each attends to the blocks that its drives have, and sends partial states.

Blocks with a frame in DRAM are attended to here, beside the window. The others lie on nodes, and
are attended to there; K and V do not travel. To the step nodes are one device, whose tickets have
calls to several. What a node cannot attend to in a step, since it is
gone, late, or finds a page wrong, is read over the wire in the same step, from the other copy if
there is one, and attended to here. From the next step on the node that has the other copy does it.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.attention.exact import StreamedContext
from vllm_ssdkv.attention.sparse import ChosenPages
from vllm_ssdkv.base.errors import NodeError, NodeFailedError, SSDKVError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.kernels.dense import select_kernels
from vllm_ssdkv.kernels.operands.block_layout import PartialState
from vllm_ssdkv.kernels.step_clock import MERGE, StepClock
from vllm_ssdkv.node.client.attention import AttentionWire
from vllm_ssdkv.node.client.node_drives import NodeDrives
from vllm_ssdkv.node.client.volume_link import VolumeLink
from vllm_ssdkv.node.protocol.messages import MAX_STATES, Attend, AttendShape, pack, unpack
from vllm_ssdkv.offload.node_blocks import HERE, NodeBlocks, NodePart, RowBlocks, failing
from vllm_ssdkv.offload.protocol import (
    ContextDeviceClass,
    ContextKernels,
    ContextWork,
    DeviceCaps,
    DeviceSetup,
    DeviceStatistics,
    Foldable,
)

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
            link.tell_changes(functools.partial(self._changed, node))
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
class _Answer:
    """Answer to a call.

    Attributes:
        part: States of all queries.
        slots, numbers: Of pages that the node did not attend to: slot and number in it, int64 [n].
        counts: What was counted.
    """

    part: PartialState
    slots: I64
    numbers: I64
    counts: DeviceStatistics


class NodeDevice(ContextDeviceClass):
    """Has nodes attend. Used by the thread of the forward pass. See ``ContextDevice``.

    Attributes:
        blocks: Places of blocks.

    Example:
        device = NodeDevice.open(setup)
    """

    name = "node"

    def __init__(self, setup: DeviceSetup, drives: NodeDrives):
        """``drives``: nodes that have the slots.

        Raises:
            StoreError: a node refuses.
        """
        opened, layout, counters = setup.opened, setup.layout, setup.counters
        geometry = opened.files.geometry
        dtype = str(layout.dtype).removeprefix("torch.")
        shape = AttendShape(
            geometry.layers,
            geometry.heads,
            geometry.groups,
            layout.page_tokens,
            setup.query_heads,
            layout.head_size,
            dtype,  # type: ignore[arg-type]  # layouts have these three only
            opened.num_slots,
        )
        # The states of so many queries fit into an answer.
        most = MAX_STATES // (setup.query_heads * (layout.head_size + 2) * 4)
        self.caps = DeviceCaps(elsewhere=True, max_tokens=most)
        self._files, self._heads = opened.files, setup.query_heads
        self._head_size = layout.head_size
        # A drive of a node that hangs costs the node one deadline first.
        self._deadline_s = 2 * setup.config.io.deadline
        self._counters = counters
        self._links = drives.links
        self._wires = NodeWires(drives.links, shape, counters)
        self.blocks = NodeBlocks(opened.files, setup.checksums, drives, opened.num_slots)
        self._counts = DeviceStatistics()
        self._located: dict[int, tuple[object, RowBlocks]] = {}
        """Places of blocks of this step, by who asks for them in each layer."""
        counters.add("offload_failures", 0, cause="room")

    @classmethod
    def open(cls, setup: DeviceSetup) -> NodeDevice:
        """See ``ContextDeviceClass``.

        Raises:
            StoreError: a node refuses.
        """
        if setup.drives is None:
            raise TypeError("nodes attend to what they have, and the store is here")
        return cls(setup, setup.drives)

    @property
    def in_use(self) -> int:
        """See ``ContextDevice``."""
        return sum(wire is not None for wire in self._wires.current())

    def submit(self, work: ContextWork) -> NodeTicket:
        """See ``ContextDevice``.

        Raises:
            TypeError: the pages are none that nodes know.
        """
        pages = work.pages
        if isinstance(pages, StreamedContext):
            return _call_whole(self, work, pages)
        if isinstance(pages, ChosenPages):
            return _call_chosen(self, work, pages)
        raise TypeError(f"nodes do not attend to {type(pages).__name__}")

    def places(
        self, key: object, slots: I64, row: NDArray[np.signedinteger], names: Sequence[str]
    ) -> RowBlocks:
        """Nodes of blocks without a frame, row after row, found once in a step for each ``key``;
        see :meth:`NodeBlocks.locate`."""
        found = self._located.get(id(key))
        if found is None or found[1].version != self.blocks.version:
            found = key, self._locate(slots, row, names)
            self._located[id(key)] = found
        return found[1]

    def _locate(
        self, slots: I64, row: NDArray[np.signedinteger], names: Sequence[str]
    ) -> RowBlocks:
        while True:
            wires = self._wires.current()
            try:
                found = self.blocks.locate(slots, row, names, wires, self._deadline_s)
            except NodeFailedError as error:
                self._fail(error.node, wires[error.node], error)
                continue
            for node in self.blocks.full_nodes():
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
        deadline = time.monotonic() + self._deadline_s
        try:
            number = wire.send(message, self._deadline_s)
        except NodeError as error:
            self._fail(node, wire, error)
            return None
        return _Call(node, wire, number, blocks, message.layer, tokens, deadline)

    def take(self, call: _Call, like: torch.Tensor) -> _Answer | None:
        """Wait for an answer to a call for queries ``like`` these. None: there is none."""
        tokens = len(like) if call.tokens is None else len(call.tokens)
        heads, size = self._heads, self._head_size
        try:
            with failing(call.node):
                answer = call.wire.receive(call.number, call.deadline)
                found = np.frombuffer(answer.states, dtype="<f4").copy()
                _check(found, tokens * heads * (size + 2))
                slots, numbers = unpack(answer.slots), unpack(answer.pages)
                pages = self._files.geometry.pages_per_layer
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
            part = _spread(part, call.tokens, like)
        if len(slots):
            self._suspect(call, slots, numbers)
        counts = DeviceStatistics(
            partial_bytes=found.nbytes, wait_s=answer.wait_s, attend_s=answer.attend_s
        )
        return _Answer(part, slots, numbers, counts)

    def count(self, counts: DeviceStatistics) -> None:
        """A ticket has ended."""
        self._counts += counts

    def _suspect(self, call: _Call, slots: I64, numbers: I64) -> None:
        """Pages are wrong or unreadable on a node: have the other copies attended to."""
        files = self._files
        distinct = np.unique(slots)
        doubled = distinct[files.placement.doubled(distinct)]
        if len(doubled):
            devices = self.blocks.devices_of(slots, numbers, call.node)
            # Of what an earlier answer of this layer has told already nobody knows the place.
            which = np.isin(slots, doubled) & (devices >= 0)
            files.mark_suspect(slots[which], devices[which].astype(np.uint16))
        self.blocks.reclaim(distinct)
        self._counters.add("offload_failures", cause="answer")
        logger.warning(
            "ssdkv: offload: the node %s cannot attend to pages of %d blocks: they are read",
            self._links[call.node].peer.address,
            len(distinct),
        )

    def _fail(self, node: int, wire: AttentionWire | None, error: Exception) -> None:
        self._wires.fail(node, wire)
        self.blocks.version += 1  # the layers to come are placed without it
        logger.error(
            "ssdkv: offload: the node %s does not attend until it is back: %s; its part is read "
            "from other copies, or computed again",
            self._links[node].peer.address,
            error,
        )

    def reclaim(self, slots: I64) -> None:
        """See ``ContextDevice``."""
        self.blocks.reclaim(slots)

    def end_step(self) -> None:
        """See ``ContextDevice``."""
        self.blocks.end_step()
        self._located.clear()

    def statistics(self) -> DeviceStatistics:
        """See ``ContextDevice``."""
        return self._counts

    def close(self, timeout_s: float) -> bool:
        """End the connections; False: a thread still runs."""
        return self._wires.close(timeout_s)


def _spread(part: PartialState, tokens: torch.Tensor, like: torch.Tensor) -> PartialState:
    """States of some query tokens as states of all, on the host."""
    count, heads, size = like.shape
    full = PartialState.empty(count, heads, size, torch.device("cpu"))
    full.m[tokens], full.l[tokens], full.acc[tokens] = part.m, part.l, part.acc
    return full


class NodeTicket:
    """Calls to nodes about one piece of work. See ``Ticket``.

    Attributes:
        own: See ``Ticket``.
    """

    own: Foldable | None = None

    def __init__(self, device: NodeDevice, work: ContextWork, blocks: RowBlocks):
        """``blocks``: that the work is about."""
        self._device, self._work, self._blocks = device, work, blocks
        self._calls: list[_Call] = []
        self._answers: list[_Answer | None] | None = None
        self._counts = DeviceStatistics()

    @property
    def taken(self) -> Foldable:
        """See ``Ticket``."""
        return self._work.pages

    @property
    def progress(self) -> int:
        """See ``Ticket``: calls have deadlines of their own."""
        return 0

    @property
    def statistics(self) -> DeviceStatistics:
        """See ``Ticket``."""
        return self._counts

    def call(self, node: int, message: Attend, tokens: torch.Tensor | None) -> bool:
        """Call a node about its part of the blocks, with these query ``tokens``, or all. False: it
        is out of reach."""
        made = self._device.call(node, self._blocks, message, tokens)
        if made is None:
            return False
        self._calls.append(made)
        selection_bytes = len(message.selection) + len(message.masks)
        self._counts += DeviceStatistics(1, len(message.query), selection_bytes)
        return True

    def done(self) -> bool:
        """See ``Ticket``."""
        return self._answers is not None

    def wait(self, timeout_s: float) -> bool:
        """See ``Ticket``. It ends by the deadlines of the calls, whatever the time."""
        del timeout_s
        if self._answers is None:
            self._answers = [self._device.take(call, self._work.query) for call in self._calls]
            for answer in self._answers:
                if answer is not None:
                    self._counts += answer.counts
            self._device.count(self._counts)
        return True

    def partials(self) -> list[PartialState]:
        """See ``Ticket``."""
        return [answer.part for answer in self._answers or () if answer is not None]

    def left(self) -> Foldable | None:
        """See ``Ticket``."""
        raise NotImplementedError

    def withdraw(self, timeout_s: float) -> bool:
        """See ``Ticket``: nodes do not touch the store of the engine."""
        del timeout_s
        return True


class _WholeTicket(NodeTicket):
    """Work about contexts that are attended to as a whole."""

    def __init__(
        self,
        device: NodeDevice,
        work: ContextWork,
        pages: StreamedContext,
        blocks: RowBlocks,
    ):
        super().__init__(device, work, blocks)
        self._pages = pages

    def left(self) -> _LeftHeads | None:
        """See ``Ticket``."""
        blocks, layout = self._blocks, self._pages.layout
        if blocks.whole and len(self._calls) == len(blocks.at):
            left = np.zeros((len(blocks.slots), layout.kv_heads), dtype=np.bool_)
        else:
            asked = [call.node for call in self._calls]
            left = ~np.isin(self._nodes(slice(None)), asked)
        for call, answer in zip(self._calls, self._answers or (), strict=True):
            if answer is None:
                which = call.part.which
                left[which] |= self._nodes(which) == call.node
                continue
            head = answer.numbers // layout.groups % layout.kv_heads
            for slot, one in {*zip(answer.slots.tolist(), head.tolist(), strict=True)}:
                left[blocks.slots == slot, one] = True
        return _LeftHeads(self._pages, blocks.slots, left) if left.any() else None

    def _nodes(self, which: slice | I64) -> NDArray[np.int8]:
        """Node of each KV head of the layer of some blocks, [k, heads]."""
        layout = self._pages.layout
        pages = layout.kv_heads * layout.groups
        first = self._pages.layer * pages
        return self._blocks.nodes[which, first : first + pages : layout.groups]


@dataclass(frozen=True, slots=True)
class _LeftHeads:
    """Blocks of whole contexts that nodes did not attend to. See ``Foldable``.

    Attributes:
        away: All that nodes were to attend to.
        slots: Of the blocks, [m].
        left: Mask of their KV heads that are left, [m, heads].
    """

    away: StreamedContext
    slots: I64
    left: NDArray[np.bool_]

    def fold_by(
        self,
        kernels: ContextKernels,
        query: torch.Tensor,
        state: PartialState,
        scale: float,
        clock: StepClock,
        lease: AbstractContextManager[None],
    ) -> None:
        """See ``Foldable``: reads the blocks, KV heads that go together at a time."""
        away = self.away
        sets, of = np.unique(self.left, axis=0, return_inverse=True)
        for number, heads in enumerate(sets):
            if not heads.any():
                continue
            away.stream.bring(away.layer, np.unique(self.slots[of.ravel() == number]))
            part = PartialState(
                torch.full_like(state.m, -torch.inf),
                torch.zeros_like(state.l),
                torch.zeros_like(state.acc),
            )
            away.fold_by(kernels, query, part, scale, clock, lease)
            each = part.m.shape[1] // len(heads)
            others = torch.from_numpy(np.repeat(~heads, each)).to(part.m.device)
            part.m[:, others], part.l[:, others], part.acc[:, others] = -torch.inf, 0.0, 0.0
            select_kernels(state.acc.device).merge(state, part)
            clock.lap(MERGE)

    def restart(self) -> None:
        """See ``Foldable``."""
        self.away.restart()


class _ChosenTicket(NodeTicket):
    """Work about chosen pages."""

    def __init__(
        self,
        device: NodeDevice,
        work: ContextWork,
        pages: ChosenPages,
        blocks: RowBlocks,
        node: I64,
    ):
        """``node``: of each of the pages; those that are :data:`HERE` are the step's own."""
        super().__init__(device, work, blocks)
        self._pages, self._node = pages, node

    def begun(self) -> None:
        """All calls have been made: pages without a call are the step's own."""
        if len(here := np.flatnonzero(self._node == HERE)):
            self.own = self._pages.some(here)

    @property
    def taken(self) -> Foldable:
        """See ``Ticket``."""
        return self._pages.some(np.flatnonzero(self._node != HERE))

    def left(self) -> ChosenPages | None:
        """See ``Ticket``."""
        asked, pages = self._pages.wanted.pages, self._blocks.nodes.shape[1]
        again = np.zeros(len(self._node), dtype=np.bool_)
        for call, answer in zip(self._calls, self._answers or (), strict=True):
            if answer is None:
                again |= self._node == call.node
            elif len(answer.slots):
                names = answer.slots * pages + answer.numbers
                theirs = np.isin(asked.slots * pages + asked.numbers, names)
                again |= (self._node == call.node) & theirs
        return self._pages.some(np.flatnonzero(again)) if again.any() else None


def _call_whole(device: NodeDevice, work: ContextWork, pages: StreamedContext) -> NodeTicket:
    """Have nodes attend to contexts without a frame."""
    stream, batch, layer = pages.stream, pages.batch, pages.layer
    away = stream.away(layer)
    blocks = device.places(away, away.slots, away.row, work.requests)
    ticket = _WholeTicket(device, work, pages, blocks)
    place = np.full(int(batch.stream_row.max()) + 1, -1, dtype=np.int64)
    place[batch.stream_row] = np.arange(len(batch.stream_row))
    host = work.query if work.query.is_cpu else work.query.cpu()
    for node, part in blocks.at.items():
        of_batch = place[part.rows]
        counts = batch.query_count[of_batch].astype(np.int64)
        tokens = _tokens(batch.query_begin[of_batch].astype(np.int64), counts)
        every = np.array_equal(tokens, np.arange(batch.tokens))
        index = None if every else torch.from_numpy(tokens)
        message = Attend(
            layer,
            work.scale,
            part.packed,
            _bytes(host if index is None else host[index]),
            b"" if (counts == 1).all() else pack(counts),
            following=stream.following(layer),
        )
        ticket.call(node, message, index)
    return ticket


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


def _call_chosen(device: NodeDevice, work: ContextWork, pages: ChosenPages) -> NodeTicket:
    """Have nodes attend to chosen pages without a frame."""
    contexts, wanted = pages.contexts, pages.wanted
    away = np.flatnonzero(~contexts.framed)
    row = np.searchsorted(contexts.end, away, side="right")
    blocks = device.places(contexts, contexts.slots[away], contexts.rows[row], work.requests)
    place = np.full(len(contexts.slots), -1, dtype=np.int64)
    place[away] = np.arange(len(away))
    entry = place[wanted.blocks]
    node = np.full(len(entry), HERE, dtype=np.int64)
    there = np.flatnonzero(entry >= 0)
    node[there] = blocks.nodes[entry[there], wanted.pages.numbers[there]]
    ticket = _ChosenTicket(device, work, pages, blocks, node)
    for number, part in blocks.at.items():
        if (mine := np.flatnonzero(node == number)).size:
            message, index = _ask_for(work, pages, (blocks, number, part), entry, mine)
            if not ticket.call(number, message, index):
                node[mine] = HERE
    ticket.begun()
    return ticket


def _ask_for(
    work: ContextWork,
    pages: ChosenPages,
    at: tuple[RowBlocks, int, NodePart],
    entry: I64,
    mine: I64,
) -> tuple[Attend, torch.Tensor | None]:
    """Message for one node about the chosen pages ``mine``, whose blocks are ``entry``, and the
    query tokens in it; None: all."""
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
    return message, index
