"""Existence in nodes, one or several, as a scheduler asks for it.

The scheduler's half of a tier, ``TierIndex`` and ``TierSteps``.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import StoreError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.node.client.awaited_chains import AwaitedChains
from vllm_ssdkv.node.client.node_existence import NodeExistence, parts
from vllm_ssdkv.node.client.node_link import START_S, NodeLink
from vllm_ssdkv.node.client.node_links import ConnectedShare, start_links
from vllm_ssdkv.node.client.rendezvous import Rendezvous
from vllm_ssdkv.node.client.session import Peer
from vllm_ssdkv.node.protocol.messages import MAX_ENTRIES
from vllm_ssdkv.store.index.computed_blocks import ComputedBlocks
from vllm_ssdkv.store.index.slot_index import TAKEN, SlotState
from vllm_ssdkv.store.tier import Seconds

logger = logging.getLogger(__name__)

I64 = NDArray[np.int64]

_NO_SLOTS: Final = np.zeros(0, dtype=np.int64)


class RemoteIndex:
    """Index of a pool of nodes, often of one, used by the scheduler's thread.

    Slot ``s`` of node ``i`` of n has number ``s * n + i``. A block is looked for on all nodes at
    once, and stored on those that are first in the order of its run and answer. So what lies on a
    node out of turn is found, and stored where it belongs when a request has loaded it.

    What was found is remembered until the next step, so that a load that was promised to vLLM can
    be planned whatever the nodes do meanwhile: loads check epochs and keys.

    Example:
        index = RemoteIndex.open(peers, ["unix:///a", "unix:///b"], counters)
        slots = index.lookup(keys)
    """

    def __init__(
        self,
        members: Sequence[NodeExistence],
        names: Sequence[str],
        counters: Counters,
        replicas: int,
    ):
        """
        Args:
            members: Existence in each node; closed by :meth:`close`.
            names: Of the nodes, the same for all engines.
            counters: Of the scheduler.
            replicas: Nodes that are to keep a block.
        """
        self.members, self._metrics = members, counters
        self._order = Rendezvous(names)
        self.node_replicas = replicas
        self.num_slots = len(members) * max(member.num_slots for member in members)
        self._found: dict[bytes, int] = {}
        """Slots by key, of the lookups since the last step."""
        self._names: dict[int, bytes] = {}
        """The reverse."""
        self._others: dict[int, int] = {}
        """Slot with the same block on another node, where there is one."""
        self._absent: set[bytes] = set()
        """Keys that were not found since the last step."""
        self._chains = AwaitedChains()
        self._homes: dict[str, int] = {}
        """Node that keeps the chain of a request, by its name."""

    @classmethod
    def open(
        cls,
        peers: Sequence[Peer],
        names: Sequence[str],
        counters: Counters,
        replicas: int = 1,
        timeout: float = START_S,
    ) -> RemoteIndex:
        """Open the first session with each node; later with those that do not answer in time.

        Args:
            peers: The nodes, and the scheduler of this engine.
            names: Of the nodes, the same for all engines.
            counters: Of the scheduler.
            replicas: Nodes that are to keep a block.
            timeout: Seconds for which a node that does not answer is waited for.

        Raises:
            StoreError: see :func:`start_links`.
        """
        share, pooled = ConnectedShare(counters, len(peers)), len(peers) > 1
        links = [
            NodeLink(
                *(peer, counters),
                with_bytes=False,
                connected=functools.partial(share.set, node),
                pooled=pooled,
            )
            for node, peer in enumerate(peers)
        ]
        slots = start_links(links, timeout).num_slots
        members = [NodeExistence(link, counters, slots) for link in links]
        return cls(members, names, counters, replicas)

    @property
    def name_key(self) -> bytes:
        """Key under which the scheduler hides keys; empty where each link does it."""
        return self.members[0].name_key if len(self.members) == 1 else b""

    def bind(self, patience_s: float) -> list[bytes]:
        """Digest of each rank's weights, as the first node says that knows those of all.

        Raises:
            StoreError: no node does.
        """
        told: queue.SimpleQueue[list[bytes] | StoreError] = queue.SimpleQueue()

        def ask(member: NodeExistence) -> None:
            try:
                told.put(member.bind(patience_s))
            except StoreError as error:
                told.put(error)

        for member in self.members:
            threading.Thread(target=ask, args=(member,), name="ssdkv-bind", daemon=True).start()
        refused: list[StoreError] = []
        while len(refused) < len(self.members):
            answer = told.get()
            if not isinstance(answer, StoreError):
                return answer
            refused.append(answer)
        raise refused[0]

    @property
    def connected(self) -> bool:
        """Check whether any node answers, as far as is known."""
        return any(member.connected for member in self.members)

    # ---- finding ----

    def _ask_all(self, keys: Sequence[bytes]) -> None:
        """Remember where each of these keys is, if any node says; one round trip."""
        count = len(self.members)
        for part in parts(keys):
            calls = [member.ask_each(part) for member in self.members]
            found = [
                member.found_each(len(part), call)
                for member, call in zip(self.members, calls, strict=True)
            ]
            if all(slots is None for slots in found):
                return
            nowhere = np.full(len(part), -1, dtype=np.int64)
            table = np.stack([nowhere if slots is None else slots for slots in found])
            nodes = np.arange(count)[:, None]
            table = np.where(table >= 0, table * count + nodes, -1)
            # Of two nodes with a block each gives half of the blocks.
            turn = np.array([key[0] for key in part], dtype=np.int64)
            columns = np.arange(len(part))
            table = table[(nodes + turn) % count, columns]
            first = _take_first(table)
            second = _take_first(table)
            for key, slot, other in zip(part, first.tolist(), second.tolist(), strict=True):
                if slot < 0:
                    self._absent.add(key)
                    continue
                self._found[key], self._names[slot] = slot, key
                if other >= 0:
                    self._others[slot] = other

    def _ask_new(self, keys: Sequence[bytes]) -> None:
        """Ask for those keys that were not asked for since the last step."""
        new = [key for key in keys if key not in self._found and key not in self._absent]
        if new:
            self._ask_all(new)

    def _ask_prefix(self, keys: Sequence[bytes]) -> None:
        """Ask the only node for as much of a prefix as it has: it looks no further."""
        for part in parts(keys):
            told = self.members[0].prefix(part)
            if told is None or self._remember(part, told[0]) < len(part):
                return

    def _remember(self, keys: Sequence[bytes], slots: I64) -> int:
        """Remember what the only node has of a prefix; its length."""
        there = slots.tolist()
        there = there[: there.index(-1)] if -1 in there else there
        self._found.update(zip(keys, there, strict=False))
        self._names.update(zip(there, keys, strict=False))
        self._absent.update(keys[len(there) : len(there) + 1])
        return len(there)

    def find(self, key: bytes) -> int | None:
        """Slot of a key that was found in this step. Asks nobody."""
        return self._found.get(key)

    def lookup(self, keys: Sequence[bytes]) -> I64:
        """Slots of the longest prefix of ``keys`` that is ready on any node; one round trip, or
        none where they were looked for in this step."""
        known = [self._found.get(key, -1) for key in keys]
        end = known.index(-1) if -1 in known else len(known)
        if end < len(known) and keys[end] not in self._absent:
            ask = self._ask_prefix if len(self.members) == 1 else self._ask_new
            ask(keys[end:])
            known = [self._found.get(key, -1) for key in keys]
            end = known.index(-1) if -1 in known else len(known)
        return np.array(known[:end], dtype=np.int64)

    def find_each(self, keys: Sequence[bytes]) -> I64:
        """Slot of each key, -1 where no node says that it is stored, int64, [n]; one round trip, or
        none where they were looked for in this step."""
        self._ask_new(keys)
        return np.array([self._found.get(key, -1) for key in keys], dtype=np.int64)

    def last(self, keys: Sequence[bytes], first: int, end: int, tags: Sequence[int]) -> int:
        """The last n of ``first`` < n <= ``end`` whose key is ready with each of ``tags``; one
        round trip."""
        begin = max(first, end - MAX_ENTRIES // max(1, len(tags)))
        tagged = [
            [key[:-1] + bytes((key[-1] ^ tag,)) for tag in tags]
            for key in keys[begin : max(0, end)]
        ]
        self._ask_new([key for of_block in tagged for key in of_block])
        for n in range(len(tagged), 0, -1):
            if all(key in self._found for key in tagged[n - 1]):
                return begin + n
        return first

    # ---- chains ----

    def awaits(self, name: str, keys: Sequence[bytes], seconds: Seconds, head: bytes = b"") -> bool:
        """Check whether a request had better wait: others compute what is missing of its blocks.

        One node keeps the chain, the first of those that answer in the order of ``head``, so that
        of requests which begin alike one computes. What others store meanwhile is seen on any node.

        Args:
            name: Of the request.
            keys: Of its blocks that are not in HBM.
            seconds: Says how long it would compute all of them.
            head: Key of its first block.
        """
        chain = self._chains.of(name)
        if not self._chains.asks_again(chain):
            return True
        over = chain.over or (chain.begun is not None and self._chains.overdue(chain, seconds()))
        lone = len(self.members) == 1  # what it has is in the same answer
        found = 0 if lone else len(self.lookup(keys))
        missing = keys[found : found + MAX_ENTRIES]
        ranked = self._ranked(head or keys[0])
        if missing and ranked:
            self._leave_other(name, chain.number, ranked[0])
            told = self.members[ranked[0]].prefix(missing, chain.number, over=over)
            slots, expected = (_NO_SLOTS, 0) if told is None else told
            if lone and told is not None:
                found = self._remember(missing, slots)
            if expected and not over:
                self._chains.told(chain, found)
                return True
            if not lone and (chain.begun is not None or len(slots)):
                self._absent.difference_update(missing)  # stored since they were asked for
        if chain.begun is not None:
            chain.begun = None
            self._metrics.add("prefix_waits", 1, end="taken_over" if over else "served")
        return False

    def _leave_other(self, name: str, number: int, home: int) -> None:
        """The chain is kept by this node from now on."""
        before = self._homes.get(name, home)
        if before != home:
            self.members[before].leave(number)
        self._homes[name] = home

    def computes_no_more(self, name: str) -> None:
        """A request has ended. Does not wait."""
        chain, home = self._chains.take(name), self._homes.pop(name, None)
        if chain is not None and home is not None:
            self.members[home].leave(chain.number)

    def _ranked(self, head: bytes) -> list[int]:
        """Nodes that answer, in the order of a run."""
        return [node for node in self._order.ranked(head) if self.members[node].connected]

    # ---- slots ----

    def _at(self, slot: int) -> tuple[NodeExistence, int]:
        """Node of a slot, and its number there."""
        count = len(self.members)
        return self.members[slot % count], slot // count

    def _by_node(self, slots: I64) -> Iterator[tuple[NodeExistence, I64, NDArray[np.bool_]]]:
        """Nodes that have some of these slots, their numbers there, and which they are, [n]."""
        count = len(self.members)
        for node, member in enumerate(self.members):
            here = slots % count == node
            if here.any():
                yield member, slots[here] // count, here

    def others(self, slots: I64) -> tuple[I64, I64]:
        """Slots with the same blocks on other nodes, as they were found in this step, -1 where none
        is known, and their epochs; both [n], or empty."""
        others = np.array([self._others.get(slot, -1) for slot in slots.tolist()], dtype=np.int64)
        if not (others >= 0).any():
            return _NO_SLOTS, _NO_SLOTS
        return others, np.where(others >= 0, self.epochs(np.maximum(others, 0)), 0)

    def epoch(self, slot: int) -> int:
        """Epoch of the slot, as far as is known; else 0."""
        member, own = self._at(slot)
        return member.epoch(own)

    def epochs(self, slots: I64) -> I64:
        """Epoch of each slot, int64, shape [n]."""
        found = np.zeros(len(slots), dtype=np.int64)
        for member, own, here in self._by_node(slots):
            found[here] = member.epochs(own)
        return found

    def key(self, slot: int) -> bytes:
        """Key of a slot that was found in this step.

        Raises:
            ValueError: it was not.
        """
        if slot not in self._names:
            raise ValueError(f"slot {slot} was not found in this step")
        return self._names[slot]

    def state(self, slot: int) -> SlotState:
        """``READY`` where this engine knows of a block in the slot, else ``FREE``."""
        member, own = self._at(slot)
        return member.state(own)

    def holds(self, slot: int, epoch: int) -> bool:
        """Check whether the slot has this epoch, as far as is known."""
        member, own = self._at(slot)
        return member.holds(own, epoch)

    # ---- using ----

    def touch_chain(self, keys: Sequence[bytes]) -> None:
        """Mark what is stored of a chain, head first, as just used. Does not wait."""
        for member in self.members:
            if member.connected:
                member.touch_chain(keys)

    def pin(self, slots: I64) -> None:
        """Keep slots from eviction, those that still hold what was found. Does not wait."""
        for member, own, _ in self._by_node(slots):
            member.pin(own)

    def unpin(self, slots: I64) -> None:
        """Undo one pin of each entry. Does not wait."""
        for member, own, _ in self._by_node(slots):
            member.unpin(own)

    def claim(
        self, keys: Sequence[bytes], *, again: bool = False, of: ComputedBlocks | None = None
    ) -> I64:
        """A slot for each key, or why there is none; one round trip.

        The second time that a key comes it is claimed on the next node in the order of its run.
        Nothing is stored where fewer nodes answer.
        """
        slots = np.full(len(keys), TAKEN, dtype=np.int64)
        wanted: list[list[int]] = [[] for _ in self.members]
        times: Counter[bytes] = Counter()
        for at, head in enumerate(keys if of is None else of.runs):
            ranked, key = self._ranked(head), keys[at]
            if times[key] < len(ranked):
                wanted[ranked[times[key]]].append(at)
            else:
                self._metrics.add("stores_skipped", 1, cause="node")
            times[key] += 1
        if of is not None and of.request in self._homes:
            self.members[self._homes[of.request]].go_on(self._chains.of(of.request).number)
        for begin in range(0, max(map(len, wanted)), MAX_ENTRIES):
            asked = [positions[begin : begin + MAX_ENTRIES] for positions in wanted]
            calls = [
                member.ask_claim([keys[at] for at in positions], again=again) if positions else None
                for member, positions in zip(self.members, asked, strict=True)
            ]
            for node, (positions, call) in enumerate(zip(asked, calls, strict=True)):
                if positions:
                    own = self.members[node].claimed(len(positions), call)
                    slots[positions] = np.where(own >= 0, own * len(self.members) + node, own)
        return slots

    def durable(self, slot: int | I64) -> None:
        """Count what every rank has written; the node knows it already."""
        self._metrics.add("slots_stored", len(np.atleast_1d(slot)))

    def drop(self, slot: int | I64) -> None:
        """Never find these slots again, if they still hold what this engine knows of."""
        for member, own, _ in self._by_node(np.atleast_1d(slot)):
            member.drop(own)

    def forget_stored(self) -> None:
        """Find nothing any more that is stored now, on any node; one round trip for each. The store
        is not emptied."""
        self._clear()
        for member in self.members:
            member.forget_all()
        logger.info(
            "ssdkv: this engine finds nothing any more that its node has stored so far; other "
            "engines go on to find it"
        )

    def step(self) -> None:
        """A step begins: what was found before it is asked for again."""
        for member in self.members:
            member.step()
        self._clear()

    def _clear(self) -> None:
        for known in (self._found, self._names, self._others, self._absent):
            known.clear()

    def close(self) -> bool:
        """End the sessions: the nodes undo their pins."""
        closed = [member.close() for member in self.members]
        return all(closed)


def _take_first(table: I64) -> I64:
    """The first entry of each column that is not negative, or -1; it is taken out of the table."""
    columns = np.arange(table.shape[1])
    at = np.argmax(table >= 0, axis=0)
    found: I64 = table[at, columns].copy()
    table[at, columns] = -1
    return found
