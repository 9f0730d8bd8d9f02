"""Residency in one node: blocks go to a transfer region, hits come back."""

from __future__ import annotations

import collections
import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import NodeError, ProtocolError, StoreError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.base.sizes import approximate_size
from vllm_ssdkv.node.client.node_link import NodeLink
from vllm_ssdkv.node.client.session import CALL_S, Peer, Session, as_name
from vllm_ssdkv.node.client.transfer import ArrivedFrames, MappedFrames, TransferRegion
from vllm_ssdkv.node.protocol.channel import Channel, Frame
from vllm_ssdkv.node.protocol.messages import (
    MAX_ENTRIES,
    MAX_LOADING,
    MAX_LOADS,
    Arrived,
    Copied,
    Discard,
    Done,
    Load,
    LoadEnded,
    Message,
    Region,
    Save,
    Taken,
    TellWeights,
    WriteFailed,
    Written,
    pack,
    unpack,
)
from vllm_ssdkv.node.protocol.shared_memory import map_shared
from vllm_ssdkv.store.read.load_job import LoadJob, LoadOutcome
from vllm_ssdkv.store.read.prefix_loader import CopyIn

logger = logging.getLogger(__name__)

I64 = NDArray[np.int64]
I32 = NDArray[np.int32]
Pairs = list[tuple[int, int]]

REGION_BYTES: Final = 256 << 20
"""Largest size of a transfer region; a node may allow less in flight."""

PAYLOAD_BYTES: Final = 16 << 20
"""Size of the frames that come at a time where memory is not shared; one frame at least."""

SILENCES: Final = 4
"""Heartbeats that may be missing before the node counts as gone."""

LEAST_SILENCE_S: Final = 2.0

LEAST_RATE: Final = 20e6
"""Bytes per second that a network must take: a slower one is no use, and would hold steps up."""

PLACES_S: Final = 1.0
"""Wait of a step for a place of the transfer region, where all are on their way, in seconds."""

_NO_OFFSETS: Final = np.zeros(0, dtype=np.int64)
_NO_FRAMES: Final = np.zeros(0, dtype=np.int32)


class PinMemory(Protocol):
    """Registers memory of this process with a GPU."""

    def __call__(self, address: int, nbytes: int, *, writable: bool) -> Callable[[], bool]:
        """Register ``nbytes`` from an absolute address on.

        Returns:
            Ends the registration, before the memory goes; False: that was not possible.
        """


_STILL_PINNED: Final[list[_Memory]] = []
"""Memory that a GPU may still reach: it is never unmapped."""


@dataclass(slots=True)
class _Loading:
    """A load that the node was asked for.

    Attributes:
        job: What it is to bring.
        missing: HBM blocks that nothing was copied into yet.
        failed: A copy into HBM has failed, or its bytes may be those of another block.
    """

    job: LoadJob
    missing: set[int]
    failed: bool = False


@dataclass(slots=True)
class _Saving:
    """Blocks that the node was asked to save, and has not taken yet."""

    slots: I64
    epochs: I64
    places: I32


class _Memory:
    """Memory of one session, and what is under way in it. The lock guards ``loads``, ``waiting``,
    ``loading``, ``saves``, ``unwritten`` and ``over``.

    Attributes:
        loads: That the node was asked for, by the number of the call.
        loading: Slots of these.
        waiting: Loads that the node is asked for when it has ended others.
        loads_moved, saves_moved: When the node last did something of any load, and of any save, or
            the first one under way was asked for; of the monotonic clock. A node does one after the
            other, so that a single one may wait for long.
    """

    def __init__(self, session: Session, channel: Channel):
        """Map what the session has.

        Raises:
            NodeError: there is no memory, or the node's is not what it announced.
        """
        welcome = session.welcome
        self.session, self.channel = session, channel
        self.arena: NDArray[np.uint8] | None = None
        if session.arena >= 0:
            mapping = map_shared(session.arena, welcome.arena_bytes, writable=False)
            self.arena = np.frombuffer(mapping, dtype=np.uint8)
        room = max(welcome.frame_bytes, min(welcome.in_flight, REGION_BYTES))
        self.region = TransferRegion(room, welcome.frame_bytes, shared=channel.is_unix)
        self.payload = np.zeros(0, dtype=np.uint8)
        """Frames that came as a payload."""
        self.lock = threading.Lock()
        self.loads: dict[int, _Loading] = {}
        self.loading = 0
        self.waiting: collections.deque[LoadJob] = collections.deque()
        self.saves: dict[int, _Saving] = {}
        self.loads_moved = self.saves_moved = 0.0
        self._unpins: list[Callable[[], bool]] = []
        self.unwritten: dict[int, int] = {}
        self.over = False
        self.receiver: threading.Thread | None = None
        self.freed: queue.SimpleQueue[I32] = queue.SimpleQueue()

    @property
    def usable(self) -> bool:
        """Check whether anything new may begin in it."""
        return not (self.over or self.session.ended)

    @property
    def lends(self) -> bool:
        """Check whether the node still keeps for this session the frames that it has told of. It
        ends the connection before it uses them again."""
        return not self.session.ended and not self.channel.peer_left

    def begin_load(self, number: int) -> LoadJob | None:
        """The next load that waits, which is asked for from now on; None: there is none, or the
        node has as many as it takes."""
        with self.lock:
            if self.over or not self.waiting or len(self.loads) >= MAX_LOADS:
                return None
            if self.loading + len(self.waiting[0].slots) > MAX_LOADING:
                return None
            job = self.waiting.popleft()
            if not self.loads:
                self.loads_moved = time.monotonic()
            self.loads[number] = _Loading(job, set(job.block_ids.tolist()) - {0})
            self.loading += len(job.slots)
            return job

    def pin(self, pin: PinMemory) -> None:
        """Register with a GPU what is mapped.

        Raises:
            StoreError: of ``pin``.
        """
        frames = self.region.frames
        self._unpins.append(pin(frames.start, self.region.nbytes, writable=True))
        if self.arena is not None:
            address = int(self.arena.ctypes.data)
            self._unpins.append(pin(address, self.arena.nbytes, writable=False))

    def unpin(self) -> None:
        """End the registrations: what is mapped at these addresses later is other memory. Memory of
        which one does not end stays mapped."""
        unpins, self._unpins = self._unpins, []
        ended = [unpin() for unpin in unpins]
        if not all(ended):
            _STILL_PINNED.append(self)

    def take_back(self, patience_s: float) -> None:
        """Take back places that the node has copied; wait so long for some where none is free."""
        wait_for = patience_s if not self.region.free and self.saves else 0.0
        try:
            while True:
                self.region.give_back(self.freed.get(wait_for > 0, wait_for))
                wait_for = 0.0
        except queue.Empty:
            return

    def stood_still(self, since: float) -> bool:
        """Check whether loads or saves are under way, and none has moved since this instant."""
        with self.lock:
            loads_stand = bool(self.loads) and self.loads_moved < since
            return loads_stand or (bool(self.saves) and self.saves_moved < since)


class _SaveFrames:
    """Places of the transfer region of the session in use."""

    def __init__(self, node: NodeResidency):
        self._node = node

    def address(self, frames: I32) -> NDArray[np.uint64]:
        """Absolute address of each frame, [n]."""
        return self._node.region.address(frames)

    def view(self, frame: int) -> NDArray[np.uint8]:
        """Bytes of a frame, without a copy."""
        return self._node.region.view(frame)


class NodeResidency:
    """The store of one rank in a node.

    One thread saves (:meth:`reserve_frames`, :meth:`flush`, :meth:`abandon`), and one calls the
    other methods; they may be the same. A thread for each session receives. What is
    under way when a session ends fails at once: saves are not stored, hits are computed. Memory of
    a session is never used with another one.

    Example:
        node = NodeResidency(peer, counters, deadline_s, outcomes.put, connected, pooled=False)
        start_links([node.link])
        node.adopt()
        node.start(copy_in)
    """

    def __init__(
        self,
        peer: Peer,
        counters: Counters,
        deadline_s: float,
        ended: Callable[[LoadOutcome], None],
        connected: Callable[[bool], None],
        *,
        pooled: bool,
    ):
        """
        Args:
            peer: The node, and this rank of the engine.
            counters: Of this rank.
            deadline_s: For which a load or a save may stand still.
            ended: Told of each load that has ended, from any thread.
            connected, pooled: See :class:`NodeLink`.
        """
        self.link = NodeLink(
            *(peer, counters),
            with_bytes=True,
            opened=self._opened,
            connected=connected,
            pooled=pooled,
        )
        self._counters, self._deadline_s = counters, deadline_s
        self._weights = b""
        self._copy_in: CopyIn | None = None
        self._memory: _Memory | None = None
        self._next: _Memory | None = None
        self._swap = threading.Lock()
        self._numbers = itertools.count(1)
        self._held: dict[int, int] = {}
        """Slot: place, of blocks that are reserved and not flushed."""
        self._written: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._failed: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._ended = ended
        self.save_frames = _SaveFrames(self)
        self.load_frames = ArrivedFrames()
        self._pin: PinMemory | None = None

    # ---- sessions ----

    @property
    def usable(self) -> bool:
        """Check whether something new may begin in the session in use."""
        return self._memory is not None and self._memory.usable

    @property
    def lends(self) -> bool:
        """Check whether the node still keeps the frames that it has told of, for the thread that
        copies them."""
        return self._memory is not None and self._memory.lends

    def describe(self) -> list[str]:
        """Lines of the start-up summary."""
        if self._memory is None:
            return []
        welcome = self._memory.session.welcome
        return [
            f"node {self.link.peer.address}: store of up to {welcome.num_slots} blocks per rank, "
            f"{welcome.frames} of them in DRAM "
            f"({approximate_size(welcome.frames * welcome.frame_bytes)})",
            f"encryption {'by the node' if welcome.encrypted else 'off'}",
        ]

    def tell_weights(self, digest: bytes) -> None:
        """Tell the node, and each session from now on, what weights this rank holds.

        Raises:
            StoreError: the node is gone.
        """
        self._weights = digest
        session = self.link.session
        try:
            if session is not None:
                session.call(TellWeights(digest), Done)
        except NodeError as error:
            raise StoreError(f"nodes: {error}; start the engine again") from error

    def start(self, copy_in: CopyIn) -> None:
        """Begin to receive, once. ``copy_in`` copies frames into HBM blocks, on that thread."""
        self._copy_in = copy_in
        if self._memory is not None:
            self._begin(self._memory)

    def _opened(self, session: Session) -> None:
        """A session has begun, in the link's thread."""
        channel = session.bytes
        if channel is None:
            raise ProtocolError("part", "the session has no connection for bytes")
        welcome = session.welcome
        memory = _Memory(session, channel)
        channel.silence_s = max(LEAST_SILENCE_S, SILENCES * welcome.beat_s)
        channel.grant(2 * max(PAYLOAD_BYTES, welcome.frame_bytes))
        if channel.is_unix:
            region = memory.region
            fds = [region.descriptor]
            channel.send(Region(region.nbytes), descriptors=fds, timeout=CALL_S)
            region.close_descriptor()
        if self._weights:
            session.call(TellWeights(self._weights), Done)
        if self._pin is not None:
            try:
                memory.pin(self._pin)
            except StoreError:
                memory.unpin()
                raise
        if self._copy_in is not None:
            self._begin(memory)
        with self._swap:
            unused = self._next if self._next is not self._memory else None
            self._next = memory
        if unused is not None:
            self._release(unused)

    def _release(self, memory: _Memory) -> None:
        """Nothing uses a session's memory any more, once its thread has ended."""
        memory.session.end()
        if memory.receiver is not None:
            memory.receiver.join(self._deadline_s)
            if memory.receiver.is_alive():
                return  # it has the memory
        memory.unpin()
        memory.session.close()

    def pin_with(self, pin: PinMemory) -> None:
        """Register the memory of this session and of each later one by ``pin``.

        Raises:
            StoreError: of ``pin``.
        """
        self._pin = pin
        if self._memory is not None:
            self._memory.pin(pin)

    def _begin(self, memory: _Memory) -> None:
        name = "ssdkv-node-bytes"
        memory.receiver = threading.Thread(
            target=self._receive, args=(memory,), name=name, daemon=True
        )
        memory.receiver.start()

    def adopt(self) -> None:
        """Use the newest session, once nothing of the one before is held or under way."""
        with self._swap:
            newest, memory = self._next, self._memory
            if newest is None or newest is memory or self._held:
                return
            if memory is not None and not memory.over:
                return
            self._memory = newest
        if newest.receiver is None and self._copy_in is not None:
            self._begin(newest)
        if memory is not None:
            self._release(memory)

    @property
    def region(self) -> MappedFrames:
        """Frames of the transfer region in use."""
        if self._memory is None:
            raise StoreError("no session was opened")
        return self._memory.region.frames

    @property
    def open_frames(self) -> int:
        """Frames of DRAM that the node has for this rank's store."""
        return 0 if self._memory is None else self._memory.session.welcome.frames

    # ---- write path ----

    def reserve_frames(self, slots: I64) -> I32:
        """Places for the first of these slots, [k], k <= n, for the caller to fill.

        Waits up to :data:`PLACES_S` where all are on their way to the node: it copies them in
        milliseconds.
        """
        memory = self._memory
        if memory is None or not memory.usable or not len(slots):
            return _NO_FRAMES
        memory.take_back(PLACES_S)
        with self._swap:
            if memory is not self._memory:
                return _NO_FRAMES
            places = memory.region.take(len(slots))
            self._held.update(zip(slots.tolist(), places.tolist(), strict=False))
        return places

    def flush(self, slots: I64, epochs: I64, keys: Sequence[bytes], *, bound: bool = True) -> None:
        """Have the node save blocks whose places are filled. Never waits for a device."""
        memory = self._memory
        here = np.array([slot in self._held for slot in slots.tolist()], dtype=np.bool_)
        self._fail(slots[~here], epochs[~here])
        slots, epochs = slots[here], epochs[here]
        if memory is None or not len(slots):
            return
        keys = [key for key, held in zip(keys, here.tolist(), strict=True) if held]
        places = np.array([self._held.pop(slot) for slot in slots.tolist()], dtype=np.int32)
        number, saving = next(self._numbers), _Saving(slots, epochs, places)
        with memory.lock:
            over = memory.over
            if not over:
                if not memory.saves:
                    memory.saves_moved = time.monotonic()
                memory.saves[number] = saving
                memory.unwritten.update(zip(slots.tolist(), epochs.tolist(), strict=True))
        if over:
            self._fail(slots, epochs)
            return
        shared = memory.channel.is_unix
        frame_bytes = memory.session.welcome.frame_bytes
        offsets = places.astype(np.int64) * frame_bytes if shared else _NO_OFFSETS
        message = Save(pack(slots), pack(epochs), self.link.pack_keys(keys), pack(offsets), bound)
        payload = () if shared else memory.region.frames.views(places)
        self._send(memory, message, number, payload)

    def _send(
        self, memory: _Memory, message: Message, number: int, payload: Sequence[memoryview] = ()
    ) -> None:
        """Send on the connection for bytes; where that fails, the thread that receives hears."""
        timeout = CALL_S + sum(view.nbytes for view in payload) / LEAST_RATE
        try:
            memory.channel.send(message, payload, call_id=number, timeout=timeout)
        except NodeError:
            memory.session.end()

    def _fail(self, slots: I64, epochs: I64) -> None:
        for pair in zip(slots.tolist(), epochs.tolist(), strict=True):
            self._failed.put(pair)

    def abandon(self, slots: I64) -> None:
        """Forget what is held for these slots, and have the node forget what it saved of them."""
        memory = self._memory
        if memory is None or not len(slots):
            return
        wanted = slots.tolist()
        places = [self._held.pop(slot) for slot in wanted if slot in self._held]
        memory.region.give_back(np.array(places, dtype=np.int32))
        with memory.lock:
            pairs = [(s, memory.unwritten.pop(s)) for s in wanted if s in memory.unwritten]
        if pairs and memory.usable:
            table = np.array(pairs, dtype=np.int64)
            self._send(memory, Discard(pack(table[:, 0]), pack(table[:, 1])), 0)

    def take_write_results(self) -> tuple[Pairs, Pairs]:
        """(slot, epoch) pairs written and failed since the last call."""
        self.adopt()
        return _drain(self._written), _drain(self._failed)

    # ---- load path ----

    def load(self, job: LoadJob) -> None:
        """Ask for a hit. Never waits for a device."""
        memory = self._memory
        over = memory is None or len(job.slots) > MAX_ENTRIES
        if memory is not None and not over:
            with memory.lock:
                over = memory.over
                if not over:
                    memory.waiting.append(job)
        if memory is None or over:
            self._ended(_failure(job))
            return
        self._ask_for_loads(memory)

    def _ask_for_loads(self, memory: _Memory) -> None:
        """Ask the node for loads that wait, for as many as it takes at a time."""
        while (job := memory.begin_load(number := next(self._numbers))) is not None:
            message = Load(
                as_name(job.request_id),
                pack(job.slots),
                pack(job.epochs),
                self.link.pack_keys(job.keys),
                pack(job.block_ids),
                len(job.slots) if job.chain is None else job.chain,
                job.behind,
                job.compared,
            )
            self._send(memory, message, number)

    def end_if_still(self) -> None:
        """End a session whose node does nothing for the deadline of its drives, and a call's.
        Loads that wait for others are asked for where these have ended."""
        memory = self._memory
        if memory is not None:
            self._ask_for_loads(memory)
        still_s = self._deadline_s + CALL_S
        since = time.monotonic() - still_s
        if memory is not None and memory.usable and memory.stood_still(since):
            logger.error("ssdkv: the node %s did nothing for %g s", self.link.peer.address, still_s)
            self._counters.add("node_call_failures", 1)
            memory.session.end()

    # ---- the thread that receives ----

    def _receive(self, memory: _Memory) -> None:
        try:
            while True:
                self._take(memory, memory.channel.receive(None))
        except ProtocolError as error:
            logger.error("ssdkv: the node sent what is no message: %s", error)  # noqa: TRY400
            memory.channel.refuse(str(error))
        except NodeError:
            pass  # the link says so
        except Exception:  # whatever it is, requests must not wait for ever
            self._counters.add("thread_errors", 1, thread="node")
            logger.exception("ssdkv: receiving from the node failed")
        finally:
            self._end(memory)

    def _end(self, memory: _Memory) -> None:
        """Fail what is under way: nothing more comes."""
        memory.session.end()
        with memory.lock:
            memory.over = True
            jobs = [*(loading.job for loading in memory.loads.values()), *memory.waiting]
            memory.loads, memory.loading = {}, 0
            memory.waiting.clear()
            unwritten, memory.unwritten, memory.saves = memory.unwritten, {}, {}
        for pair in unwritten.items():
            self._failed.put(pair)
        for job in jobs:
            self._ended(_failure(job))

    def _take(self, memory: _Memory, frame: Frame) -> None:
        for descriptor in frame.descriptors:
            os.close(descriptor)
        match frame.message:
            case Arrived() as arrived:
                self._arrived(memory, frame, arrived)
            case LoadEnded() as ended:
                self._load_ended(memory, frame, ended)
            case Taken(lost):
                self._taken(memory, frame.call_id, unpack(lost))
            case Written(slots, epochs):
                self._told(memory, unpack(slots), unpack(epochs), self._written)
            case WriteFailed(slots, epochs):
                self._told(memory, unpack(slots), unpack(epochs), self._failed)
            case None:
                raise ProtocolError("refused", f"call {frame.call_id}: {frame.error}")
            case other:
                raise ProtocolError("kind", f"{type(other).__name__} does not belong here")

    def _taken(self, memory: _Memory, number: int, lost: I64) -> None:
        with memory.lock:
            saving = memory.saves.pop(number, None)
            memory.saves_moved = time.monotonic()
        if saving is None or (len(lost) and not 0 <= lost.min() <= lost.max() < len(saving.slots)):
            raise ProtocolError("save", f"an answer to save {number}, which was not asked for")
        memory.freed.put(saving.places)
        self._told(memory, saving.slots[lost], saving.epochs[lost], self._failed)

    def _told(
        self,
        memory: _Memory,
        slots: I64,
        epochs: I64,
        where: queue.SimpleQueue[tuple[int, int]],
    ) -> None:
        for slot, epoch in zip(slots.tolist(), epochs.tolist(), strict=True):
            with memory.lock:
                known = memory.unwritten.get(slot) == epoch
                if known:
                    del memory.unwritten[slot]
            if known:
                where.put((slot, epoch))

    def _loading(self, memory: _Memory, number: int) -> _Loading:
        with memory.lock:
            loading = memory.loads.get(number)
        if loading is None:
            raise ProtocolError("load", f"blocks of load {number}, which was not asked for")
        return loading

    def _arrived(self, memory: _Memory, frame: Frame, arrived: Arrived) -> None:
        """Copy blocks into HBM: from the node's memory, or from a payload."""
        loading = self._loading(memory, frame.call_id)
        blocks, offsets = unpack(arrived.blocks), unpack(arrived.places)
        if not loading.missing.issuperset(blocks.tolist()):
            raise ProtocolError("load", "a block came that was not asked for, or came twice")
        frame_bytes, source = memory.session.welcome.frame_bytes, memory.arena
        if frame.payload_bytes or source is None:
            source = self._receive_frames(memory, frame, len(blocks))
            offsets = np.arange(len(blocks), dtype=np.int64) * frame_bytes
        if len(offsets) != len(blocks):
            raise ProtocolError("load", f"{len(blocks)} blocks came at {len(offsets)} places")
        self.load_frames.show(source, offsets, frame_bytes)
        begun = time.monotonic()
        self._copy(loading, blocks)
        memory.loads_moved = time.monotonic()
        if not frame.payload_bytes and not memory.lends:
            loading.failed = True  # the node may have filled the frames anew before the copy
        if arrived.ended is not None:
            self._conclude(memory, frame.call_id, arrived.ended, dram_s=memory.loads_moved - begun)
            # Who waits for the load gets the interpreter before the node is woken: 4 % of the time
            # of a hit of 8 MiB on two busy cores, measured.
            time.sleep(0)
        if not frame.payload_bytes:
            self._send(memory, Copied(arrived.part), frame.call_id)

    def _copy(self, loading: _Loading, blocks: I64) -> None:
        if loading.failed or self._copy_in is None:
            return
        try:
            self._copy_in(np.arange(len(blocks), dtype=np.int32), blocks)
            loading.missing.difference_update(blocks.tolist())
        except Exception:  # whatever it is, the request must not wait for ever
            loading.failed = True
            self._counters.add("thread_errors", 1, thread="node")
            logger.exception("ssdkv: load of request %s failed", loading.job.request_id)

    def _receive_frames(self, memory: _Memory, frame: Frame, count: int) -> NDArray[np.uint8]:
        nbytes = frame.payload_bytes
        if nbytes != count * memory.session.welcome.frame_bytes:
            raise ProtocolError("load", f"{count} blocks came in a payload of {nbytes} bytes")
        if len(memory.payload) < nbytes:
            memory.payload = np.zeros(nbytes, dtype=np.uint8)
        memory.channel.receive_payload([memory.payload[:nbytes].data], self._deadline_s)
        memory.channel.grant(nbytes)
        return memory.payload[:nbytes]

    def _load_ended(self, memory: _Memory, frame: Frame, ended: LoadEnded) -> None:
        job, last = self._loading(memory, frame.call_id).job, None
        if frame.payload_bytes:
            last = self._receive_frames(memory, frame, 1).copy()
        self._conclude(memory, frame.call_id, ended, last=last if job.compared else None)

    def _conclude(
        self,
        memory: _Memory,
        number: int,
        ended: LoadEnded,
        *,
        dram_s: float = 0.0,
        last: NDArray[np.uint8] | None = None,
    ) -> None:
        """Pass the end of a load on. ``dram_s``: seconds of a copy that the node did not wait for.
        ``last``: frame of the last slot."""
        job = self._loading(memory, number).job
        told = zip(unpack(ended.slots).tolist(), unpack(ended.epochs).tolist(), strict=True)
        bad = list(told)
        if not set(zip(job.slots.tolist(), job.epochs.tolist(), strict=True)).issuperset(bad):
            raise ProtocolError("load", "blocks are called wrong that were not asked for")
        with memory.lock:
            loading = memory.loads.pop(number)
            memory.loading -= len(job.slots)
            memory.loads_moved = time.monotonic()
        if not ended.complete or loading.failed or loading.missing:
            outcome = _failure(job)
            outcome.bad.extend(bad)
            self._ended(outcome)
            return
        copy = None if last is None else (int(job.slots[-1]), int(job.epochs[-1]), last)
        self._ended(
            LoadOutcome(
                job.request_id,
                True,
                bad,
                ended.tokens_from_dram,
                ended.tokens_from_ssd,
                ended.hit_tokens_from_dram,
                ended.hit_tokens_from_ssd,
                ended.queued_s,
                ended.dram_s + dram_s,
                ended.ssd_s,
                time.monotonic(),
                copy,
            )
        )

    # ---- end ----

    def leave(self) -> None:
        """End the session, should nobody have begun to use it."""
        self.link.close()

    def close(self) -> None:
        """Wait until the node has what was flushed, and end the session."""
        memory, until = self._memory, time.monotonic() + self._deadline_s
        while memory is not None and memory.usable and memory.saves and time.monotonic() < until:
            time.sleep(0.005)
        self.link.close()
        if memory is not None:
            self._release(memory)
        if self._next is not None and self._next is not memory:
            self._release(self._next)  # it began meanwhile, and nobody has used it


def _failure(job: LoadJob) -> LoadOutcome:
    return LoadOutcome(job.request_id, False, ended=time.monotonic())


def _drain(pairs: queue.SimpleQueue[tuple[int, int]]) -> Pairs:
    found = []
    while not pairs.empty():
        found.append(pairs.get())
    return found
