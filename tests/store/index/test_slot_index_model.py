"""The index against a simple model: any sequence of calls, kills and recoveries included."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.store.index.test_slot_index import found, key, kill, open_index, slots_of
from vllm_ssdkv.base.errors import StoreFullError
from vllm_ssdkv.store.format.journal_record import HEADER_BYTES, RECORD_BYTES

SLOTS = 6
numbers = st.integers(0, 7)
any_slots = st.lists(st.integers(0, SLOTS - 1), max_size=4)


class IndexMachine(RuleBasedStateMachine):
    """Drives a journalled index and a model made of dictionaries and lists."""

    @initialize()
    def start(self) -> None:
        # Durability against power loss is not what this machine looks at; speed is.
        self.patches = [patch.object(os, name) for name in ("fsync", "fdatasync")]
        for one in self.patches:
            one.start()
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name) / "journal"
        self.opened = 1
        self.index = open_index(self.path, SLOTS, open_number=self.opened)
        self.state: dict[int, str] = dict.fromkeys(range(SLOTS), "free")
        self.pins: dict[int, int] = dict.fromkeys(range(SLOTS), 0)
        self.key_of: dict[int, bytes] = {}
        self.durable_set: dict[int, tuple[int, bytes]] = {}
        self.ever_durable: set[tuple[int, int, bytes]] = set()
        self.lru: list[int] = []
        self.dead: set[int] = set()
        self.masked: dict[int, bytes] = {}
        """Keys of slots that are masked, pinned ones included."""
        self.masked_order: list[int] = []
        self.reserved = 0
        self.last_epoch = 0
        self.evictions = 0

    def teardown(self) -> None:
        if hasattr(self, "index"):
            kill(self.index)
            self.directory.cleanup()
            for one in self.patches:
                one.stop()

    # The model's own arithmetic.

    def obtainable(self) -> int:
        return sum(s == "free" for s in self.state.values()) + len(self.lru)

    def available(self) -> int:
        return max(0, self.obtainable() - self.reserved)

    def let_go(self, slot: int) -> None:
        if slot in self.masked:
            self.state[slot] = "masked"
            self.masked_order.append(slot)
        else:
            self.state[slot] = "lost" if slot in self.dead else "free"

    def forget(self, slot: int) -> None:
        if self.masked.pop(slot, None) and slot in self.masked_order:
            self.masked_order.remove(slot)
        self.key_of.pop(slot, None)
        self.durable_set.pop(slot, None)
        if slot in self.lru:
            self.lru.remove(slot)

    # The steps.

    @rule(n=st.integers(0, 4), reserved=st.booleans())
    def allocate(self, n: int, reserved: bool) -> None:
        if reserved and n > self.reserved:
            with pytest.raises(ValueError, match="reserved"):
                self.index.allocate(n, reserved=True)
            return
        if n > (self.obtainable() if reserved else self.available()):
            with pytest.raises(StoreFullError):
                self.index.allocate(n, reserved=reserved)
            return
        got = self.index.allocate(n, reserved=reserved).tolist()
        free = {s for s, state in self.state.items() if state == "free"}
        from_free = min(n, len(free))
        assert len(set(got)) == n
        assert set(got[:from_free]) <= free
        assert got[from_free:] == self.lru[: n - from_free]
        self.evictions += n - from_free
        for slot in got:
            self.forget(slot)
            self.state[slot] = "writing"
            self.pins[slot] = 1
            assert self.index.epoch(slot) > self.last_epoch
            self.last_epoch = self.index.epoch(slot)
        if reserved:
            self.reserved -= n

    @rule(chain=st.lists(numbers, min_size=1, max_size=3, unique=True), durable=st.booleans())
    def store_chain(self, chain: list[int], durable: bool) -> None:
        """The usual life of a slot in one step, or states that need many steps stay rare."""
        fresh = [n for n in chain if key(n) not in self.key_of.values()]
        before = {s for s, state in self.state.items() if state == "writing"}
        self.allocate(len(fresh), False)
        fresh = [n for n in fresh if key(n) not in self.key_of.values()]
        slots = [s for s, state in self.state.items() if state == "writing" and s not in before]
        for slot, number in zip(slots, fresh, strict=False):
            assert self.index.publish(slot, key(number))
            self.state[slot] = "ready"
            self.key_of[slot] = key(number)
            if durable:
                self.make_durable([slot])
        self.model_unpin(slots)

    @rule(n=st.integers(0, 4))
    def reserve(self, n: int) -> None:
        if n > self.available():
            with pytest.raises(StoreFullError):
                self.index.reserve(n)
        else:
            self.index.reserve(n)
            self.reserved += n

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def unreserve(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(0, self.reserved))
        self.index.unreserve(n)
        self.reserved -= n

    @rule(data=st.data(), number=numbers)
    def publish(self, data: st.DataObject, number: int) -> None:
        writing = [s for s, state in self.state.items() if state == "writing"]
        slot = data.draw(st.sampled_from(writing * 3 + list(range(SLOTS))))
        if self.state[slot] not in ("writing", "private"):
            with pytest.raises(ValueError, match="publish"):
                self.index.publish(slot, key(number))
            return
        fresh = self.state[slot] == "writing" and key(number) not in self.key_of.values()
        assert self.index.publish(slot, key(number)) is fresh
        self.state[slot] = "ready" if fresh else "private"
        if fresh:
            self.key_of[slot] = key(number)

    @rule(slots=any_slots)
    def make_durable(self, slots: list[int]) -> None:
        slots = [s for s in slots if self.state[s] != "writing"]
        self.index.durable(slots_of(*slots))
        for slot in slots:
            if self.state[slot] == "ready":
                for other in [s for s, k in self.masked.items() if k == self.key_of[slot]]:
                    self.model_drop(other)
                self.durable_set[slot] = (self.index.epoch(slot), self.key_of[slot])
                self.ever_durable.add((slot, *self.durable_set[slot]))

    @rule(slots=any_slots)
    def pin(self, slots: list[int]) -> None:
        if any(self.state[s] in ("free", "lost", "masked") for s in slots):
            with pytest.raises(ValueError, match="pin"):
                self.index.pin(slots_of(*slots))
        else:
            self.index.pin(slots_of(*slots))
            for slot in slots:
                self.pins[slot] += 1
                if slot in self.lru:
                    self.lru.remove(slot)

    @precondition(lambda self: any(self.pins.values()))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pinned = [s for s in self.pins for _ in range(self.pins[s])]
        self.model_unpin(
            data.draw(st.permutations(pinned))[: data.draw(st.integers(1, len(pinned)))]
        )

    def model_unpin(self, slots: list[int]) -> None:
        self.index.unpin(slots_of(*slots))
        for slot in reversed(slots):
            self.pins[slot] -= 1
            if self.pins[slot] == 0:
                if self.state[slot] == "ready":
                    self.lru.append(slot)
                else:
                    self.let_go(slot)

    @rule(slots=st.permutations(range(SLOTS)), n=st.integers(0, SLOTS))
    def touch(self, slots: list[int], n: int) -> None:
        slots = slots[:n]
        self.index.touch(slots_of(*slots))
        for slot in reversed(slots):
            if slot in self.lru:
                self.lru.remove(slot)
                self.lru.append(slot)

    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        """Blocks move; some of them were dropped meanwhile."""
        pinned = [s for s in self.pins if self.pins[s]]
        new = [s for s in pinned if self.state[s] == "writing"]
        if not new:
            self.allocate(1, False)
            new = [s for s, state in self.state.items() if state == "writing"]
        old = [s for s in pinned if s not in new]
        ready = [s for s in old if self.state[s] == "ready"]
        count = min(len(new), len(old), data.draw(st.integers(1, 2)))
        old = data.draw(st.permutations(ready * 3 + old).map(lambda s: list(dict.fromkeys(s))))
        old, new = old[:count], new[:count]
        was = [self.state[s] == "ready" for s in old]
        assert self.index.replace(slots_of(*old), slots_of(*new)).tolist() == was
        for before, after, moved in zip(old, new, was, strict=True):
            if moved:
                self.state[before], self.state[after] = "private", "ready"
                self.key_of[after] = self.key_of.pop(before)
                if self.durable_set.pop(before, None):
                    self.make_durable([after])

    @precondition(
        lambda self: any(s == "ready" and not self.pins[i] for i, s in self.state.items())
    )
    @rule(data=st.data())
    def replace_what_nobody_uses(self, data: st.DataObject) -> None:
        free = [i for i, s in self.state.items() if s == "ready" and not self.pins[i]]
        with pytest.raises(ValueError, match="not pinned"):
            self.index.replace(slots_of(data.draw(st.sampled_from(free))), slots_of(0))

    def model_drop(self, slot: int) -> None:
        if self.state[slot] in ("ready", "writing") or slot in self.masked:
            self.forget(slot)
            self.state[slot] = "private"
            if self.pins[slot] == 0:
                self.let_go(slot)

    @rule(slots=any_slots)
    def drop(self, slots: list[int]) -> None:
        self.index.drop(slots_of(*slots))
        for slot in slots:
            self.model_drop(slot)

    @precondition(lambda self: len(self.dead) < 3)
    @rule(slot=st.integers(0, SLOTS - 1), as_mask=st.booleans())
    def quarantine(self, slot: int, as_mask: bool) -> None:
        counted = slot in self.masked or self.state[slot] in ("ready", "writing")
        which = np.arange(SLOTS) == slot if as_mask else slots_of(slot)
        assert self.index.quarantine(which) == int(counted)
        self.dead.add(slot)
        if self.state[slot] == "free":
            self.state[slot] = "lost"
        self.model_drop(slot)

    @precondition(lambda self: len(self.dead) < 4)
    @rule(slots=any_slots)
    def mask(self, slots: list[int]) -> None:
        """A device goes with these slots."""
        new = [s for s in dict.fromkeys(slots) if s not in self.dead]
        kept = [s for s in new if s in self.durable_set]
        dropped = [s for s in new if s not in kept and self.state[s] in ("ready", "writing")]
        assert self.index.mask(slots_of(*slots)) == (len(kept), len(dropped))
        for slot in [s for s in new if s not in kept]:
            self.dead.add(slot)
            self.model_drop(slot)
            if self.state[slot] == "free":
                self.state[slot] = "lost"
        for slot in sorted(kept, key=lambda s: self.lru.index(s) if s in self.lru else -1):
            self.dead.add(slot)
            self.masked[slot] = self.key_of.pop(slot)
            self.state[slot] = "private"
            if self.pins[slot] == 0:
                self.lru.remove(slot)
                self.let_go(slot)

    @precondition(lambda self: self.dead)
    @rule(slots=any_slots, everything=st.booleans())
    def unmask(self, slots: list[int], everything: bool) -> None:
        """The device is back: what is durable is found again, before what is not."""
        slots = list(range(SLOTS)) if everything else slots
        back = [s for s in dict.fromkeys(slots) if s in self.dead]
        shown = [s for s in back if s in self.masked]
        self.dead -= set(back)
        assert self.index.unmask(slots_of(*slots)) == len(shown)
        first = [s for s in self.masked_order if s in shown]
        self.masked_order = [s for s in self.masked_order if s not in shown]
        for slot in shown:
            for other in [s for s, k in self.key_of.items() if k == self.masked[slot]]:
                assert other not in self.durable_set
                self.model_drop(other)
            self.key_of[slot] = self.masked.pop(slot)
            self.state[slot] = "ready"
        for slot in back:
            if self.state[slot] == "lost":
                self.state[slot] = "free"
        self.lru = first + self.lru

    @rule(clean=st.booleans(), how=st.integers(0, 2))
    def restart(self, clean: bool, how: int) -> None:
        if how:  # most runs shall get further than a few steps
            return
        if clean:
            assert self.index.close()
        else:
            kill(self.index)
        self.opened += 1
        self.index = open_index(self.path, SLOTS, open_number=self.opened)
        self.state = dict.fromkeys(range(SLOTS), "free")
        self.state.update(dict.fromkeys(self.durable_set, "ready"))
        self.pins = dict.fromkeys(range(SLOTS), 0)
        self.key_of = {slot: k for slot, (_, k) in self.durable_set.items()}
        order = self.index.order().tolist()
        if clean:  # pinned ones come last, by number
            kept = [s for s in self.masked_order + self.lru if s in self.durable_set]
            assert order == kept + sorted(set(self.durable_set) - set(kept))
        self.lru = order
        self.dead = set()
        self.masked, self.masked_order = {}, []
        self.reserved = self.evictions = 0
        assert self.index.counters["recovered"] == len(self.durable_set)
        for slot, (epoch, _) in self.durable_set.items():
            assert self.index.epoch(slot) == epoch

    @rule(data=st.data())
    def a_crash_cuts_the_journal(self, data: st.DataObject) -> None:
        """Whatever is left of the file: no block is found that was not stored there."""
        whole = self.path.read_bytes()
        length = data.draw(st.integers(HEADER_BYTES, len(whole)))
        copy = self.path.with_name("cut")
        copy.write_bytes(whole[:length])
        after = open_index(copy, SLOTS)
        assert after.counters["journal_corrupt_records"] == (
            (length - HEADER_BYTES) % RECORD_BYTES > 0
        )
        stored = 0
        for number in range(8):
            for slot in found(after, number):
                assert (slot, after.epoch(slot), key(number)) in self.ever_durable
                stored += 1
        assert after.gauges()["ready"] == stored
        kill(after)

    # What must hold after each.

    @invariant()
    def everything_agrees(self) -> None:
        if not hasattr(self, "index"):
            return
        for number in range(8):
            slots = [s for s, k in self.key_of.items() if k == key(number)]
            assert found(self.index, number) == slots
        for slot, state in self.state.items():
            assert self.index.state(slot).name == state.upper()
        assert sorted(self.index.order()) == sorted(
            s for s, state in self.state.items() if state == "ready" and self.pins[s] == 0
        )
        assert self.index.available() == self.available()
        gauges = self.index.gauges()
        states = list(self.state.values())
        journal_bytes = gauges.pop("journal_bytes")
        assert self.path.stat().st_size == journal_bytes
        assert gauges == {
            "free": states.count("free"),
            "ready": states.count("ready"),
            "writing": states.count("writing"),
            "pinned": sum(p > 0 for p in self.pins.values()),
            "evictable": len(self.lru),
            "reserved": self.reserved,
            "masked": states.count("masked"),
            "lost": states.count("lost"),
            "journal_degraded": 0,
        }
        assert self.index.counters["evictions"] == self.evictions
        # What a kill now would leave, read by a second index from a copy.
        copy = self.path.with_name("copy")
        copy.write_bytes(self.path.read_bytes())
        after = open_index(copy, SLOTS)
        assert after.gauges()["ready"] == len(self.durable_set)
        for slot, (epoch, k) in self.durable_set.items():
            assert after.lookup([k]).tolist() == [slot]
            assert after.epoch(slot) == epoch
        kill(after)


IndexMachine.TestCase.settings = settings(stateful_step_count=40)
TestIndexMachine = IndexMachine.TestCase
