"""Existence in a node, as a scheduler asks for it.

Satisfies the protocols ``BlockIndex`` and ``SlotPlacement`` of the connector.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import NodeError, StoreError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.node.client.awaited_chains import AwaitedChains
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
    Last,
    Leave,
    Lookup,
    Message,
    Pin,
    Position,
    Slots,
    Touch,
    Unpin,
    pack,
    unpack,
)
from vllm_ssdkv.store.block_index import Seconds
from vllm_ssdkv.store.format.segment import Segment
from vllm_ssdkv.store.index.computed_blocks import ComputedBlocks
from vllm_ssdkv.store.index.slot_index import FULL, TAKEN, SlotState

logger = logging.getLogger(__name__)

I64 = NDArray[np.int64]

LOOK_S: Final = 1.0
"""Pause between questions that notice that the node is gone, in seconds."""

_NO_SLOTS: Final = np.zeros(0, dtype=np.int64)

Answer = TypeVar("Answer", bound=Message)


class RemoteIndex:
    """Index of a node, used by the scheduler's thread.

    What was found is remembered until the next step, so that a load that was promised to vLLM can
    be planned whatever the node does meanwhile: loads check epochs and keys. While the node does
    not answer, nothing is found, and no block gets a slot.

    Example:
        index = RemoteIndex(link, counters)
        slots = index.lookup(keys)
    """

    node_replicas = 1
    """Of the protocol ``BlockIndex``."""

    def __init__(self, link: NodeLink, counters: Counters, *, num_slots: int = 0):
        """
        Args:
            link: Was started; it is closed by :meth:`close`.
            counters: Of the scheduler.
            num_slots: Slots that the node is taken to have if it does not answer yet.

        Raises:
            StoreError: the node is gone, and ``num_slots`` does not say how many it has.
        """
        session = link.session
        if session is None and not num_slots:
            raise StoreError(f"the node {link.peer.address} is gone")
        self._link, self._metrics = link, counters
        self._session: Session | None = session
        self.num_slots = num_slots if session is None else session.welcome.num_slots
        self.counters: Mapping[str, int] = Counter()
        self._stored = 0
        self._epochs = np.zeros(self.num_slots, dtype=np.int64)
        """Of slots as this session knows them; 0: not known."""
        self._live = np.zeros(self.num_slots, dtype=np.bool_)
        """Slots that hold what this session knows of, as far as it knows."""
        self._found: dict[bytes, int] = {}
        """Slots by key, of the lookups since the last step."""
        self._names: dict[int, bytes] = {}
        """The reverse."""
        self._absent: set[bytes] = set()
        """Keys that were not found since the last step."""
        self._chains = AwaitedChains()
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
        session = self._link.session
        if session is not self._session:
            # Not what was found: a load of it may have been promised, and fails by itself.
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
                    self._link.peer.address,
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
    def connected(self) -> bool:
        """Check whether the node answers, as far as is known."""
        return self._link.session is not None

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
                    "ssdkv: the node %s refused a call: %s", self._link.peer.address, error
                )
            return None

    def _tell(self, message: Message) -> None:
        session = self._current()
        if session is not None:
            session.tell(message)

    def _look(self) -> None:
        """Notice in a thread that the node is gone: who asks nothing would not."""
        while not self._stopping.wait(LOOK_S):
            session = self._link.session
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
                store = self._link.peer.store
                if store is None or len(weights) == store.ranks:
                    return weights
                why = f"it tells of {len(weights)} ranks"
            except NodeError as error:
                why = str(error)
        raise StoreError(
            f"nodes: the node {self._link.peer.address} does not know what weights this engine's "
            f"workers hold: {why}; start the engine again"
        )

    # ---- finding ----

    def find(self, key: bytes) -> int | None:
        """Slot of a key that was found in this step. Asks nobody."""
        return self._found.get(key)

    def lookup(self, keys: Sequence[bytes]) -> I64:
        """Slots of the longest prefix of ``keys`` that is ready; one round trip, or none where all
        of them were found in this step."""
        known = [self._found.get(key, -1) for key in keys]
        end = known.index(-1) if -1 in known else len(known)
        if end == len(known) or keys[end] in self._absent:
            return np.array(known[:end], dtype=np.int64)
        found = [_NO_SLOTS]
        for part in parts(keys):
            told = self._call(Lookup(self._link.pack_keys(part)), Slots)
            if told is None:
                break
            found.append(self._usable(part, told))
            if len(found[-1]) < len(part):
                break
        return np.concatenate(found)

    def awaits(self, name: str, keys: Sequence[bytes], seconds: Seconds, head: bytes = b"") -> bool:
        """Check whether a request had better wait: others compute what is missing of its blocks.

        Args:
            name: Of the request.
            keys: Of its blocks that are not in HBM.
            seconds: Says how long it would compute all of them.
            head: Not used here.
        """
        chain = self._chains.of(name)
        if not self._chains.asks_again(chain):
            return True
        over = chain.over or (chain.begun is not None and self._chains.overdue(chain, seconds()))
        part = keys[:MAX_ENTRIES]
        told = self.look_for_others(chain.number, part, over=over)
        if told is not None:
            slots = self._usable(part, told)
            if told.expected and not over:
                self._chains.told(chain, len(slots))
                return True
            self._absent.update(part[len(slots) : len(slots) + 1])
        if chain.begun is not None:
            chain.begun = None
            self._metrics.add("prefix_waits", 1, end="taken_over" if over else "served")
        return False

    def computes_no_more(self, name: str) -> None:
        """A request has ended. Does not wait."""
        chain = self._chains.take(name)
        if chain is not None:
            self.leave(chain.number)

    def look_for_others(self, chain: int, keys: Sequence[bytes], *, over: bool) -> Slots | None:
        """Look up blocks that a request is to compute unless others do, or in any case if its
        waiting is ``over``; None: the node is gone."""
        return self._call(Lookup(self._link.pack_keys(keys), chain, over), Slots)

    def leave(self, chain: int) -> None:
        """The request with this number computes nothing more. Does not wait."""
        self._tell(Leave(chain))

    def go_on(self, chain: int) -> None:
        """The request with this number still computes. Does not wait."""
        self._tell(GoOn(chain))

    def ask_each(self, keys: Sequence[bytes]) -> PendingCall[Slots] | None:
        """Ask which of up to ``MAX_ENTRIES`` keys are stored; :meth:`found_each` must follow."""
        return self._ask(Find(self._link.pack_keys(keys)), Slots) if self.connected else None

    def found_each(self, count: int, call: PendingCall[Slots] | None) -> I64:
        """Slot of each of ``count`` keys, -1 where it is not stored; int64, [n]."""
        told = self._take(call)
        found = np.full(count, -1, dtype=np.int64)
        if told is None:
            return found
        slots, epochs = self._pairs(told, count, exactly=True)
        if len(slots) != count:
            return found
        here = (slots >= 0) & (slots < self.num_slots)
        self._epochs[slots[here]], self._live[slots[here]] = epochs[here], True
        found[here] = slots[here]
        return found

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
        logger.error("ssdkv: the node %s gave a wrong answer: %s", self._link.peer.address, why)
        if self._session is not None:
            self._session.end()
        return _NO_SLOTS, _NO_SLOTS

    def _usable(self, keys: Sequence[bytes], told: Slots) -> I64:
        """Slots of an answer that are below :attr:`num_slots`, remembered."""
        slots, epochs = self._pairs(told, len(keys), exactly=False)
        inside = (slots >= 0) & (slots < self.num_slots)
        if not inside.all():
            slots, epochs = slots[: inside.argmin()], epochs[: inside.argmin()]
        self._remember(keys, slots, epochs)
        return slots

    def _remember(self, keys: Sequence[bytes], slots: I64, epochs: I64) -> None:
        self._epochs[slots], self._live[slots] = epochs, True
        for key, slot in zip(keys, slots.tolist(), strict=False):
            self._found[key] = slot
            self._names[slot] = key

    def last(self, keys: Sequence[bytes], first: int, end: int, tags: Sequence[int]) -> int:
        """The last n of ``first`` < n <= ``end`` whose key is ready with each of ``tags``; one
        round trip."""
        if end <= first:
            return first
        begin = max(first, end - MAX_ENTRIES)
        message = Last(self._link.pack_keys(keys[begin:end]), begin, end, list(tags))
        told = self._call(message, Position)
        if told is None or not begin < told.position <= end:
            return first
        return told.position

    def epoch(self, slot: int) -> int:
        """Epoch of the slot, as far as this session knows it; else 0."""
        return int(self._epochs[slot])

    def epochs(self, slots: I64) -> I64:
        """Epoch of each slot, int64, shape [n]."""
        return self._epochs[slots]

    def key(self, slot: int) -> bytes:
        """Key of a slot that was found in this step.

        Raises:
            ValueError: it was not.
        """
        if slot not in self._names:
            raise ValueError(f"slot {slot} was not found in this step")
        return self._names[slot]

    def state(self, slot: int) -> SlotState:
        """``READY`` where this session knows of a block in the slot, else ``FREE``."""
        return SlotState.READY if self._live[slot] else SlotState.FREE

    def holds(self, slot: int, epoch: int) -> bool:
        """Check whether the slot has this epoch, as far as this session knows."""
        return bool(self._live[slot]) and epoch == self.epoch(slot)

    def order(self) -> I64:
        """None: the store is not this engine's alone."""
        return _NO_SLOTS

    def free_slots(self) -> I64:
        """None: the devices are the node's."""
        return _NO_SLOTS

    # ---- using ----

    def touch_chain(self, keys: Sequence[bytes]) -> None:
        """Mark what is stored of a chain, head first, as just used. Does not wait."""
        for part in parts(keys):
            self._tell(Touch(self._link.pack_keys(part)))

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

    def others(self, slots: I64) -> tuple[I64, I64]:
        """None: a block is on this node alone."""
        return _NO_SLOTS, _NO_SLOTS

    def claim(
        self, keys: Sequence[bytes], *, again: bool = False, of: ComputedBlocks | None = None
    ) -> I64:
        """A slot of this session for each key, or why there is none; one round trip.

        Blocks are found once every rank has saved them. While the node is gone there are no slots.
        """
        calls = ((part, self.ask_claim(part, again=again)) for part in parts(keys))
        found = [self.claimed(len(part), call) for part, call in calls]
        return np.concatenate(found) if found else _NO_SLOTS

    def ask_claim(self, keys: Sequence[bytes], *, again: bool) -> PendingCall[Claimed] | None:
        """Claim up to ``MAX_ENTRIES`` keys; :meth:`claimed` must follow."""
        return self._ask(Claim(self._link.pack_keys(keys), first=not again), Claimed)

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

    def durable(self, slot: int | I64) -> None:
        """Count what every rank has written; the node knows it already."""
        self._stored += len(np.atleast_1d(slot))
        self.counters = {"published": self._stored}

    def drop(self, slot: int | I64) -> None:
        """Never find these slots again, if they still hold what this session knows of."""
        slots = np.atleast_1d(slot)
        slots = slots[self._live[slots]]
        self._live[slots] = False
        for part in parts(slots):
            self._tell(Drop(pack(part), pack(self._epochs[part]), "engine"))

    def gauges(self) -> dict[str, int]:
        """None: the node tells them itself, once for all engines."""
        return {}

    def forget_all(self) -> None:
        """Find nothing any more that is stored now, also in later sessions. One round trip."""
        self._found.clear()
        self._names.clear()
        self._absent.clear()
        session = self._current()
        self._forgets = True
        self._have_forgotten(session)

    def step(self) -> None:
        """A step begins: what was found before it is asked for again."""
        self._current()
        self._found.clear()
        self._names.clear()
        self._absent.clear()

    def close(self) -> bool:
        """End the session: the node undoes its pins."""
        self._stopping.set()
        self._link.close()
        self._watch.join(CALL_S + LOOK_S)
        return True


class IndexOnNodes(Protocol):
    """An index that nodes keep, as far as placement concerns it."""

    def step(self) -> None:
        """A step begins."""

    def forget_all(self) -> None:
        """Find nothing any more that is stored now."""


class RemotePlacement:
    """Placement of a node's slots, of which a scheduler has nothing to decide.

    Example:
        placement = RemotePlacement(index)
    """

    weights: Sequence[float] = ()
    slots_to_come = 0

    def __init__(self, index: IndexOnNodes):
        self._index = index

    def step(self) -> None:
        """A step begins."""
        self._index.step()

    def reweigh(self, weights: Sequence[float]) -> None:
        """Nothing: the devices are the node's."""

    def mask_lost(self) -> int:
        """Nothing: the devices are the node's."""
        return 0

    def take_returned(self) -> int:
        """Nothing: the devices are the node's."""
        return 0

    def unmask(self, slots: I64) -> int:
        """Nothing: the slots are the node's."""
        del slots
        return 0

    def take_segments(self) -> tuple[Segment, ...] | None:
        """None: workers read no devices."""
        return None

    def forget_stored(self) -> None:
        """Have this engine find nothing older than now; the store is not emptied."""
        self._index.forget_all()
        logger.info(
            "ssdkv: this engine finds nothing any more that its node has stored so far; other "
            "engines go on to find it"
        )

    def close(self) -> bool:
        """Nothing is open."""
        return True


Entries = TypeVar("Entries", Sequence[bytes], I64)


def parts(entries: Entries) -> Iterator[Entries]:
    """Cut what is longer than a message may be."""
    for begin in range(0, len(entries), MAX_ENTRIES):
        yield entries[begin : begin + MAX_ENTRIES]
