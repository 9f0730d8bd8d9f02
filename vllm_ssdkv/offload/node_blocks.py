"""Places of blocks on nodes: which node attends to which page, and what each node was told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import NodeError, NodeFailedError
from vllm_ssdkv.node.client.attention import AttentionWire
from vllm_ssdkv.node.client.node_drives import NodeDrives
from vllm_ssdkv.node.protocol.messages import MAX_ROWS, pack
from vllm_ssdkv.store.format.slot_geometry import SUPERBLOCK_BYTES
from vllm_ssdkv.store.integrity.checksum_table import ChecksumTable
from vllm_ssdkv.store.io.slot_io import SlotIO

I64 = NDArray[np.int64]

HERE: Final = -1
"""Node of a page that no node attends to: it is read, and attended to here."""

_OFFSET_BITS: Final = 48


@dataclass(frozen=True, slots=True, eq=False)
class RowBlocks:
    """Blocks of rows that have no frame here, row after row.

    Attributes:
        slots: Of each block, [m].
        row: Number of its row, [m], ascending.
        nodes: Node of each page of K and V of it, int8 [m, pages]; :data:`HERE`: none.
        whole: Whether nodes have all of their pages.
        at: Of each node that has any: its part.
        version: Of :class:`NodeBlocks`; a later one may place them otherwise.
    """

    slots: I64
    row: NDArray[np.signedinteger]
    nodes: NDArray[np.int8]
    whole: bool
    at: Mapping[int, NodePart]
    version: int

    def check_missed(self, node: int, first: int, pages: int, slots: I64, numbers: I64) -> None:
        """Check that pages that a node says it misses are such that it was asked for.

        Args:
            node: Its number; it has a part.
            first, pages: Number of the layer's first page, and how many there are.
            slots, numbers: Slot of each missed page, and number in it, int64.

        Raises:
            NodeError: they are of other blocks, layers or nodes, or one comes twice.
        """
        if len(slots) != len(numbers):
            raise NodeError(f"the node misses {len(numbers)} pages of {len(slots)} slots")
        if not len(slots):
            return
        which = self.at[node].which
        known, place = np.unique(self.slots[which], return_index=True)
        inside = (numbers >= first) & (numbers < first + pages)
        if not (inside.all() and np.isin(slots, known).all()):
            raise NodeError("the node misses pages of blocks or layers that it was not asked for")
        at = which[place[np.searchsorted(known, slots)]]
        twice = len(np.unique(slots * self.nodes.shape[1] + numbers)) < len(slots)
        if twice or (self.nodes[at, numbers] != node).any():
            raise NodeError("the node misses a page that is on another one, or one page twice")


@dataclass(frozen=True, slots=True, eq=False)
class NodePart:
    """Part of some rows' blocks that is on one node.

    Attributes:
        which: Positions in the blocks, [k].
        rows: Rows that have any, [R].
        numbers: Number of each by which the node knows it, [R].
    """

    which: I64
    rows: I64
    numbers: I64

    @property
    def packed(self) -> bytes:
        """Numbers of the rows, as messages have them."""
        return pack(self.numbers)


@dataclass(slots=True)
class _Lists:
    """Rows that one node was told, and what it is to be told.

    Attributes:
        slots: Of the blocks of each row, by its number; those that were seen last are last.
        listed: Blocks of all of them.
        used: Numbers of those that the step has.
        void: Slots that the node is to forget.
        void_rows: Rows that it is to forget.
        full: Slots for which it had no room; None: it had room for all.
        said: Connection for which that was said.
    """

    slots: dict[int, I64] = field(default_factory=dict)
    listed: int = 0
    used: set[int] = field(default_factory=set)
    void: list[I64] = field(default_factory=list)
    void_rows: list[int] = field(default_factory=list)
    full: set[int] | None = None
    said: AttentionWire | None = None

    def had_no_room(self, slots: I64) -> None:
        """Note that the node had no room for these, or for rows."""
        self.full = (self.full or set()).union(slots.tolist())

    def follow(self, told: I64, *, same: bool) -> None:
        """Forget what the node was told, which are these slots; over the ``same`` connection it is
        to forget them, too."""
        rows = list(self.slots)
        self.slots, self.listed, self.full = {}, 0, None
        self.used.clear()
        if not same:
            self.void, self.void_rows = [], []
            return
        self.void_rows += rows
        if len(told):
            self.void.append(told)

    def get(self, number: int) -> I64 | None:
        """Blocks of a row, which the step has."""
        found = self.slots.pop(number, None)
        if found is not None:
            self.slots[number] = found
        self.used.add(number)
        return found

    def put(self, number: int, slots: I64) -> None:
        """The node knows these blocks of a row."""
        self.listed += len(slots) - len(self.slots.pop(number, ()))
        self.slots[number] = slots

    def make_room(self, more: int, most: int) -> tuple[list[int], bool]:
        """Drop rows that the step has not, so that ``more`` blocks keep to ``most``: these rows,
        and whether they do."""
        dropped: list[int] = []
        for number in list(self.slots):
            if self.listed + more <= most:
                break
            if number not in self.used:
                self.listed -= len(self.slots.pop(number))
                dropped.append(number)
        return dropped, self.listed + more <= most


class NodeBlocks:
    """See the module. Used by the thread of the forward pass.

    A node remembers a number of blocks, which it tells. Those that no row of the step has make
    room, the ones that were seen longest ago first; blocks for which there is none are read.

    Example:
        blocks = NodeBlocks(files, checksums, drives, slots=1000)
        found = blocks.locate(slots, row, names, wires)
    """

    def __init__(self, files: SlotIO, checksums: ChecksumTable, drives: NodeDrives, slots: int):
        """``files`` and ``checksums`` of the rank; ``slots``: numbers are below it."""
        self._files, self._checksums = files, checksums
        self._node_of = np.asarray(drives.node_of, dtype=np.int8)
        self._drive_of = np.asarray(drives.drive_of, dtype=np.int64)
        self._slots = slots
        self.version = 0
        """Changes when blocks are placed otherwise."""
        self._wires: list[AttentionWire | None] = [None] * len(drives.links)
        self._lists = [_Lists() for _ in drives.links]
        self._step = 0
        self._clear()

    def _clear(self) -> None:
        """Forget all, as if no node had been told anything."""
        pages = self._files.geometry.kv_pages
        self.version += 1
        # Row 0 is that of unknown slots: all of their pages are attended to here.
        self._row_of = np.zeros(self._slots, dtype=np.int32)
        self._free = list(range(63, 0, -1))
        self._device = np.full((64, pages), HERE, dtype=np.int16)
        self._node = np.full((64, pages), HERE, dtype=np.int8)
        self._nodes = np.zeros(64, dtype=np.uint64)
        self._whole = np.zeros(64, dtype=np.bool_)
        self._slot_of = np.full(64, -1, dtype=np.int64)
        self._seen = np.full(64, -1, dtype=np.int64)
        self._numbers: dict[str, int] = {}

    def reclaim(self, slots: I64) -> None:
        """These slots get other bytes, or other copies of them are to be attended to."""
        known = np.unique(slots[self._row_of[slots] != 0])
        if len(known):
            rows = self._row_of[known]
            self._free.extend(rows.tolist())
            self._nodes[rows] = 0
            self._row_of[known] = 0
            for lists in self._lists:
                lists.void.append(known)
            self.version += 1

    def end_step(self) -> None:
        """A step has ended: its blocks may make room for others. Those that had none are tried
        again where there is some."""
        for node, lists in enumerate(self._lists):
            lists.used.clear()
            wire, told = self._wires[node], self._told(node)
            if wire is None or lists.full is None:
                continue
            if np.count_nonzero(self._seen[told] == self._step) < wire.room.blocks:
                tried, lists.full = lists.full, None
                self.reclaim(np.array(sorted(tried), dtype=np.int64))
        self._step += 1

    def full_nodes(self) -> list[int]:
        """Nodes that had no room for blocks, each once for its connection."""
        found = []
        for node, lists in enumerate(self._lists):
            if lists.full is not None and lists.said is not self._wires[node]:
                lists.said = self._wires[node]
                found.append(node)
        return found

    def _told(self, node: int) -> NDArray[np.intp]:
        """Rows of the table that a node was told."""
        return np.flatnonzero(self._nodes & np.uint64(1 << node))

    def devices_of(self, slots: I64, numbers: I64, node: int) -> I64:
        """Device of the copy of each page, [n], that ``node`` was told; -1: none any more."""
        device = self._device[self._row_of[slots], numbers].astype(np.int64)
        return np.where((device >= 0) & (self._node_of[device] == node), device, HERE)

    def locate(
        self,
        slots: I64,
        row: NDArray[np.signedinteger],
        names: Sequence[str],
        wires: Sequence[AttentionWire | None],
        timeout: float,
    ) -> RowBlocks:
        """Find the nodes of blocks, and tell them what they do not know yet.

        Args:
            slots: Of blocks without a frame, row after row, [m].
            row: Row of each, [m], ascending.
            names: Request of each row.
            wires: To each node; None: it is out of reach.
            timeout: Seconds for what is told.

        Raises:
            NodeFailedError: a node is out of reach from now on; the rest was not told.
        """
        self._follow(wires)
        self._tell_void(timeout)
        self._seen[self._row_of[slots]] = self._step  # none of these makes room
        unknown = np.unique(slots[self._row_of[slots] == 0])
        if len(unknown):
            self._place(unknown, timeout)
        table = self._row_of[slots]
        self._seen[table] = self._step
        parts: dict[int, NodePart] = {}
        nodes, of_pages = self._nodes[table], self._node[table]
        whole = bool(self._whole[table].all())
        for node, wire in enumerate(self._wires):
            if wire is None:
                continue
            which = np.flatnonzero(nodes & np.uint64(1 << node))
            if not len(which):
                continue
            part = self._tell_rows(node, wire, which, slots, row, names, timeout)
            if len(part.rows):
                parts[node] = part
            if len(part.which) < len(which):  # rows for which the node has no room
                left = np.setdiff1d(which, part.which)
                of_pages[left] = np.where(of_pages[left] == node, HERE, of_pages[left])
                whole = False
                self._lists[node].had_no_room(slots[:0])
        return RowBlocks(slots, row, of_pages, whole, parts, self.version)

    def _follow(self, wires: Sequence[AttentionWire | None]) -> None:
        """A node that came or went changes who attends to what."""
        if all(mine is theirs for mine, theirs in zip(self._wires, wires, strict=True)):
            return
        told = np.flatnonzero(self._row_of)
        for lists, mine, theirs in zip(self._lists, self._wires, wires, strict=True):
            lists.follow(told, same=mine is theirs)
        self._clear()
        self._wires = list(wires)

    def _tell_void(self, timeout: float) -> None:
        for node, (lists, wire) in enumerate(zip(self._lists, self._wires, strict=True)):
            if not lists.void and not lists.void_rows:
                continue
            slots = np.concatenate([*lists.void, np.zeros(0, dtype=np.int64)])
            rows, lists.void, lists.void_rows = lists.void_rows, [], []
            if wire is not None:
                with failing(node):
                    wire.forget(slots, rows, timeout)

    def _place(self, slots: I64, timeout: float) -> None:
        """Choose who attends to blocks, [n], and tell them."""
        geometry = self._files.geometry
        known = self._checksums.get(slots, 0, geometry.kv_pages)
        slots, marks = slots[known[1]], known[0].marks[known[1], :, 0]
        if not len(slots):
            return
        device, offset = self._devices(slots)
        there = np.where(device >= 0, self._node_of[device], HERE).astype(np.int8)
        away = [node for node, wire in enumerate(self._wires) if wire is None]
        there[np.isin(there, away)] = HERE
        # Who attends in a node's stead does so by block and KV head.
        by_head = there.reshape(len(slots), -1, geometry.groups)
        by_head[(by_head != by_head[:, :, :1]).any(axis=2)] = HERE
        for node, wire in enumerate(self._wires):
            if wire is not None:
                self._fit(node, wire, slots, there, timeout)
        drive = self._drive_of[device]
        places = drive << _OFFSET_BITS | (offset - SUPERBLOCK_BYTES)
        rows = self._take_rows(slots)
        self._node[rows], self._device[rows] = there, device
        self._whole[rows] = (there != HERE).all(axis=1)
        self._slot_of[rows] = slots
        self._nodes[rows] = 0
        for node, wire in enumerate(self._wires):
            mine = there == node
            which = np.flatnonzero(mine.any(axis=1))
            if wire is None or not len(which):
                continue
            self._nodes[rows[which]] |= np.uint64(1 << node)
            of_node = np.where(mine[which], places[which], -1)
            with failing(node):
                wire.tell_blocks(slots[which], of_node, marks[which], timeout)

    def _fit(
        self, node: int, wire: AttentionWire, slots: I64, there: NDArray[np.int8], timeout: float
    ) -> None:
        """Make room on a node for blocks that are ``there``, [n, pages]; those for which there is
        none are attended to here."""
        new = np.flatnonzero((there == node).any(axis=1))
        told = self._told(node)
        lacking = len(told) + len(new) - wire.room.blocks
        if lacking <= 0:
            return
        old = told[self._seen[told] < self._step]
        if len(old):
            old = old[np.argsort(self._seen[old], kind="stable")][:lacking]
            self.reclaim(self._slot_of[old])
            self._tell_void(timeout)
        if lacking > len(old):
            left = new[len(new) - min(len(new), lacking - len(old)) :]
            there[left] = np.where(there[left] == node, HERE, there[left])
            self._lists[node].had_no_room(slots[left])

    def _take_rows(self, slots: I64) -> NDArray[np.int32]:
        while len(slots) > len(self._free):
            have = len(self._node)
            self._free.extend(range(2 * have - 1, have - 1, -1))
            self._node = np.concatenate([self._node, np.full_like(self._node, HERE)])
            self._device = np.concatenate([self._device, np.full_like(self._device, HERE)])
            self._nodes = np.concatenate([self._nodes, np.zeros_like(self._nodes)])
            self._whole = np.concatenate([self._whole, np.zeros_like(self._whole)])
            self._slot_of = np.concatenate([self._slot_of, np.full_like(self._slot_of, -1)])
            self._seen = np.concatenate([self._seen, np.full_like(self._seen, -1)])
        self._row_of[slots] = self._free[-len(slots) :]
        del self._free[-len(slots) :]
        return self._row_of[slots]

    def _devices(self, slots: I64) -> tuple[I64, I64]:
        """Device of each page of K and V of slots, -1: none alone, and its offset there; both
        [n, pages]. Of two copies the one that a read would choose."""
        geometry, files = self._files.geometry, self._files
        page, pages = geometry.page_bytes, geometry.kv_pages
        length = pages * page
        first, second = files.placement.copies(slots, geometry.header_bytes, length, merged=False)
        chosen = first.device.astype(np.int64), first.offset.astype(np.int64)
        if second is not None:
            take = files.replicas.choose(slots[first.slot_index], first, second)
            chosen = (
                np.where(take, second.device, first.device).astype(np.int64),
                np.where(take, second.offset, first.offset).astype(np.int64),
            )
        begin = first.buffer.astype(np.int64) - first.slot_index * length
        lengths = first.length.astype(np.int64)
        skipped = -begin % page
        count = np.maximum(0, (lengths - skipped) // page)
        piece = np.repeat(np.arange(len(count)), count)
        within = np.arange(len(piece)) - np.repeat(np.cumsum(count) - count, count)
        number = (begin + skipped)[piece] // page + within
        device = np.full((len(slots), pages), -1, dtype=np.int64)
        offset = np.zeros_like(device)
        device[first.slot_index[piece], number] = chosen[0][piece]
        offset[first.slot_index[piece], number] = chosen[1][piece] + skipped[piece] + within * page
        return device, offset

    def _tell_rows(
        self,
        node: int,
        wire: AttentionWire,
        which: I64,
        slots: I64,
        row: NDArray[np.signedinteger],
        names: Sequence[str],
        timeout: float,
    ) -> NodePart:
        """Tell a node the blocks of rows that it has, as far as it does not know them. Rows for
        which it has no room are left out."""
        of_row = row[which].astype(np.int64)
        rows, begin = np.unique(of_row, return_index=True)
        edges = [*begin.tolist(), len(which)]
        lists, numbers, fits = self._lists[node], [], np.ones(len(rows), dtype=np.bool_)
        for i, one in enumerate(rows.tolist()):
            number = self._number(names[one])
            wanted = slots[which[edges[i] : edges[i + 1]]]
            before = lists.get(number)
            if before is None or not np.array_equal(before, wanted):
                fits[i] = self._tell_row(node, wire, number, wanted, timeout)
            if fits[i]:
                numbers.append(number)
        if not fits.all():
            rows, which = rows[fits], which[np.isin(of_row, rows[fits])]
        return NodePart(which, rows, np.array(numbers, dtype=np.int64))

    def _tell_row(
        self, node: int, wire: AttentionWire, number: int, wanted: I64, timeout: float
    ) -> bool:
        """Tell a node the blocks of a row; False: it has no room for them."""
        lists = self._lists[node]
        before = lists.slots.get(number)
        known = 0 if before is None else len(before)
        dropped, fits = lists.make_room(len(wanted) - known, wire.room.listed)
        with failing(node):
            if dropped:
                wire.forget(np.zeros(0, dtype=np.int64), dropped, timeout)
            if fits:
                keep = 0 if before is None else _common(before, wanted)
                wire.tell_row(number, keep, wanted[keep:], timeout)
                lists.put(number, wanted)
        return fits

    def _number(self, name: str) -> int:
        """Number of a request's row; the one that was seen longest ago makes room."""
        number = self._numbers.pop(name, None)
        if number is None:
            number = len(self._numbers)
            if number >= MAX_ROWS:
                number = self._numbers.pop(next(iter(self._numbers)))
        self._numbers[name] = number
        return number


@contextlib.contextmanager
def failing(node: int) -> Iterator[None]:
    """Say which node it is that fails.

    Raises:
        NodeFailedError: in place of any NodeError.
    """
    try:
        yield
    except NodeFailedError:
        raise
    except NodeError as error:
        raise NodeFailedError(node, str(error)) from error


def _common(before: I64, after: I64) -> int:
    """Length of the common beginning."""
    length = min(len(before), len(after))
    differ = np.flatnonzero(before[:length] != after[:length])
    return int(differ[0]) if len(differ) else length
