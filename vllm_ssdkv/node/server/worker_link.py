"""The bytes of one worker's session: blocks that it saves, and hits that it loads."""

from __future__ import annotations

import collections
import logging
import mmap
import os
import queue
import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.base.errors import NodeError, ProtocolError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.node.protocol.channel import Channel, Frame
from vllm_ssdkv.node.protocol.messages import (
    MAX_LOADING,
    MAX_LOADS,
    Arrived,
    Copied,
    Discard,
    Load,
    LoadEnded,
    Message,
    Region,
    Save,
    Taken,
    WriteFailed,
    Written,
    pack,
    unpack,
    unpack_keys,
)
from vllm_ssdkv.node.protocol.shared_memory import map_shared
from vllm_ssdkv.node.server.dram_loads import DramLoads
from vllm_ssdkv.node.server.hosted_rank import HostedRank
from vllm_ssdkv.node.server.hosted_store import HostedStore
from vllm_ssdkv.node.server.session import Session
from vllm_ssdkv.store.format.slot_geometry import I64
from vllm_ssdkv.store.read.load_job import LoadJob, LoadOutcome

logger = logging.getLogger(__name__)

LOOKS = 4
"""Looks at what a worker does not copy, in the time of a lease."""

PART_BYTES = 16 * MIB
"""Bytes of frames in one message over TCP, at most, unless one frame is larger."""


class WorkerLink:
    """One worker's ``bytes`` connection.

    A thread receives and saves (:meth:`serve`), the loader's thread tells of loads, and a thread
    tells what was written: none of them waits for another engine.
    """

    def __init__(
        self,
        session: Session,
        store: HostedStore,
        channel: Channel,
        counters: Counters,
        lease_s: float,
        transfer: int,
    ):
        """
        Args:
            session: Whose link it is.
            store: Where blocks come from and go.
            channel: After the welcome.
            counters: Of the node.
            lease_s: How long the worker may take to copy what has arrived.
            transfer: Bytes that it may have on their way.
        """
        self._session, self._store, self._channel = session, store, channel
        self._counters, self._lease_s, self._transfer = counters, lease_s, transfer
        self._host = store.ranks[session.rank]
        self._frame_bytes = store.geometry.frame_bytes
        self._region: mmap.mmap | None = None
        self._region_bytes: NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)
        self._news: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._wake = threading.Condition()
        self._loads: collections.deque[tuple[int, LoadJob]] = collections.deque()
        """Loads in their order, with the number of their call."""
        self._loading = 0
        """Slots of all of them."""
        self._part = 0
        self._copied = 0
        """Parts of the first load that were sent, and that the worker has copied."""
        self._over = False
        self._at_hand = DramLoads(self._host, store.spec.block_tokens)
        self._loader = self._host.store.open_loader(self._arrived, self._load_ended)
        self._teller = threading.Thread(target=self._tell, name="ssdkv-node-teller", daemon=True)
        self._teller.start()

    # ---- receiving ----

    def serve(self, count: Callable[[str], None]) -> None:
        """Receive until the connection ends; ``count`` hears the name of each message.

        Raises:
            NodeError: why it ended.
        """
        if not self._channel.is_unix:
            self._channel.grant(self._transfer)
        while True:
            frame = self._channel.receive(None)
            try:
                self._handle(frame)
            finally:
                count(type(frame.message).__name__)
                for descriptor in frame.descriptors:
                    os.close(descriptor)

    def _handle(self, frame: Frame) -> None:
        message = frame.message
        if isinstance(message, Region):
            self._take_region(message, frame)
            return
        if frame.descriptors:
            raise ProtocolError("order", f"descriptors came with a {type(message).__name__}")
        if isinstance(message, Save):
            self._save(message, frame)
        elif frame.payload_bytes:
            raise ProtocolError("order", f"a payload came with a {type(message).__name__}")
        elif isinstance(message, Load):
            self._load(message, frame.call_id)
        elif isinstance(message, Copied):
            self._was_copied(message, frame.call_id)
        elif isinstance(message, Discard):
            slots, epochs = unpack(message.slots), unpack(message.epochs)
            _check_lengths(slots, epochs)
            self._store.discard(self._session.run, slots, epochs)
        else:
            raise ProtocolError("order", f"a {type(message).__name__} came for bytes")

    def _take_region(self, message: Region, frame: Frame) -> None:
        if self._region is not None or len(frame.descriptors) != 1:
            raise ProtocolError("memory", "a transfer region comes once, with one descriptor")
        if message.nbytes > self._transfer + self._frame_bytes:
            raise ProtocolError(
                "memory", f"a transfer region of {message.nbytes} bytes; {self._transfer} may be"
            )
        self._region = map_shared(frame.descriptors[0], message.nbytes, writable=False)
        self._region_bytes = np.frombuffer(self._region, dtype=np.uint8)

    # ---- saves ----

    def _save(self, message: Save, frame: Frame) -> None:
        slots, epochs, places = map(unpack, (message.slots, message.epochs, message.places))
        keys = unpack_keys(message.keys)
        _check_lengths(slots, epochs, np.zeros(len(keys)))
        from_region = len(places) > 0
        if from_region:
            _check_lengths(slots, places)
            if (places < 0).any() or (places > len(self._region_bytes) - self._frame_bytes).any():
                raise ProtocolError("memory", "places of a save are outside the transfer region")
        if frame.payload_bytes != (0 if from_region else len(slots) * self._frame_bytes):
            raise ProtocolError("body", f"a save has a payload of {frame.payload_bytes} bytes")
        received = False

        def fill(host: HostedRank, which: I64, frames: NDArray[np.int32]) -> None:
            nonlocal received
            received = True
            if from_region:
                self._copy(places[which], host.store.frames.address(frames))
            else:
                self._receive(len(slots), which, frames)

        if message.bound and len(slots):
            run, rank = self._session.run, self._session.rank
            lost = self._store.save(run, rank, slots, epochs, keys, fill)
        else:
            lost = list(range(len(slots)))
        if frame.payload_bytes:
            if not received:
                self._channel.discard_payload(self._lease_s)
            self._channel.grant(frame.payload_bytes)
        self._counters.add(
            "node_bytes", (len(slots) - len(lost)) * self._frame_bytes, direction="saved"
        )
        self._channel.send(
            Taken(pack(lost)), call_id=frame.call_id, answer=True, timeout=self._lease_s
        )

    def _copy(self, places: I64, targets: NDArray[np.uint64]) -> None:
        """Copy blocks from the region to frames, without headers, which the flusher makes."""
        header = self._store.geometry.header_bytes
        begin = np.uint64(self._region_bytes.ctypes.data + header) if len(places) else np.uint64(0)
        sources = places.astype(np.uint64) + begin
        _io.copy(sources, targets + np.uint64(header), self._frame_bytes - header)

    def _receive(self, count: int, which: I64, frames: NDArray[np.int32]) -> None:
        """Receive a payload of ``count`` blocks into frames, where there is one."""
        nowhere = memoryview(bytearray(self._frame_bytes if len(frames) < count else 0))
        into = [nowhere] * count
        for position, frame in zip(which.tolist(), frames.tolist(), strict=True):
            into[position] = self._host.store.frames.view(frame).data
        self._channel.receive_payload(into, self._lease_s)

    def writes_ended(self, pairs: list[tuple[int, int]], good: bool) -> None:
        """Writes of blocks of this run have ended on this rank. From any thread."""
        slots, epochs = pack([slot for slot, _ in pairs]), pack([epoch for _, epoch in pairs])
        self._news.put(Written(slots, epochs) if good else WriteFailed(slots, epochs))

    def _tell(self) -> None:
        """Tell what was written, and see whether the worker copies what it was told of."""
        while not self._at_hand.stood_still(self._lease_s):
            try:
                message = self._news.get(timeout=self._lease_s / LOOKS)
            except queue.Empty:
                continue
            if message is None:
                return
            try:
                self._channel.send(message, timeout=self._lease_s)
            except NodeError:
                self._session.end()
                return
        self._end_of_one_that_stands_still()

    def _end_of_one_that_stands_still(self) -> None:
        logger.warning(
            "ssdkv node: %s did not copy what it has loaded within %g s: its session ends",
            self._session.peer,
            self._lease_s,
        )
        self._session.end()

    # ---- loads ----

    def _load(self, message: Load, call_id: int) -> None:
        slots, epochs, blocks = map(unpack, (message.slots, message.epochs, message.blocks))
        keys = unpack_keys(message.keys)
        _check_lengths(slots, epochs, np.zeros(len(keys)))
        if len(blocks) > len(slots) or message.chain > len(slots):
            raise ProtocolError("body", "a load names more blocks than slots")
        if len(self._loads) >= MAX_LOADS or self._loading + len(slots) > MAX_LOADING:
            raise ProtocolError(
                "limit",
                f"more than {MAX_LOADS} loads wait for their turn, or more than {MAX_LOADING} "
                "blocks",
            )
        wrong = self._store.begin_load(slots, epochs, keys) if len(slots) else slots
        if len(wrong) or not len(slots):
            ended = LoadEnded(not len(wrong), pack(slots[wrong]), pack(epochs[wrong]))
            self._channel.send(ended, call_id=call_id, timeout=self._lease_s)
            return
        job = LoadJob(
            f"{message.request_id} of {self._session.run}",
            slots,
            epochs,
            tuple(keys),
            blocks,
            message.chain,
            message.behind,
            message.compared,
        )
        if self._channel.is_unix and not self._loads and not job.compared and blocks.any():
            frames = self._at_hand.begin(call_id, job)
            if frames is not None:
                self._tell_at_hand(frames, job, call_id)
                return
        with self._wake:
            self._loads.append((call_id, job))
            self._loading += len(slots)
        self._loader.load(job)

    def _tell_at_hand(self, frames: NDArray[np.int32], job: LoadJob, call_id: int) -> None:
        """Tell where all blocks of a load are, and how it ends when they are copied."""
        wanted = job.block_ids != 0
        frames = frames[job.first_in_hbm :][wanted]
        places = self._host.store.frames.buffer_offset(frames).astype(np.int64)
        ended = self._at_hand.ended(job)
        message = Arrived(0, pack(job.block_ids[wanted]), pack(places), ended)
        self._channel.send(message, call_id=call_id, timeout=self._lease_s)
        self._counters.add("node_bytes", len(frames) * self._frame_bytes, direction="loaded")

    def _was_copied(self, message: Copied, call_id: int) -> None:
        """A worker has copied what had arrived."""
        job = self._at_hand.end(call_id)
        if job is not None:
            self._store.end_load(job.slots)
            return
        with self._wake:
            if self._loads and self._loads[0][0] == call_id:
                self._copied = max(self._copied, message.part + 1)
                self._wake.notify_all()

    def _arrived(self, frames: NDArray[np.int32], blocks: NDArray[np.int64]) -> None:
        """Tell of frames of the first load, and wait until the worker has copied them. In the
        loader's thread."""
        at_once = len(frames)
        if not self._channel.is_unix:
            at_once = max(1, PART_BYTES // self._frame_bytes)
        for begin in range(0, len(frames), at_once):
            part = slice(begin, begin + at_once)
            if not self._send_part(frames[part], blocks[part]):
                return
        self._counters.add("node_bytes", len(frames) * self._frame_bytes, direction="loaded")

    def _send_part(self, frames: NDArray[np.int32], blocks: NDArray[np.int64]) -> bool:
        """Send one message of frames; False when the session is over."""
        with self._wake:
            if self._over or not self._loads:
                return False
            call_id, number = self._loads[0][0], self._part
            self._part += 1
        store, channel = self._host.store, self._channel
        try:
            if not channel.is_unix:
                payload = [store.frames.view(frame).data for frame in frames.tolist()]
                message = Arrived(number, pack(blocks), b"")
                channel.send(message, payload, call_id=call_id, timeout=self._lease_s)
                return True
            places = pack(store.frames.buffer_offset(frames).astype(np.int64))
            message = Arrived(number, pack(blocks), places)
            channel.send(message, call_id=call_id, timeout=self._lease_s)
        except NodeError:
            self._session.end()
            return False
        with self._wake:
            told = self._wake.wait_for(lambda: self._over or self._copied > number, self._lease_s)
            if told:
                return not self._over
        self._end_of_one_that_stands_still()
        return False

    def _load_ended(self, outcome: LoadOutcome) -> None:
        """Tell the end of the first load. In the loader's thread."""
        with self._wake:
            if not self._loads:
                return  # the link was closed while a device did not answer
            call_id, job = self._loads.popleft()
            self._loading -= len(job.slots)
            self._part = self._copied = 0
            over = self._over
        self._store.end_load(job.slots, outcome.bad, outcome.unread)
        if over:
            return
        try:
            self._send_end(outcome, call_id)
        except NodeError:
            self._session.end()

    def _send_end(self, outcome: LoadOutcome, call_id: int) -> None:
        """Tell the end of a load."""
        copied = outcome.copy is not None and outcome.complete
        bad = np.array(outcome.bad, dtype=np.int64).reshape(-1, 2)
        message = LoadEnded(
            outcome.complete,
            pack(bad[:, 0]),
            pack(bad[:, 1]),
            outcome.tokens_from_dram,
            outcome.tokens_from_ssd,
            outcome.hit_tokens_from_dram,
            outcome.hit_tokens_from_ssd,
            outcome.queued_s,
            outcome.dram_s,
            outcome.ssd_s,
            copied,
        )
        payload = [] if outcome.copy is None or not copied else [outcome.copy[2].data]
        self._channel.send(message, payload, call_id=call_id, timeout=self._lease_s)

    # ---- the end ----

    def close(self) -> None:
        """End the link's threads; its loads fail. Blocks, with the deadline of the devices."""
        with self._wake:
            self._over = True
            self._wake.notify_all()
        self._channel.abort()
        self._news.put(None)
        deadline_s = self._host.store.files.deadline_s
        if not self._host.store.close_loader(self._loader, deadline_s):
            logger.warning("ssdkv node: a read for %s does not end", self._session.peer)
        self._teller.join(deadline_s)
        for job in self._at_hand.close():
            self._store.end_load(job.slots)
        for _, job in self._loads:  # which the loader did not begin any more
            self._store.end_load(job.slots)
        self._loads.clear()
        self._region_bytes = np.zeros(0, dtype=np.uint8)
        if self._region is not None:
            self._region.close()


def _check_lengths(*arrays: NDArray[np.generic]) -> None:
    """Check that arrays of a message belong together.

    Raises:
        ProtocolError: they do not.
    """
    if len({len(array) for array in arrays}) > 1:
        lengths = ", ".join(str(len(array)) for array in arrays)
        raise ProtocolError("body", f"arrays of one message have {lengths} entries")
