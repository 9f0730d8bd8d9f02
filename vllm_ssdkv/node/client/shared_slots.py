"""Slots of volumes that several engines in mode ``page`` share, as a scheduler uses them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import StoreFullError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.node.client.node_existence import NodeExistence
from vllm_ssdkv.node.client.remote_index import RemoteIndex
from vllm_ssdkv.node.protocol.messages import MAX_ENTRIES
from vllm_ssdkv.store.index.slot_index import SlotIndex, SlotState

I64 = NDArray[np.int64]


class SharedSlots(RemoteIndex):
    """Index of shared volumes, for page mode. Used by the scheduler's thread.

    The node grants slots to write and keeps what others read; a slot without a user here is as good
    as unknown, since others may have it written anew. What was granted or found in a session with
    the node is worth nothing in the next one.

    Attributes:
        usable: Whether the drives can be used, as far as the workers say.

    Example:
        slots = SharedSlots(member, "unix:///run/ssdkv.sock", counters, state)
        slots.obtain(16)
        slots.reserve(16)
    """

    def __init__(self, member: NodeExistence, name: str, counters: Counters, state: SlotIndex):
        """
        Args:
            member: Existence in the node, closed by :meth:`close`.
            name: Of the node.
            counters: Of the scheduler.
            state: Index of this engine's state directory, with no block; closed likewise.
        """
        super().__init__([member], [name], counters, 1)
        self._state = state
        self.usable: Callable[[], bool] = lambda: True
        self._node, self._session = member, member.session
        self._users: Counter[int] = Counter()
        """Pins of each slot by this engine, in this session."""
        self._since: dict[int, int] = {}
        """Epoch of each of these slots at its first pin."""
        self._old: Counter[int] = Counter()
        """Pins of ended sessions. Workers may still have the old content of these slots."""
        self._keys: dict[int, bytes] = {}
        """Keys of slots with users."""
        self._published: dict[bytes, int] = {}
        """The reverse."""
        self._granted: list[int] = []
        self._reserved = 0
        self._asked = self._lost = False
        self._counts = dict.fromkeys(("allocated", "published", "dropped", "refused"), 0)

    # ---- the session ----

    def step(self) -> None:
        """See :class:`RemoteIndex`. Slots that were obtained before the last step, and that nobody
        has reserved, go back."""
        super().step()
        self._look()
        if not self._asked:
            self._give_back()
        self._asked = False

    def computes_no_more(self, name: str) -> None:
        """See :class:`RemoteIndex`. Slots that were obtained for it go back."""
        super().computes_no_more(name)
        self._give_back()

    def _look(self) -> None:
        """Notice that a session has ended, and with it all that the node kept for this engine."""
        session = self._node.session
        if session is self._session:
            return
        self._lost |= self._session is not None
        self._session = session
        super().unpin(np.array(self._granted, dtype=np.int64))
        self._granted.clear()
        self._old.update(self._users)
        self._users.clear()
        self._since.clear()
        self._keys.clear()
        self._published.clear()

    def take_loss(self) -> bool:
        """Check whether slots were lost with a session since the last call."""
        self._look()
        lost, self._lost = self._lost, False
        return lost

    def _give_back(self) -> None:
        """Have the node grant to others what nobody has reserved here. Does not wait."""
        slots = np.array(self._granted[self._reserved :], dtype=np.int64)
        del self._granted[self._reserved :]
        super().unpin(slots)

    # ---- room ----

    def obtain(self, count: int) -> None:
        """Have the node grant slots, so that ``count`` are available; one round trip at most."""
        self._look()
        self._asked = True
        missing = count - self.available()
        if 0 < missing <= MAX_ENTRIES and self.usable():
            granted = self._node.grant(missing)
            self._look()
            if any(slot in self._old for slot in granted.tolist()):
                super().unpin(granted)
            else:
                self._granted += granted.tolist()

    def available(self) -> int:
        """Slots that are granted and not reserved."""
        return max(0, len(self._granted) - self._reserved) if self.usable() else 0

    def reserve(self, n: int) -> None:
        """As :meth:`SlotIndex.reserve`. Whom a session has left since :meth:`obtain` is sent back
        with all others, and not refused here: nobody would listen."""
        if n > self.available() and not self._lost:
            self._counts["refused"] += 1
            raise StoreFullError(f"{n} slots are to be reserved: {self.available()} are granted")
        self._reserved += n

    def unreserve(self, n: int) -> None:
        """As :meth:`SlotIndex.unreserve`."""
        if not 0 <= n <= self._reserved:
            raise ValueError(f"unreserve {n} of {self._reserved} reserved slots")
        self._reserved -= n
        self._give_back()

    def allocate(self, n: int, *, reserved: bool = False) -> I64:
        """As :meth:`SlotIndex.allocate`; a request that goes on with more input asks the node."""
        if not reserved:
            self.obtain(n)
        if n > (len(self._granted) if reserved and self.usable() else self.available()):
            self._counts["refused"] += 1
            raise StoreFullError(f"{n} slots are needed: {len(self._granted)} are granted")
        slots = [self._granted.pop() for _ in range(n)]
        self._reserved -= n if reserved else 0
        self._use(slots)
        self._counts["allocated"] += n
        return np.array(slots, dtype=np.int64)

    def forget_stored(self) -> None:
        """See :class:`RemoteIndex`; not even blocks of running requests are found."""
        super().forget_stored()
        self._published.clear()

    def retain(self, slots: I64, seconds: float, share: float) -> None:
        """Nothing: the node evicts as all engines use blocks."""

    def free_slots(self) -> I64:
        """None: a slot that is free here may be another engine's."""
        return np.zeros(0, dtype=np.int64)

    def mask(self, slots: I64) -> tuple[int, int]:
        """Drop slots that cannot be read; as :meth:`SlotIndex.mask`. Where this engine cannot use
        the drives, others may: they go on to find them."""
        if self.usable():
            self.drop(slots)
            return 0, len(slots)
        for slot in slots.tolist():
            self._forget_key(slot)
        return len(slots), 0

    # ---- using ----

    def find(self, key: bytes) -> int | None:
        """Slot of a block that this engine uses, or that was found in this step. Asks nobody."""
        slot = self._published.get(key, super().find(key))
        return slot if slot is not None and self._is_here(slot, key) else None

    def _is_here(self, slot: int, key: bytes) -> bool:
        """Check whether workers may take a slot for this block.

        They know slots by number alone. Of a slot that has a user they have what it held then,
        which the node has given to others if the pin came too late, or in a session before.
        """
        since = self._since.get(slot)
        if slot in self._old or (since is not None and since != self.epoch(slot)):
            return False
        return key == (self._keys.get(slot) or self._names.get(slot))

    def lookup(self, keys: Sequence[bytes]) -> I64:
        """See :class:`RemoteIndex`; up to a slot that workers have still to forget."""
        slots = super().lookup(keys)
        self._look()
        here = [self._is_here(*pair) for pair in zip(slots.tolist(), keys, strict=False)]
        return slots[: here.index(False)] if False in here else slots

    def state(self, slot: int) -> SlotState:
        """``READY`` where this engine uses a slot, else ``FREE``: workers are to forget it."""
        used = slot in self._users or slot in self._old
        return SlotState.READY if used else SlotState.FREE

    def pin(self, slots: I64) -> None:
        """As :meth:`RemoteIndex.pin`; the node is told of the first pin of a slot."""
        self._look()
        new = [slot for slot in dict.fromkeys(slots.tolist()) if slot not in self._users]
        self._use(slots.tolist())
        super().pin(np.array(new, dtype=np.int64))
        for slot in new:
            if slot in self._names:
                self._remember_key(slot, self._names[slot])

    def _use(self, slots: Sequence[int]) -> None:
        self._users.update(slots)
        for slot in slots:
            self._since.setdefault(slot, self.epoch(slot))

    def _remember_key(self, slot: int, key: bytes) -> None:
        self._keys[slot] = key
        self._published.setdefault(key, slot)

    def _forget_key(self, slot: int) -> None:
        key = self._keys.pop(slot, None)
        if key is not None and self._published.get(key) == slot:
            del self._published[key]

    def unpin(self, slots: I64) -> None:
        """As :meth:`RemoteIndex.unpin`; the node is told of the last one of a slot."""
        self._look()
        gone = []
        for slot in slots.tolist():
            users = self._old if slot in self._old else self._users
            users[slot] -= 1
            if users[slot] <= 0:
                del users[slot]
                gone.append(slot)
                if users is self._users:
                    del self._since[slot]
                    self._forget_key(slot)
        super().unpin(np.array(gone, dtype=np.int64))

    def publish(self, slot: int, key: bytes) -> bool:
        """Have this engine's requests find an allocated slot; False: another one has the key."""
        if key in self._published:
            return False
        if self.epoch(slot):
            self._remember_key(slot, key)
        self._counts["published"] += 1
        return True

    def durable(self, slot: int | I64) -> None:
        """Every rank has written these slots: have all engines find them. Does not wait."""
        written = [slot for slot in np.atleast_1d(slot).tolist() if slot in self._keys]
        super().durable(np.array(written, dtype=np.int64))
        keys = [self._keys[slot] for slot in written]
        self._node.publish(np.array(written, dtype=np.int64), keys)

    def drop(self, slot: int | I64) -> None:
        """See :class:`RemoteIndex`."""
        slots = np.unique(slot)  # of several blocks one slot each
        super().drop(slots)
        for one in slots.tolist():
            self._counts["dropped"] += 1
            self._forget_key(one)

    def close(self) -> bool:
        """End the session, and with it all pins and grants."""
        closed = super().close()
        return self._state.close() and closed

    # ---- numbers ----

    @property
    def counters(self) -> dict[str, int]:
        """Counts since the start, of this engine."""
        return dict(self._counts)

    def gauges(self) -> dict[str, int]:
        """Numbers of slots as this engine sees them: free, or in use."""
        pinned = len(self._users.keys() | self._old.keys()) + len(self._granted)
        names = ("ready", "evictable", "retained", "masked", "lost", "journal_bytes")
        return {
            **dict.fromkeys(names, 0),
            "free": self.num_slots - pinned,
            "pinned": pinned,
            "ready": len(self._keys),
        }

    def key(self, slot: int) -> bytes:
        """Key of a slot that this engine uses, or that was found in this step."""
        return self._keys.get(slot) or super().key(slot)
