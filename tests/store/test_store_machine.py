"""A whole store under random work and random faults: a read is right, a miss, or a typed error.

Both roles of the store live in this process, as in ``tests/crash``; faults come from the faulty
twin and from changes to the files.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tests.conftest import disk_directory
from tests.faults import set_faults
from tests.store.tails import Tails
from tests.store.unhurried import UnhurriedEngine
from vllm_ssdkv.base.errors import StoreFullError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.store import open as opening
from vllm_ssdkv.store.context_store import ContextStore
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.format.journal_record import HEADER_BYTES, RECORD_BYTES
from vllm_ssdkv.store.format.slot_geometry import PAGE_ALIGN, SlotGeometry
from vllm_ssdkv.store.index.slot_index import SlotState
from vllm_ssdkv.store.io.engines.open import open_engine
from vllm_ssdkv.store.open import JOURNAL, StorePlace, open_index, open_rank
from vllm_ssdkv.store.placement.stripe_map import Extents
from vllm_ssdkv.store.read.load_job import LoadJob, LoadOutcome

pytestmark = pytest.mark.slow

GEOMETRY = SlotGeometry("paged", layers=2, heads=2, groups=1, payload_bytes=200_000)
"""A slot has two stripe units. Encrypted, it is as long: headers have room for tags."""
DEVICES = 3
BLOCK_TOKENS = 32
DEADLINE_S = 0.4
PATIENCE_S = 60.0

FAULTS = st.sampled_from(
    [
        {"kind": "eio"},
        {"kind": "eio", "probability": 0.3},
        {"kind": "enospc", "op": "write"},
        {"kind": "short"},
        {"kind": "short", "probability": 0.3},
        {"kind": "corrupt", "op": "read"},
        {"kind": "corrupt", "op": "read", "probability": 0.2},
        {"kind": "latency", "seconds": 0.05, "probability": 0.2},
        {"kind": "stall", "seconds": 1.0, "count": 1},
        {"kind": "dead"},
    ]
)

PICK = st.integers(0, 1 << 20)
PICKS = st.lists(PICK, min_size=1, max_size=6)


def key_of(name: int) -> bytes:
    return name.to_bytes(8, "little") * 4


def content(name: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Payloads of a block, [pages, payload_bytes]; cheap to make."""
    step = np.arange(GEOMETRY.payload_bytes, dtype=np.uint32) * np.uint32(2 * name + 1)
    pages = np.arange(GEOMETRY.pages, dtype=np.uint32)[:, None] * np.uint32(77_777)
    return ((step[None, :] + pages) >> np.uint32(7)).astype(np.uint8)


class Store:
    """One run of the store, from opening to closing."""

    def __init__(
        self, root: Path, encrypted: bool, replicas: int, tail: int, away: int | None = None
    ):
        """``away``: a device that is not there."""
        self.control = root / "faults.json"
        devices = [root / f"ssd{i}" for i in range(DEVICES)]
        for path in devices:
            path.mkdir(exist_ok=True)
        options: dict[str, object] = {
            "mode": "page",
            "devices": [
                {"path": str(path), "capacity": f"{16 * replicas}MiB", "weight": 1}
                for number, path in enumerate(devices)
                if number != away
            ],
            "replicas": replicas,
            "state_dir": str(root / "state"),
            "dram_gib": "48MiB" if tail else "40MiB",
            "io": {"staging": "4MiB", "deadline": DEADLINE_S, "fault_file": str(self.control)},
        }
        if encrypted:
            (root / "key").write_text("5a" * 32)
            (root / "key").chmod(0o600)
            options["encryption"] = {"key_file": str(root / "key")}
        config = SSDKVConfig.from_extra_config(options)
        geometry = replace(GEOMETRY, encrypted=encrypted, summary_pages=tail)
        self.place = StorePlace(config, [geometry], Fingerprint({"model": "none"}))
        self.counters = Counters()
        self.opened = open_rank(self.place, 0, self.counters)
        self.index, self.rebalancer = open_index(self.place, self.counters)
        self.restripe()
        self.hbm: dict[int, np.ndarray[Any, np.dtype[np.uint8]]] = {}
        self.tiers = ContextStore(
            self.opened.files,
            self.opened.arena,
            self.opened.plan,
            self.opened.num_slots,
            BLOCK_TOKENS,
            self._copy_in,
            summarizer=Tails(geometry) if tail else None,
        )
        self.writing: dict[int, int] = {}
        """Slots under way: slot -> name."""
        self.rewriting: dict[int, int] = {}
        """Of these, rewrites: new slot -> old slot."""
        self.masked: set[int] = set()
        """Names that were found until their device went."""

    def _payloads(self, frame: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        pages = self.tiers.frames.view(frame)[GEOMETRY.header_bytes :]
        return pages.reshape(GEOMETRY.pages, -1)[:, : GEOMETRY.payload_bytes]

    def _copy_in(self, frames: np.ndarray[Any, Any], blocks: np.ndarray[Any, Any]) -> None:
        for frame, block in zip(frames.tolist(), blocks.tolist(), strict=True):
            self.hbm[block] = self._payloads(frame).copy()

    # ---- what the scheduler does with reports ----

    def take_reports(self) -> None:
        durable, failed = self.tiers.take_write_results()
        for device in self.opened.files.health.drain_events():
            slots = np.arange(self.index.num_slots, dtype=np.int64)
            weights = list(self.rebalancer.weights)
            weights[device] = 0.0
            self.rebalancer.reweigh(weights)
            lost = slots[self.rebalancer.placement.lost(self.rebalancer.out_of_use(), slots)]
            ready = [s for s in lost.tolist() if self.index.state(s) is SlotState.READY]
            self.masked |= {int.from_bytes(self.index.key(s)[:8], "little") for s in ready}
            self.rebalancer.mask_lost()
        for slot, epoch in durable:
            if slot in self.rewriting:
                self.index.replace(np.array([self.rewriting[slot]]), np.array([slot]))
            elif self.index.epoch(slot) == epoch:
                self.index.durable(slot)
        for slot, epoch in failed:
            if self.index.epoch(slot) == epoch:
                self.index.drop(slot)
        for slot, _ in [*durable, *failed]:
            del self.writing[slot]
            self.index.unpin(np.array([slot], dtype=np.int64))
            if slot in self.rewriting:
                old = np.array([self.rewriting.pop(slot)])
                self.index.unpin(old)
                if self.index.state(int(old[0])) is SlotState.FREE:
                    self.tiers.abandon(old)
            if (slot, self.index.epoch(slot)) in failed:
                self.tiers.abandon(np.array([slot], dtype=np.int64))

    def restripe(self) -> None:
        """What a step of the scheduler begins with."""
        self.rebalancer.step()
        segments = self.rebalancer.take_segments()
        if segments is not None:
            self.opened.files.placement.change(segments)

    def settle(self) -> None:
        """Every write is reported."""
        end = time.monotonic() + PATIENCE_S
        while self.writing:
            self.take_reports()
            assert time.monotonic() < end, f"no report of {self.writing}"
            time.sleep(0.002)

    # ---- work ----

    def store(self, names: Sequence[int]) -> None:
        """Store blocks as a step does; those that find no slot or frame are skipped."""
        self.restripe()
        for name in names:
            try:
                slots = self.index.allocate(1)
            except StoreFullError:
                continue
            slot = int(slots[0])
            frames = self.tiers.reserve_frames(slots, wait=True)
            if len(frames) == 0:
                self.index.unpin(slots)
                continue
            self._payloads(int(frames[0]))[:] = content(name)
            assert self.index.publish(slot, key_of(name))
            self.writing[slot] = name
            self.tiers.flush(slots, self.index.epochs(slots), [key_of(name)])

    def rewrite(self, names: Sequence[int]) -> None:
        """Store blocks that are in DRAM again, in other slots."""
        for name in names:
            old = self.index.lookup([key_of(name)])
            if not len(old) or int(old[0]) in {*self.writing, *self.rewriting.values()}:
                continue
            if self.index.available() < 2 or not self.index.free_now():
                return
            self.index.pin(old)
            new, keys = self.index.allocate(1), (key_of(name),)
            epochs = self.index.epochs(new)
            copied, wrong = self.tiers.copy(old, self.index.epochs(old), new, keys)
            assert not wrong.any()
            if not copied.all():
                self.index.unpin(new)
                self.index.unpin(old)
                continue
            self.writing[int(new[0])] = name
            self.rewriting[int(new[0])] = int(old[0])
            self.tiers.flush(new, epochs, keys)

    def load(self, names: Sequence[int]) -> LoadOutcome:
        """Bring blocks that are found into HBM blocks 1, 2, ..."""
        slots = np.concatenate([self.index.lookup([key_of(n)]) for n in names])
        self.index.pin(slots)
        self.hbm.clear()
        blocks = np.arange(1, len(slots) + 1, dtype=np.int64)
        epochs = self.index.epochs(slots)
        self.tiers.load(LoadJob("load", slots, epochs, tuple(map(key_of, names)), blocks))
        outcomes: list[LoadOutcome] = []
        end = time.monotonic() + PATIENCE_S
        while not outcomes:
            outcomes = self.tiers.take_load_outcomes()
            assert time.monotonic() < end, "the load hangs"
            time.sleep(0.001)
        for slot, epoch in outcomes[0].bad:
            if self.index.epoch(slot) == epoch:
                self.index.drop(slot)
        self.index.unpin(slots)
        return outcomes[0]

    def stream(self, names: Sequence[int]) -> dict[int, np.ndarray[Any, np.dtype[np.uint8]]] | None:
        """Walk over blocks as the context of one row, or None when the row was poisoned."""
        slots = np.concatenate([self.index.lookup([key_of(n)]) for n in names])
        self.index.pin(slots)
        self.tiers.extend_context("row", 0, slots)
        found: dict[int, np.ndarray[Any, np.dtype[np.uint8]]] = {}
        # As for a hit: the headers give the checksums that streamed pages are compared with.
        job = LoadJob(
            "row",
            slots,
            self.index.epochs(slots),
            tuple(map(key_of, names)),
            np.zeros(0, dtype=np.int64),
        )
        self.tiers.load(job)
        outcomes: list[LoadOutcome] = []
        while not outcomes:
            outcomes = self.tiers.take_load_outcomes()
            time.sleep(0.001)
        bad = [slot for slot, _ in outcomes[0].bad]
        poisoned = not outcomes[0].complete
        if not poisoned:
            walk = self.tiers.stream([slots])
            start = self.tiers.arena.address
            for layer in range(GEOMETRY.layers):
                for piece in walk.pieces(layer):
                    span = slice(int(piece.row_begin[0]), int(piece.row_end[0]))
                    for base, block in zip(
                        piece.base[span].tolist(), piece.index[span].tolist(), strict=True
                    ):
                        data = self.tiers.arena.view(base - start, GEOMETRY.layer_bytes)
                        pages = data.reshape(GEOMETRY.pages_per_layer, -1)
                        shape = (GEOMETRY.pages, GEOMETRY.payload_bytes)
                        whole = found.setdefault(block, np.zeros(shape, dtype=np.uint8))
                        first = layer * GEOMETRY.pages_per_layer
                        whole[first : first + len(pages)] = pages[:, : GEOMETRY.payload_bytes]
            poisoned = bool(walk.poisoned)
            bad += walk.bad
            walk.close()
        self.tiers.drop_context("row")
        for slot in bad:
            self.index.drop(slot)
        self.index.unpin(slots)
        return None if poisoned else found

    def given_up(self) -> int:
        """Blocks whose place others have needed."""
        evicted = self.index.counters["evictions"]
        return evicted + int(self.counters.total("slots_dropped", cause="restriped"))

    def faults(self, *rules: dict[str, Any]) -> None:
        set_faults(self.control, *rules)

    def close(self) -> None:
        self.faults()
        self.settle()
        self.tiers.close()
        self.opened.close()
        assert self.rebalancer.close()
        assert self.index.close()


class StoreMachine(RuleBasedStateMachine):
    """Names are numbers; a name's content never changes, and no name is stored twice at a time."""

    encrypted = False
    replicas = 1
    tail = 0
    """Pages of it."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="ssdkv-test-", dir=disk_directory()))
        self.next = 1
        self.damaged: set[int] = set()
        """Devices to which anything was done that may cost what lies on them."""
        self.store = Store(self.root, self.encrypted, self.replicas, self.tail)

    def teardown(self) -> None:
        try:
            self.store.close()
        finally:
            shutil.rmtree(self.root)

    def ready(self) -> list[int]:
        return [n for n in range(1, self.next) if len(self.store.index.lookup([key_of(n)]))]

    def cool(self, names: Sequence[int]) -> None:
        """Their next reads come from the devices."""
        self.store.settle()
        for name in names:
            self.store.tiers.frames.forget(self.store.index.lookup([key_of(name)]))

    def some(self, picks: Sequence[int]) -> list[int]:
        """Ready names. The draw does not depend on them: which are ready is a matter of timing."""
        if not self.ready():
            if self.store.opened.files.health.quarantined:
                self.restart()
            self.write_some(8)
        ready = self.ready()
        return list(dict.fromkeys(ready[pick % len(ready)] for pick in picks if ready))

    # ---- work ----

    @initialize(count=st.integers(8, 16))
    def write_some(self, count: int) -> None:
        self.write(count)
        self.store.settle()

    @rule(count=st.integers(1, 6))
    def write(self, count: int) -> None:
        self.store.store(range(self.next, self.next + count))
        self.next += count

    @rule(pick=PICK)
    def write_again(self, pick: int) -> None:
        """A block that was lost or evicted is computed again."""
        there = {*self.ready(), *self.store.writing.values()}
        missing = sorted(set(range(1, self.next)) - there)
        if missing:
            self.store.store([missing[pick % len(missing)]])

    @rule(picks=PICKS, cold=st.booleans(), walk=st.booleans())
    def read(self, picks: Sequence[int], cold: bool, walk: bool) -> None:
        """As a hit, or as a context that is walked over."""
        names = self.some(picks)
        if cold:
            self.cool(names)
            names = self.some(picks)
        if names:
            self.deliver(names, walk)

    def deliver(self, names: Sequence[int], walk: bool = False) -> bool:
        """Whether all of it was there; what was is right."""
        if walk:
            found = self.store.stream(names)
            complete = found is not None
            blocks = found or {}
        else:
            complete = self.store.load(names).complete
            blocks = {block - 1: whole for block, whole in self.store.hbm.items()}
        whole_copies = self.replicas - len(self.damaged)
        assert complete or whole_copies <= 0, "a healthy store did not deliver"
        assert not complete or sorted(blocks) == list(range(len(names)))
        for block, whole in blocks.items():
            np.testing.assert_array_equal(whole, content(names[block]))
        self.store.take_reports()
        return complete

    def is_there(self, name: int) -> bool:
        """Whether it is delivered; it may have been ready, and its write has failed since then."""
        return name in self.ready() and self.deliver([name])

    @rule(
        fault=FAULTS,
        device=st.integers(0, DEVICES - 1),
        picks=PICKS,
        walk=st.booleans(),
        writes=st.integers(0, 3),
    )
    def work_with_a_fault(
        self, fault: dict[str, Any], device: int, picks: Sequence[int], walk: bool, writes: int
    ) -> None:
        names = self.some(picks)
        self.cool(names)
        self.damaged.add(device)
        self.store.faults({**fault, "device": device})
        self.write(writes)
        self.read(picks, False, walk)
        self.store.faults()

    @rule(picks=PICKS, read_on=st.booleans(), fault=st.sampled_from([None, "enospc", "eio"]))
    def rewrite(self, picks: Sequence[int], read_on: bool, fault: str | None) -> None:
        """After a hit; the old slots are read, or the new ones, while the writes go on or fail."""
        if fault is not None:
            self.store.settle()
        # Each by itself: who asks for several does not get those that come after one that is lost.
        names = [name for name in self.some(picks) if self.is_there(name)]
        if fault is not None:
            self.damaged.add(0)
            self.store.faults({"kind": fault, "op": "write", "device": 0})
        self.store.rewrite(names)
        still = [name for name in names if name in self.ready()]
        if read_on and still:
            self.deliver(still)
        if fault is not None:
            self.store.settle()
            self.store.faults()
            lost = self.store.opened.files.health.quarantined
            assert lost or set(names) <= set(self.ready()), "a failed rewrite costs nothing"

    @rule(picks=PICKS)
    def drop(self, picks: Sequence[int]) -> None:
        for name in self.some(picks):
            self.store.index.drop(self.store.index.lookup([key_of(name)]))
            assert name not in self.ready()

    # ---- damage ----

    @rule(
        picks=PICKS,
        at=st.integers(0, GEOMETRY.slot_bytes + GEOMETRY.page_bytes - 1),
        bits=st.integers(1, 255),
        copies=st.sampled_from([(0,), (1,), (0, 1)]),
        walk=st.booleans(),
    )
    def flip_a_byte(
        self, picks: Sequence[int], at: int, bits: int, copies: Sequence[int], walk: bool
    ) -> None:
        """In the same place of some slots, header, page or padding; then read them."""
        at %= self.store.place.geometries[0].slot_bytes
        self.store.settle()
        for name in self.some(picks):
            slot = self.store.index.lookup([key_of(name)])
            places = self.store.rebalancer.placement.copies(
                slot, at // PAGE_ALIGN * PAGE_ALIGN, PAGE_ALIGN
            )
            for extent in [places[copy] for copy in copies]:
                if extent is not None:
                    self.flip(extent, at, bits)
        self.read(picks, True, walk)

    def flip(self, extent: Extents, at: int, bits: int) -> None:
        self.damaged.add(int(extent.device[0]))
        path = self.root / f"ssd{int(extent.device[0])}" / "rank0.data"
        with path.open("r+b") as file:
            file.seek(int(extent.offset[0]) + at % PAGE_ALIGN)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ bits]))

    # ---- between two runs ----

    @rule(
        cut=st.one_of(st.none(), st.none(), st.integers(1, RECORD_BYTES)),
        lost=st.one_of(st.none(), st.none(), st.integers(0, DEVICES - 1)),
    )
    def restart(self, cut: int | None = None, lost: int | None = None) -> None:
        """Perhaps with a torn last record of the journal, or with a device that was replaced."""
        self.store.settle()
        before = set(self.ready())
        masked = self.store.masked
        self.store.close()
        headless = False
        if cut is not None:
            path = self.root / "state" / JOURNAL
            with path.open("r+b") as file:
                left = path.stat().st_size - cut
                headless = left < HEADER_BYTES
                file.truncate(left)
        if lost is not None:
            self.damaged.add(lost)
            shutil.rmtree(self.root / f"ssd{lost}")
        self.store = Store(self.root, self.encrypted, self.replicas, self.tail)
        after = set(self.ready())
        # Made anew from the headers of slots, a journal has blocks that were given up, too.
        assert after <= before | masked or headless
        if len({lost} - {None}) < self.replicas:
            # A torn record costs what it says, and no more.
            assert len(before - after) <= int(cut is not None), "blocks were forgotten"

    @rule(away=st.integers(0, DEVICES - 1), writes=st.integers(0, 12))
    def a_device_is_away_for_one_run(self, away: int, writes: int) -> None:
        """Blocks of it are found again, unless their place was needed, or they were stored anew."""
        self.damaged.add(away)
        self.store.settle()
        before, masked = set(self.ready()), self.store.masked
        names = sorted(before)
        slots = np.concatenate([self.store.index.lookup([key_of(n)]) for n in names] or [[]])
        alone = np.arange(self.store.rebalancer.placement.devices) == away
        lost = self.store.rebalancer.placement.lost(alone, slots.astype(np.int64)).tolist()
        self.store.close()
        self.store = Store(self.root, self.encrypted, self.replicas, self.tail, away)
        here = set(self.ready())
        assert before - here == {n for n, gone in zip(names, lost, strict=True) if gone}
        assert here <= before | masked
        self.write(writes)
        missing = sorted(before - here)
        self.store.store(missing[: writes // 2])
        self.read([writes], True, False)
        self.store.settle()
        gone = self.store.given_up()
        dropped = self.store.index.counters["dropped"]
        self.store.close()
        self.store = Store(self.root, self.encrypted, self.replicas, self.tail)
        assert len(before - set(self.ready())) <= gone + dropped, "blocks were forgotten"

    # ---- always ----

    @invariant()
    def books_balance(self) -> None:
        gauges = self.store.index.gauges()
        assert gauges["pinned"] == len(self.store.writing) + len(self.store.rewriting)
        assert gauges["reserved"] == 0
        held = gauges["free"] + gauges["evictable"] + gauges["pinned"]
        assert held + gauges["masked"] + gauges["lost"] == self.store.index.num_slots


class EncryptedMachine(StoreMachine):
    """The same over a store that is encrypted."""

    encrypted = True


class ReplicaMachine(StoreMachine):
    """Every block twice: whatever becomes of one device costs nothing."""

    replicas = 2


def run(machine: type[StoreMachine], examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            # Threads take part, so that a shorter example need not fail in the same way.
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Faults are logged by the thousand."""
    caplog.set_level("CRITICAL")


@pytest.fixture(autouse=True)
def _unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still makes no healthy device late."""
    monkeypatch.setattr(
        opening, "open_engine", lambda *a, **k: UnhurriedEngine(open_engine(*a, **k))
    )


@pytest.mark.parametrize(
    ("machine", "examples"), [(StoreMachine, 8), (EncryptedMachine, 3), (ReplicaMachine, 6)]
)
def test_reads_are_right_or_miss(machine: type[StoreMachine], examples: int) -> None:
    run(machine, examples, steps=20)


@pytest.mark.soak
@pytest.mark.parametrize("machine", [StoreMachine, EncryptedMachine, ReplicaMachine])
def test_reads_are_right_or_miss_for_long(machine: type[StoreMachine], soak_rounds: int) -> None:
    run(machine, examples=3 * soak_rounds, steps=40)
