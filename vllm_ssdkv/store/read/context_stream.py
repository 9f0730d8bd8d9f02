"""One step's walk over contexts that do not fit in HBM: layer by layer, in chunks, read ahead.

Rows that choose their pages (``store/read/page_fetcher.py``) take part in the first layers only.

Blocks whose frames are in DRAM are attended to where they lie. The others are read in chunks of
one layer into staging buffers; while one chunk is attended to, the next ones are being read, across
layer borders, so layer i's reads overlap layer i - 1's compute. A block that several rows share is
read once for all of them. What has arrived is checked and decrypted in a thread beside the compute
(:mod:`vllm_ssdkv.store.io.async_verifier`).

Blocks whose read hangs, and that have a copy on a device in use, come at the end of their layer:
that copy is read into other pieces. Waiting for reads that do not end is bounded by one deadline
(``io.deadline``) per device that hangs: who has waited that long takes the device out of use,
nothing more is sent there, and a block that has no copy elsewhere is given up.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.store.cache.frames import FrameCache, count_distinct
from vllm_ssdkv.store.integrity.checksum_table import ChecksumTable
from vllm_ssdkv.store.io.async_verifier import AsyncVerifier
from vllm_ssdkv.store.io.buffer_pool import BufferPool
from vllm_ssdkv.store.io.digest_source import SlotExtents, TableDigests
from vllm_ssdkv.store.io.slot_io import SlotIO
from vllm_ssdkv.store.io.verified_read import VerifiedRead
from vllm_ssdkv.store.memory.memory_plan import CHUNKS
from vllm_ssdkv.store.read.context_frames import NO_SLOTS, ContextFrames
from vllm_ssdkv.store.read.peer_path import ReadPath

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Piece:
    """Context blocks of one layer that are in memory now, grouped by row.

    Row r owns ``base[row_begin[r]:row_end[r]]``: absolute addresses of the blocks' pages of this
    layer, which rows may share. ``index`` is each block's index in its request.
    """

    base: NDArray[np.uint64]
    index: NDArray[np.int64]
    row_begin: NDArray[np.int32]
    row_end: NDArray[np.int32]
    digests: NDArray[np.uint64] | None = None
    """Digests of each block's pages that are still to be verified, [B, pages]; None: all are
    right."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Distinct ``slots`` [n], and the blocks of rows that they are, [m], row after row.

    Attributes:
        slots: In the order in which rows first name them.
        which: Position in ``slots`` of each block.
        index: Its index in its request.
        row: Its row.
        checked: Whether it has to come by the path on which the host checks it.
    """

    slots: NDArray[np.int64]
    which: NDArray[np.int64]
    index: NDArray[np.int64]
    row: NDArray[np.int32]
    checked: bool = False

    @classmethod
    def of(
        cls, slots: NDArray[np.int64], index: NDArray[np.int64], row: NDArray[np.int32]
    ) -> _Chunk:
        """Blocks, [m], of which some may be the same slot."""
        if not len(slots):  # as in most steps: DRAM has all
            return cls(slots, slots, index, row)
        distinct, first, which = np.unique(slots, return_index=True, return_inverse=True)
        order = np.argsort(first)
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        return cls(distinct[order], place[which], index, row)

    def part(self, slots: NDArray[np.int64]) -> _Chunk:
        """The blocks that are some of the slots, by ascending position, [k]."""
        place = np.full(len(self.slots), -1, dtype=np.int64)
        place[slots] = np.arange(len(slots))
        kept = np.flatnonzero(place[self.which] >= 0)
        which = place[self.which[kept]]
        return _Chunk(self.slots[slots], which, self.index[kept], self.row[kept], self.checked)


@dataclass(frozen=True, slots=True)
class Part:
    """Part of a layer's contexts: blocks with a frame, and all of the others or none.

    The blocks with a frame need nothing of the stream but their addresses, so any thread may ask
    for the pieces of a part that has no others.

    Attributes:
        frame: Absolute addresses of frames, row after row, [F].
        index: Index of each such block in its request, [F].
        begin, end: Range of each row in these, [R].
        slots: Of the same blocks, [F].
        arriving: Whether blocks without a frame, which come from devices, are in it.
        blocks: Distinct ones.
        pairs: Blocks of all rows: those that rows share count for each.
    """

    frame: NDArray[np.uint64]
    index: NDArray[np.int64]
    begin: NDArray[np.int32]
    end: NDArray[np.int32]
    slots: NDArray[np.int64]
    arriving: bool
    blocks: int
    pairs: int


@dataclass(frozen=True, slots=True, eq=False)
class Away:
    """Blocks of a layer's contexts without a frame, row after row. All arrays [m].

    Attributes:
        slots: Of each block, which rows may share.
        row: Its row, ascending.
    """

    slots: NDArray[np.int64]
    row: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Walk:
    """Walk of one layer: all of its blocks, and chunks of those without a frame."""

    whole: Part
    chunks: list[_Chunk]
    frames: int
    """Distinct ones."""
    away: Away
    cuts: dict[float | None, tuple[Part, Part]] = field(default_factory=dict)
    """Parts by a device's share, of the two newest ones: a step has one, or all and one."""

    @classmethod
    def over(
        cls,
        held: ContextFrames,
        row: NDArray[np.int32],
        index: NDArray[np.int64],
        which: NDArray[np.int64],
        per_chunk: int,
    ) -> _Walk:
        """Walk over blocks ``which``, ascending, of all blocks of the step. All other arrays have
        one element for each of these: its row, and its index in its request."""
        rows, slots = len(held.begin), held.slots
        if not len(which):  # as where all rows choose
            edge = np.zeros(rows, dtype=np.int32)
            nowhere = np.zeros(0, dtype=np.uint64)
            part = Part(nowhere, slots[:0], edge, edge, slots[:0], False, 0, 0)
            return cls(part, [], 0, Away(slots[:0], row[:0]))
        here = held.framed[which]
        resident, away = (which, which[:0]) if here.all() else (which[here], which[~here])
        blocks = _Chunk.of(slots[away], index[away], row[away])
        every = np.arange(len(blocks.slots))
        distinct = count_distinct(held.frames[resident])  # X of several blocks shares a slot
        whole = Part(
            held.address[resident],
            index[resident],
            *_by_row(row[resident], rows),
            slots[resident],
            len(away) > 0,
            distinct + len(blocks.slots),
            len(which),
        )
        chunks = [
            blocks.part(every[i : i + per_chunk]) for i in range(0, len(every), per_chunk or 1)
        ]
        return cls(whole, chunks, distinct, Away(slots[away], row[away]))

    def part(self, frames: slice, *, arriving: bool) -> Part:
        """Some of the blocks with a frame, with all others or none."""
        whole = self.whole
        away = self.chunks if arriving else []
        if frames == slice(0, len(whole.frame)) and bool(away) == whole.arriving:
            return whole
        first, count = frames.start, frames.stop - frames.start
        begin, end = (np.clip(edge - first, 0, count) for edge in (whole.begin, whole.end))
        once = self.frames == len(whole.frame)
        distinct = count if once else count_distinct(whole.frame[frames])
        return Part(
            whole.frame[frames],
            whole.index[frames],
            begin.astype(np.int32),
            end.astype(np.int32),
            whole.slots[frames],
            bool(away),
            distinct + sum(len(chunk.slots) for chunk in away),
            count + sum(len(chunk.which) for chunk in away),
        )

    def cut(self, share: float | None) -> tuple[Part, Part]:
        """See :meth:`ContextStream.parts`."""
        if share not in self.cuts:
            if len(self.cuts) > 1:
                del self.cuts[next(iter(self.cuts))]
            frames = len(self.whole.frame)
            away = self.whole.pairs - frames
            theirs = away if share is None else round(share * self.whole.pairs)
            arriving = 0 < away <= theirs
            first = frames - (theirs - away if arriving else min(theirs, frames))
            self.cuts[share] = (
                self.part(slice(first, frames), arriving=arriving),
                self.part(slice(0, first), arriving=not arriving),
            )
        return self.cuts[share]


@dataclass(frozen=True, slots=True)
class _Kind:
    """Rows that take part in each layer; see :class:`ContextStream`. ``per_chunk``: blocks of a
    chunk, at most."""

    sparse: tuple[int, ...]
    dense_layers: int
    layers: Sequence[int] | None
    per_chunk: int


@dataclass(frozen=True, slots=True)
class _StepWalks:
    """Walks of all layers over contexts with these ``frames``.

    Attributes:
        in_dram, on_ssd: Distinct blocks of all layers, with a frame and without.
    """

    frames: ContextFrames
    kind: _Kind
    of_layer: list[_Walk]
    in_dram: int
    on_ssd: int

    @classmethod
    def of(cls, held: ContextFrames, kind: _Kind, every: int) -> _StepWalks:
        """Walks of so many layers."""
        layers = range(every) if kind.layers is None else kind.layers
        lengths = held.end - held.begin
        row = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        index = np.arange(len(row)) - np.repeat(held.begin, lengths)

        def walk(which: NDArray[np.int64]) -> _Walk:
            return _Walk.over(held, row, index, which, kind.per_chunk)

        walks = [walk(np.arange(len(row)))] * every
        if len(layers) < every:
            nothing = walk(np.zeros(0, dtype=np.int64))
            for layer in set(range(every)).difference(layers):
                walks[layer] = nothing
        if kind.sparse and kind.dense_layers:
            exact = walk(np.flatnonzero(~np.isin(row, kind.sparse)))
            for layer in layers[kind.dense_layers :]:
                walks[layer] = exact
        on_ssd = sum(len(chunk.slots) for one in walks for chunk in one.chunks)
        return cls(held, kind, walks, sum([one.frames for one in walks]), on_ssd)


@dataclass(frozen=True, slots=True)
class _Read:
    """One chunk of one layer on its way by a path; None where nothing needs to be read: every row
    is poisoned."""

    chunk: _Chunk
    layer: int
    read: VerifiedRead | None
    path: ReadPath


def _by_row(row: NDArray[np.int32], rows: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    edges = np.searchsorted(row, np.arange(rows + 1)).astype(np.int32)
    return edges[:-1].copy(), edges[1:].copy()


class ContextStream:
    """Streams the contexts of one step's rows. Used by one thread at a time.

    That is the thread that runs the forward pass, or, for the pieces of a layer, the thread of the
    device that attends to them. They hand it over by a lease (``offload/protocol.py``): who has it
    may ask for the next piece, and whoever takes it over calls :meth:`restart`. Where both attend
    to a part of a layer (:meth:`parts`), the one without blocks from devices does not use it.

    After a failure the row is *poisoned*: its output must be thrown away. Other rows go on.
    """

    def __init__(
        self,
        files: SlotIO,
        frames: FrameCache,
        seals: ChecksumTable,
        staging: BufferPool,
        verifier: AsyncVerifier,
        contexts: Sequence[NDArray[np.int64]],
        sparse: Collection[int] = (),
        dense_layers: int = 0,
        layers: Sequence[int] | None = None,
        pages: int | None = None,
        peer: ReadPath | None = None,
        latest: ContextStream | None = None,
        *,
        elsewhere: bool = False,
    ):
        """``contexts[r]`` are the slots of row r's blocks 0, 1, 2, ... that lie before its window;
        ``staging`` has pieces of ``layer_bytes``. Contexts are walked over in these ``layers``,
        ascending (default: in all), those of rows in ``sparse`` in the first ``dense_layers`` of
        them only. Of each block's layer its first ``pages`` are read (default: all). With a
        ``peer`` what is read from devices goes its way, for the device that attends to all of it;
        see :meth:`come_checked`. ``latest``: of the step before, whose walks serve this one where
        nothing has changed. ``elsewhere``: what has no frame is attended to where it lies, and is
        read if :meth:`bring` asks for it."""
        self._host = ReadPath(files, files.codec, staging, frames.arena.address)
        self._peer = peer
        self._refused = False
        """True if the latest piece is to be read again, by the host's path."""
        self._frames = frames
        self._seals = seals
        self._verifier = verifier
        self._rows = len(contexts)
        self._pages = files.geometry.pages_per_layer if pages is None else pages
        self.closed = False
        self.poisoned: set[int] = set()
        self.bad: list[int] = []
        """Slots with wrong bytes, or that are given up."""
        self.unread: list[int] = []
        """Slots that could not be read, and may be later."""
        if sparse and not dense_layers:
            skipped = set(sparse)
            contexts = [NO_SLOTS if i in skipped else slots for i, slots in enumerate(contexts)]
            sparse = ()
        known: _StepWalks | None = None if latest is None else latest._step
        held = ContextFrames.borrow(frames, contexts, None if known is None else known.frames)
        per_chunk = 0
        if not held.in_frames:
            pieces = min(path.staging.usable() for path in (self._host, peer or self._host))
            per_chunk = max(1, pieces // CHUNKS)
        kind = _Kind(tuple(sparse), dense_layers, layers, per_chunk)
        if known is None or known.frames is not held or known.kind != kind:
            known = _StepWalks.of(held, kind, files.geometry.layers)
        self._step: _StepWalks = known
        self._walks = known.of_layer
        self.pages_in_dram = known.in_dram * self._pages
        """Pages of the step's contexts in DRAM; those that rows share count once."""
        self.pages_on_ssd = known.on_ssd * self._pages
        """Likewise on devices, when the step began."""
        self.pages_used = 0
        """Of those, pages that have been read, and are right."""
        self._todo = collections.deque(
            []
            if elsewhere or self.in_frames
            else [(i, chunk) for i, walk in enumerate(self._walks) for chunk in walk.chunks]
        )
        """Layer and chunk of the reads to start, in the order in which they are needed."""
        self._reads: collections.deque[_Read] = collections.deque()
        self._attended: _Read | None = None
        """The chunk behind the latest piece."""
        self._read_ahead()

    @property
    def in_frames(self) -> bool:
        """Check whether all blocks have a frame: nothing is read, and no row can be lost."""
        return not self.pages_on_ssd

    @property
    def frames(self) -> ContextFrames:
        """Frames of the contexts of all rows, in the layers in which these are attended to."""
        return self._step.frames

    def whole(self) -> list[Part]:
        """All contexts of each layer. The same object for all layers in which the same rows take
        part."""
        return [walk.whole for walk in self._walks]

    def parts(self, layer: int, share: float | None) -> tuple[Part, Part]:
        """Cut a layer's contexts in two, for a device and for the thread of the forward pass.

        Blocks without a frame go one way together: to the device if ``share`` of all blocks is at
        least as many. Only who has them uses the stream. Blocks with a frame make up the rest.

        Args:
            layer: From 0.
            share: The device's of the blocks of all rows, from 0 to 1; None: all without a frame,
                and no others.
        """
        return self._walks[layer].cut(share)

    def away(self, layer: int) -> Away:
        """Blocks of a layer's contexts without a frame. The same object for all layers in which the
        same rows take part."""
        return self._walks[layer].away

    def following(self, layer: int) -> int:
        """Layer whose contexts come next, if it has the same blocks without a frame; else -1."""
        later = range(layer + 1, len(self._walks))
        after = next((one for one in later if self._walks[one].whole.pairs), -1)
        return after if after >= 0 and self.away(after) is self.away(layer) else -1

    def bring(self, layer: int, slots: NDArray[np.int64]) -> None:
        """Read blocks of a layer that were to be attended to elsewhere: those of these slots.

        They come in the next :meth:`pieces` of the layer.
        """
        for chunk in reversed(self._walks[layer].chunks):
            wanted = np.flatnonzero(np.isin(chunk.slots, slots))
            if len(wanted):
                self._todo.appendleft((layer, chunk.part(wanted)))
        self._read_ahead()

    def pieces(self, layer: int, part: Part | None = None) -> Iterator[Piece]:
        """All context blocks of a layer (0-based, asked for in ascending order), piece by piece;
        with a ``part`` of them, its own.

        A piece's memory is valid until the next one is asked for. Blocks on I/O, for reads that do
        not end at most one deadline per device that hangs: afterwards it is out of use.
        """
        walk = self._walks[layer]
        if part is None:
            part = walk.whole
        if part.arriving and self._upcoming() != layer:
            raise RuntimeError(f"layer {layer} was asked for, layer {self._upcoming()} comes next")
        if len(part.frame):
            offset = np.uint64(self._host.files.geometry.layer_offset(layer))
            yield Piece(part.frame + offset, part.index, part.begin, part.end)
        if not part.arriving:
            return
        while self._upcoming() == layer:
            if not self._reads:
                self._skip_chunk()
                continue
            read = self._attended = self._reads.popleft()
            piece, hanging = self._arrive(read)
            if piece is not None:
                yield piece
            self._end_piece()
            if hanging is not None:
                self._put_off(layer, hanging)
            if self._refused:
                self._refused = False
                self._put_off(layer, replace(read.chunk, checked=True))
            self._read_ahead()

    def refuse_piece(self) -> None:
        """The latest piece has wrong pages, and is not attended to: it comes again, checked."""
        self._refused = True

    def come_checked(self) -> None:
        """Bring all pieces by the host's path from now on: who asks for them checks nothing. Those
        that are on their way by another one are read again."""
        if self._peer is None:
            return
        self._peer = None
        layer = self._upcoming()
        if layer >= 0 and self._reads:
            while self._reads:
                read = self._reads.pop()
                self._give_back(read)
                self._todo.appendleft((read.layer, read.chunk))
            self._read_ahead()

    def blocks(self, layer: int) -> int:
        """Distinct blocks of a layer's contexts."""
        return self._walks[layer].whole.blocks

    def slots_of(self, layer: int, part: Part) -> NDArray[np.int64]:
        """Slots of the distinct blocks of a part. Such as have a frame may repeat."""
        away = [chunk.slots for chunk in self._walks[layer].chunks] if part.arriving else []
        return np.concatenate([part.slots, *away])

    def restart(self, layer: int) -> None:
        """Have all pieces of a layer come again, for another caller of :meth:`pieces`.

        The iterator that was given up must not be used any more. Memory of its latest piece goes
        back, so who may still read that piece gets wrong bytes.
        """
        self._end_piece()
        while self._reads:
            read = self._reads.pop()
            self._give_back(read)
            self._todo.appendleft((read.layer, read.chunk))
        while self._todo and self._todo[0][0] == layer:
            self._todo.popleft()
        self._todo.extendleft((layer, chunk) for chunk in reversed(self._walks[layer].chunks))
        self._read_ahead()

    def close(self) -> None:
        """End the step: its memory goes back, that of reads in flight when they end."""
        if self.closed:
            return
        self.closed = True
        self._end_piece()
        for read in self._reads:
            self._give_back(read)
        self._reads.clear()
        self._step.frames.give_back(self._frames)

    # ---- reading ----

    def _upcoming(self) -> int:
        """Layer of the chunk that comes next, -1 behind the last one."""
        if self._reads:
            return self._reads[0].layer
        return self._todo[0][0] if self._todo else -1

    def _put_off(self, layer: int, chunk: _Chunk) -> None:
        """Read a chunk once more, behind what is in flight of its layer."""
        while self._reads and self._reads[-1].layer != layer:  # too early: its memory is needed
            read = self._reads.pop()
            self._give_back(read)
            self._todo.appendleft((read.layer, read.chunk))
        self._todo.appendleft((layer, chunk))

    def _read_ahead(self) -> None:
        while self._todo:
            layer, chunk = self._todo[0]
            path = self._host if self._peer is None or chunk.checked else self._peer
            if self._hopeless(chunk):
                self._reads.append(_Read(chunk, layer, None, path))
                self._todo.popleft()
                continue
            if not self._reads:  # what the last step left in flight ends soon
                path.staging.wait(len(chunk.slots))
                room = path.staging.free()
                if 0 < room < len(chunk.slots):  # reads that do not end hold the rest
                    every = np.arange(len(chunk.slots))
                    self._todo[0] = (layer, chunk.part(every[room:]))
                    chunk = chunk.part(every[:room])
                    self._todo.appendleft((layer, chunk))
            places = path.staging.take(len(chunk.slots))
            if places is None:
                return
            first = self._host.files.geometry.first_page(layer)
            extents = SlotExtents(chunk.slots, first, self._pages, places)
            read = VerifiedRead(path.files, extents, TableDigests(path.codec, self._seals, extents))
            if not path.unchecked:
                read.verify_beside(self._verifier)
            self._reads.append(_Read(chunk, layer, read, path))
            self._todo.popleft()

    def _hopeless(self, chunk: _Chunk) -> bool:
        return self.poisoned.issuperset(np.unique(chunk.row).tolist())

    def _skip_chunk(self) -> None:
        """Nothing is being read, because reads that do not end hold the staging buffer."""
        _, chunk = self._todo.popleft()
        if not self._hopeless(chunk):
            logger.error("ssdkv: reads that do not end hold the staging buffer")
        self._poison(chunk, np.ones(len(chunk.slots), dtype=np.bool_))
        self._read_ahead()

    def _arrive(self, mine: _Read) -> tuple[Piece | None, _Chunk | None]:
        """Wait for a read: what of it can be attended to, and blocks whose read hangs while another
        copy of them is in reach. Rows that need any of the others are poisoned."""
        chunk, read = mine.chunk, mine.read
        if read is None or self._hopeless(chunk):
            return None, None
        good = read.finish()
        self.pages_used += int(np.count_nonzero(good)) * self._pages
        base = np.uint64(mine.path.address) + read.extents.at
        late = None
        if not good.all():
            self.bad += np.unique(chunk.slots[read.bad]).tolist()
            self.unread += np.unique(chunk.slots[read.unread]).tolist()
            hanging = read.hanging
            self._poison(chunk, ~good & ~hanging)
            if hanging.any():
                late = chunk.part(np.flatnonzero(hanging))
                base, chunk = base[~hanging], chunk.part(np.flatnonzero(~hanging))
        begin, end = _by_row(chunk.row, self._rows)
        for row in self.poisoned:
            end[row] = begin[row]
        digests = None
        if mine.path.unchecked:
            geometry = self._host.files.geometry
            first, pages = geometry.first_page(mine.layer), geometry.pages_per_layer
            seals, _ = self._seals.get(chunk.slots, first, pages)
            digests = seals.marks[chunk.which, :, 0]
        return Piece(base[chunk.which], chunk.index, begin, end, digests), late

    def _end_piece(self) -> None:
        """Nobody attends to the latest piece any more."""
        if self._attended is not None:
            ended, self._attended = self._attended, None
            self._give_back(ended)

    def _give_back(self, mine: _Read) -> None:
        if mine.read is not None:
            mine.read.give_back(mine.path.staging)

    def _poison(self, chunk: _Chunk, which: NDArray[np.bool_]) -> None:
        """Rows that need these slots, [n], of a chunk are lost."""
        if which.any():
            self.poisoned.update(np.unique(chunk.row[which[chunk.which]]).tolist())
