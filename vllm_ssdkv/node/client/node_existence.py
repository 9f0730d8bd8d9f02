"""Existence in one node: its session as a scheduler uses it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import NodeError, StoreError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.node.client.node_link import NodeLink
from vllm_ssdkv.node.client.session import CALL_S, PendingCall, Session
from vllm_ssdkv.node.protocol.messages import (
    MAX_ENTRIES,
    AskGauges,
    Bind,
    Bound,
    Claim,
    Claimed,
    Done,
    Drop,
    Find,
    ForgetAll,
    Gauges,
    GoOn,
    Grant,
    Leave,
    Lookup,
    Message,
    Pin,
    Publish,
    Slots,
    Touch,
    Unpin,
    pack,
    unpack,
)
from vllm_ssdkv.store.index.slot_index import FULL, TAKEN, SlotState

logger = logging.getLogger(__name__)

I64 = NDArray[np.int64]

LOOK_S: Final = 1.0
"""Pause between questions that notice that the node is gone, in seconds."""

_NO_SLOTS: Final = np.zeros(0, dtype=np.int64)

Answer = TypeVar("Answer", bound=Message)


class NodeExistence:
    """Slots and epochs of one node, as far as a session knows, used by the scheduler's thread.

    While the node does not answer, nothing is found, and no block gets a slot.

    Example:
        node = NodeExistence(link, counters, num_slots)
        slots = node.found_each(len(keys), node.ask_each(keys))
    """

    def __init__(self, link: NodeLink, counters: Counters, num_slots: int):
        """
        Args:
            link: Was started; it is closed by :meth:`close`.
            counters: Of the scheduler.
            num_slots: Slots that the node is taken to have if it does not answer yet.
        """
        session = link.session
        self.link, self._metrics = link, counters
        self._session: Session | None = session
        self.num_slots = num_slots if session is None else session.welcome.num_slots
        self._epochs = np.zeros(self.num_slots, dtype=np.int64)
        """Epochs of slots as this session knows them; 0: not known."""
        self._live = np.zeros(self.num_slots, dtype=np.bool_)
        """Slots that hold what this session knows of, as far as it knows."""
        self._pins: dict[int, list[int]] = {}
        """Epochs under which each slot was pinned, oldest first; 0: in a session that has ended."""
        self._forgets = False
        """A reset was asked for: each session from then on shows nothing older than itself."""
        self._stopping = threading.Event()
        self._watch = threading.Thread(target=self._look, name="ssdkv-node-watch", daemon=True)
        self._watch.start()

    # ---- the node ----

    def _current(self) -> Session | None:
        """The session; what is known of slots of another one is forgotten."""
        session = self.link.session
        if session is not self._session:
            self._epochs[:] = 0
            self._live[:] = False
            # Who has pinned will unpin: that must not undo a pin of this session.
            self._pins = {slot: [0] * len(epochs) for slot, epochs in self._pins.items()}
            self._session = session
            if self._forgets:
                self._have_forgotten(session)
            if session is not None and session.welcome.num_slots > self.num_slots:
                logger.warning(
                    "ssdkv: the store of node %s has more slots than when this engine started; "
                    "blocks in the others are not found until it starts again",
                    self.link.peer.address,
                )
        return session

    def _have_forgotten(self, session: Session | None) -> None:
        """Have the node show a session nothing older; one that cannot be told is not used."""
        if session is None:
            return
        try:
            session.call(ForgetAll(), Done)
        except NodeError:
            self._metrics.add("node_call_failures", 1)
            session.end()

    @property
    def session(self) -> Session | None:
        """Session that the slots are of; None: the node does not answer, as far as is known."""
        return self._current()

    @property
    def name_key(self) -> bytes:
        """Key under which block hashes are hidden in the node's store; empty: they are not."""
        return self.link.name_key

    @property
    def connected(self) -> bool:
        """Check whether the node answers, as far as is known."""
        return self._current() is not None

    def _call(self, message: Message, answer: type[Answer]) -> Answer | None:
        """Call the node; None: it is gone, or does not answer."""
        return self._take(self._ask(message, answer))

    def _ask(self, message: Message, answer: type[Answer]) -> PendingCall[Answer] | None:
        """Send a call; None: the node is gone. :meth:`_take` must follow."""
        session = self._current()
        if session is None:
            return None
        try:
            return session.ask(message, answer)
        except NodeError:
            self._metrics.add("node_call_failures", 1)
            return None

    def _take(self, call: PendingCall[Answer] | None) -> Answer | None:
        """Answer of a call; None: the node is gone, or does not answer."""
        if call is None:
            return None
        try:
            return call.take()
        except NodeError as error:
            self._metrics.add("node_call_failures", 1)
            if not call.session.ended:
                logger.warning(
                    "ssdkv: the node %s refused a call: %s", self.link.peer.address, error
                )
            return None

    def _tell(self, message: Message) -> None:
        session = self._current()
        if session is not None:
            session.tell(message)

    def _look(self) -> None:
        """Notice in a thread that the node is gone: who asks nothing would not."""
        while not self._stopping.wait(LOOK_S):
            session = self.link.session
            if session is not None and not session.busy:
                with contextlib.suppress(NodeError):  # the link says so
                    session.call(AskGauges(), Gauges)

    def bind(self, patience_s: float) -> list[bytes]:
        """Digest of each rank's weights, as the ranks have told the node.

        Raises:
            StoreError: a rank has not told.
        """
        session, why = self._current(), "it is gone"
        if session is not None:
            try:
                weights = session.call(Bind(patience_s), Bound, patience_s + CALL_S).weights
                store = self.link.peer.store
                if store is None or len(weights) == store.ranks:
                    return weights
                why = f"it tells of {len(weights)} ranks"
            except NodeError as error:
                why = str(error)
        raise StoreError(
            f"nodes: the node {self.link.peer.address} does not know what weights this engine's "
            f"workers hold: {why}; start the engine again"
        )

    # ---- finding ----

    def leave(self, chain: int) -> None:
        """The request with this number computes nothing more. Does not wait."""
        self._tell(Leave(chain))

    def go_on(self, chain: int) -> None:
        """The request with this number still computes. Does not wait."""
        self._tell(GoOn(chain))

    def ask_each(self, keys: Sequence[bytes]) -> PendingCall[Slots] | None:
        """Ask which of up to ``MAX_ENTRIES`` keys are stored; :meth:`found_each` must follow."""
        return self._ask(Find(self.link.pack_keys(keys)), Slots) if self.connected else None

    def prefix(
        self, keys: Sequence[bytes], chain: int = 0, *, over: bool = False
    ) -> tuple[I64, int] | None:
        """Slots of the longest prefix of up to ``MAX_ENTRIES`` keys that is stored, int64, and how
        many of the keys behind it others are computing; one round trip.

        Args:
            keys: Of a request, in its order.
            chain: Number of the request, which computes what is missing unless others do; 0: it is
                only looked for.
            over: The request computes it in any case: its waiting is over.

        Returns:
            None: the node is gone, or does not answer.
        """
        told = self._call(Lookup(self.link.pack_keys(keys), chain, over), Slots)
        if told is None:
            return None
        return self._known(*self._pairs(told, len(keys), exactly=False)), told.expected

    def _known(self, slots: I64, epochs: I64) -> I64:
        """Remember slots that the node has told of; -1 in place of those that are no slot."""
        here = (slots >= 0) & (slots < self.num_slots)
        self._epochs[slots[here]], self._live[slots[here]] = epochs[here], True
        return np.where(here, slots, -1)

    def found_each(self, count: int, call: PendingCall[Slots] | None) -> I64 | None:
        """Slot of each of ``count`` keys, -1 where it is not stored, int64, [n]; None: the node is
        gone, or does not answer."""
        told = self._take(call)
        if told is None:
            return None
        slots, epochs = self._pairs(told, count, exactly=True)
        return self._known(slots, epochs) if len(slots) == count else None

    def _pairs(self, told: Slots | Claimed, count: int, *, exactly: bool) -> tuple[I64, I64]:
        """Slots and epochs of an answer about ``count`` keys, none where it cannot be one. A node
        that gives such an answer is gone."""
        try:
            slots, epochs = unpack(told.slots), unpack(told.epochs)
            wrong = len(slots) != len(epochs) or len(slots) > count
            wrong = wrong or (exactly and len(slots) < count)
            why = f"{len(slots)} slots with {len(epochs)} epochs for {count} keys"
        except ValueError as error:
            wrong, why = True, str(error)
        if not wrong:
            return slots, epochs
        logger.error("ssdkv: the node %s gave a wrong answer: %s", self.link.peer.address, why)
        if self._session is not None:
            self._session.end()
        return _NO_SLOTS, _NO_SLOTS

    def epoch(self, slot: int) -> int:
        """Epoch of the slot, as far as this session knows it; else 0."""
        return int(self._epochs[slot])

    def epochs(self, slots: I64) -> I64:
        """Epoch of each slot, int64, shape [n]."""
        return self._epochs[slots]

    def state(self, slot: int) -> SlotState:
        """``READY`` where this session knows of a block in the slot, else ``FREE``."""
        return SlotState.READY if self._live[slot] else SlotState.FREE

    def holds(self, slot: int, epoch: int) -> bool:
        """Check whether the slot has this epoch, as far as this session knows."""
        return bool(self._live[slot]) and epoch == self.epoch(slot)

    # ---- using ----

    def touch_chain(self, keys: Sequence[bytes]) -> None:
        """Mark what is stored of a chain, head first, as just used. Does not wait."""
        for part in parts(keys):
            self._tell(Touch(self.link.pack_keys(part)))

    def pin(self, slots: I64) -> None:
        """Keep slots from eviction, those that still hold what was found. Does not wait."""
        self._current()
        self._note_pins(slots)
        for part in parts(slots):
            self._tell(Pin(pack(part), pack(self._epochs[part])))

    def unpin(self, slots: I64) -> None:
        """Undo one pin of each entry; those of sessions that have ended are gone. Does not wait.

        A slot may have been pinned under several epochs, by requests that do not say which they
        mean: the oldest pin goes first, so that no pin goes before its request has ended.
        """
        self._current()
        held = []
        for slot in slots.tolist():
            epochs = self._pins.get(slot)
            if epochs is None:
                continue
            epoch = epochs.pop(0)
            if epoch:
                held.append((slot, epoch))
            if not epochs:
                del self._pins[slot]
        table = np.array(held, dtype=np.int64).reshape(-1, 2)
        for part in parts(table):
            self._tell(Unpin(pack(part[:, 0]), pack(part[:, 1])))

    def _note_pins(self, slots: I64) -> None:
        for slot, epoch in zip(slots.tolist(), self._epochs[slots].tolist(), strict=True):
            self._pins.setdefault(slot, []).append(epoch)

    def ask_claim(self, keys: Sequence[bytes], *, again: bool) -> PendingCall[Claimed] | None:
        """Claim up to ``MAX_ENTRIES`` keys; :meth:`claimed` must follow."""
        return self._ask(Claim(self.link.pack_keys(keys), first=not again), Claimed)

    def claimed(self, count: int, call: PendingCall[Claimed] | None) -> I64:
        """Slot of each of ``count`` keys, or why there is none; int64, [n]."""
        told = self._take(call)
        if told is None:
            self._metrics.add("stores_skipped", count, cause="node")
            return np.full(count, TAKEN, dtype=np.int64)
        slots, epochs = self._pairs(told, count, exactly=True)
        if len(slots) != count:
            return np.full(count, TAKEN, dtype=np.int64)
        beyond = slots >= self.num_slots
        ours = (slots >= 0) & ~beyond
        self._epochs[slots[ours]], self._live[slots[ours]] = epochs[ours], True
        self._note_pins(slots[ours])
        if beyond.any():
            self._tell(Unpin(pack(slots[beyond]), pack(epochs[beyond])))
            slots = np.where(beyond, FULL, slots)
        return slots

    def grant(self, count: int) -> I64:
        """Slots to write, int64, [count], or none. One round trip."""
        told = self._call(Grant(count), Claimed)
        if told is None:
            return _NO_SLOTS
        slots, epochs = self._pairs(told, count, exactly=False)
        if len(slots) != count or not ((slots >= 0) & (slots < self.num_slots)).all():
            return _NO_SLOTS
        self._epochs[slots], self._live[slots] = epochs, True
        self._note_pins(slots)
        return slots

    def publish(self, slots: I64, keys: Sequence[bytes]) -> None:
        """Every rank has written these slots, which were granted. Does not wait."""
        for part, of_part in zip(parts(slots), parts(keys), strict=True):
            names = self.link.pack_keys(of_part)
            self._tell(Publish(pack(part), pack(self._epochs[part]), names))

    def drop(self, slot: int | I64) -> None:
        """Never find these slots again, if they still hold what this session knows of."""
        slots = np.atleast_1d(slot)
        slots = slots[self._live[slots]]
        self._live[slots] = False
        for part in parts(slots):
            self._tell(Drop(pack(part), pack(self._epochs[part]), "engine"))

    def forget_all(self) -> None:
        """Find nothing any more that is stored now, also in later sessions. One round trip."""
        session = self._current()
        self._forgets = True
        self._have_forgotten(session)

    def step(self) -> None:
        """A step begins."""
        self._current()

    def close(self) -> bool:
        """End the session: the node undoes its pins."""
        self._stopping.set()
        self.link.close()
        self._watch.join(CALL_S + LOOK_S)
        return True


Entries = TypeVar("Entries", Sequence[bytes], I64)


def parts(entries: Entries) -> Iterator[Entries]:
    """Cut what is longer than a message may be."""
    for begin in range(0, len(entries), MAX_ENTRIES):
        yield entries[begin : begin + MAX_ENTRIES]
