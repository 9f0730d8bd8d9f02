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
from vllm_ssdkv.node.protocol.messages import pack
from vllm_ssdkv.store.format.slot_geometry import SUPERBLOCK_BYTES
from vllm_ssdkv.store.integrity.checksum_table import ChecksumTable
from vllm_ssdkv.store.io.slot_io import SlotIO

I64 = NDArray[np.int64]

HERE: Final = -1
"""Node of a page that no node attends to: it is read, and attended to here."""

_OFFSET_BITS: Final = 48
_MOST_ROWS: Final = 4096
"""Rows that a node knows, at most: those that were seen last stay."""


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
    """Rows that one node was told."""

    slots: dict[int, I64] = field(default_factory=dict)


class NodeBlocks:
    """See the module. Used by the thread of the forward pass.

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
        self.clear()

    def clear(self) -> None:
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
        self._lists = [_Lists() for _ in self._wires]
        self._numbers: dict[str, int] = {}
        self._void: list[I64] = []

    def reclaim(self, slots: I64) -> None:
        """These slots get other bytes, or other copies of them are to be attended to."""
        known = np.unique(slots[self._row_of[slots] != 0])
        if len(known):
            self._free.extend(self._row_of[known].tolist())
            self._row_of[known] = 0
            self._void.append(known)
            self.version += 1

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
        unknown = np.unique(slots[self._row_of[slots] == 0])
        if len(unknown):
            self._place(unknown, timeout)
        table = self._row_of[slots]
        parts: dict[int, NodePart] = {}
        nodes = self._nodes[table]
        for node, wire in enumerate(self._wires):
            if wire is None:
                continue
            which = np.flatnonzero(nodes & np.uint64(1 << node))
            if len(which):
                parts[node] = self._tell_rows(node, wire, which, slots, row, names, timeout)
        whole = bool(self._whole[table].all())
        return RowBlocks(slots, row, self._node[table], whole, parts, self.version)

    def _follow(self, wires: Sequence[AttentionWire | None]) -> None:
        """A node that came or went changes who attends to what."""
        if all(mine is theirs for mine, theirs in zip(self._wires, wires, strict=True)):
            return
        told = np.flatnonzero(self._row_of)
        self.clear()
        if len(told):
            self._void.append(told)
        self._wires = list(wires)

    def _tell_void(self, timeout: float) -> None:
        if not self._void:
            return
        slots = np.concatenate(self._void)
        self._void = []
        for node, wire in enumerate(self._wires):
            if wire is not None:
                with failing(node):
                    wire.forget(slots, [], timeout)

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
        drive = self._drive_of[device]
        places = drive << _OFFSET_BITS | (offset - SUPERBLOCK_BYTES)
        rows = self._take_rows(slots)
        self._node[rows], self._device[rows] = there, device
        self._whole[rows] = (there != HERE).all(axis=1)
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

    def _take_rows(self, slots: I64) -> NDArray[np.int32]:
        while len(slots) > len(self._free):
            have = len(self._node)
            self._free.extend(range(2 * have - 1, have - 1, -1))
            self._node = np.concatenate([self._node, np.full_like(self._node, HERE)])
            self._device = np.concatenate([self._device, np.full_like(self._device, HERE)])
            self._nodes = np.concatenate([self._nodes, np.zeros_like(self._nodes)])
            self._whole = np.concatenate([self._whole, np.zeros_like(self._whole)])
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
        """Tell a node the blocks of rows that it has, as far as it does not know them."""
        of_row = row[which].astype(np.int64)
        rows, begin = np.unique(of_row, return_index=True)
        edges = [*begin.tolist(), len(which)]
        lists, numbers = self._lists[node].slots, []
        for i, one in enumerate(rows.tolist()):
            number = self._number(names[one])
            numbers.append(number)
            wanted = slots[which[edges[i] : edges[i + 1]]]
            before = lists.get(number)
            if before is not None and np.array_equal(before, wanted):
                continue
            keep = 0 if before is None else _common(before, wanted)
            with failing(node):
                wire.tell_row(number, keep, wanted[keep:], timeout)
            lists[number] = wanted
        return NodePart(which, rows, np.array(numbers, dtype=np.int64))

    def _number(self, name: str) -> int:
        """Number of a request's row; the one that was seen longest ago makes room."""
        number = self._numbers.pop(name, None)
        if number is None:
            number = len(self._numbers)
            if number >= _MOST_ROWS:
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
