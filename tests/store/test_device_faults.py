"""Random faults of devices that end: what was durable is found, or a counter says why not.

Both roles of the store live in this process, without a thread: the test moves the bytes, and has
the clock. A sequence takes some tens of milliseconds.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import disk_directory
from tests.store.conftest import PAGED, array, content, key_of
from tests.store.opening import MODEL, place
from vllm_ssdkv.base.errors import StoreFullError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store import open as opening
from vllm_ssdkv.store.device_weights import DeviceWeights
from vllm_ssdkv.store.devices import health
from vllm_ssdkv.store.devices.health import LAST_RETRY_S, WriteState
from vllm_ssdkv.store.format.slot_header_batch import key_rows
from vllm_ssdkv.store.io.device_prober import DeviceProber
from vllm_ssdkv.store.io.digest_source import HeaderDigests, SlotExtents
from vllm_ssdkv.store.io.engines.protocol import I32, PENDING, U16, U32, U64, Op
from vllm_ssdkv.store.io.slot_request import SlotRequest
from vllm_ssdkv.store.io.verified_read import VerifiedRead
from vllm_ssdkv.store.memory.arena import Arena
from vllm_ssdkv.store.open import open_index, open_rank
from vllm_ssdkv.store.unread_slots import UnreadSlots
from vllm_ssdkv.store.write_pauses import WritePauses

DEVICES = 3
DEADLINE_S = 0.05
FAULTS = ("no room", "reads fail", "writes fail", "all fails", "hangs")


class Moved:
    """A batch whose requests are over, but for those that hang."""

    def __init__(self, requests: int) -> None:
        self.codes = np.full(requests, PENDING, dtype=np.int32)

    def done(self) -> bool:
        return bool((self.codes != PENDING).all())

    def wait(self, timeout_s: float) -> bool:
        del timeout_s
        return self.done()

    def results(self) -> I32:
        return self.codes.copy()


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    op: Op
    device: int
    offset: int
    length: int
    buffer: int
    batch: Moved
    number: int


class FaultyFiles:
    """An engine over data files whose devices have faults. Requests that hang move when these are
    over, late, as those of a device do. See ``IoEngine``."""

    name = "files"

    def __init__(self, fds: Sequence[int], arena: Arena) -> None:
        self._fds, self._arena = list(fds), arena
        self.faults: dict[int, str] = {}
        self._hung: list[Asked] = []

    def submit(self, op: Op, device: U16, offset: U64, length: U32, buffer: U64) -> Moved:
        batch = Moved(len(device))
        columns = (device.tolist(), offset.tolist(), length.tolist(), buffer.tolist())
        for number, (d, o, n, b) in enumerate(zip(*columns, strict=True)):
            self._take(Asked(Op(op), d, o, n, b, batch, number))
        return batch

    def _take(self, asked: Asked) -> None:
        fault = self.faults.get(asked.device)
        if fault == "hangs":
            self._hung.append(asked)
        elif fault == "no room" and asked.op is Op.WRITE:
            asked.batch.codes[asked.number] = -errno.ENOSPC
        elif fault == "all fails" or fault == f"{asked.op.name.lower()}s fail":
            asked.batch.codes[asked.number] = -errno.EIO
        else:
            self._move(asked)

    def _move(self, asked: Asked) -> None:
        memory, fd = self._arena.view(asked.buffer, asked.length), self._fds[asked.device]
        call = os.preadv if asked.op is Op.READ else os.pwritev
        asked.batch.codes[asked.number] = call(fd, [memory], asked.offset)

    def heal(self, device: int) -> None:
        """The device is well again."""
        if self.faults.pop(device, None) == "hangs":
            late = [asked for asked in self._hung if asked.device == device]
            self._hung = [asked for asked in self._hung if asked.device != device]
            for asked in late:
                self._move(asked)

    def statistics(self) -> Mapping[str, int]:
        return {}

    def close(self, timeout_s: float) -> bool:
        del timeout_s
        return not self._hung


@dataclass
class Life:
    """The store from its opening to its end, on a clock of the test."""

    root: Path
    paths: list[Path]
    replicas: int
    now: float
    held: list[tuple[int, SlotRequest]] = field(default_factory=list)
    """Memory, and the request that may still touch it."""

    def __post_init__(self) -> None:
        where = place(
            self.paths,
            MODEL,
            mode="reuse",
            replicas=self.replicas,
            state_dir=str(self.root / "state"),
            dram_gib="8MiB",
        )
        object.__setattr__(where, "geometry", PAGED)
        self.counters = Counters()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(opening, "open_engine", self._open_engine)
            self.opened = open_rank(where, 0, self.counters)
        self.files = self.opened.files
        object.__setattr__(self.files, "deadline_s", DEADLINE_S)
        self.health = self.files.health
        self.health.clock = lambda: self.now
        self.index, self.rebalancer = open_index(where, self.counters)
        paths = [device.path for device in where.stored().devices]
        self.weights = DeviceWeights(self.rebalancer, paths)
        self.pauses = WritePauses(
            self.rebalancer.placement, self.weights, whole=False, clock=lambda: self.now
        )
        self.unread = UnreadSlots(
            self.index, self.rebalancer, self.counters, clock=lambda: self.now
        )
        plan = self.opened.plan
        self.prober = DeviceProber(
            self.files, self.opened.arena, plan.probe_offset, self.opened.identities
        )
        self.health.on_trouble.clear()
        stride = PAGED.slot_bytes
        self.memory = [plan.frame_offset + i * stride for i in range(plan.frames)]

    def _open_engine(
        self, options: object, fds: Sequence[int], paths: object, arena: Arena, **others: object
    ) -> FaultyFiles:
        del options, paths, others
        self.engine = FaultyFiles(fds, arena)
        return self.engine

    # ---- what the scheduler and the workers do ----

    def report(self) -> None:
        """Tell the scheduler's half what there is to tell."""
        for device in self.health.drain_events():
            self.weights.mark_lost(device, 0)
        for device in self.health.drain_returns():
            self.weights.mark_returned(device, 0)
        self.pauses.told(0, self.health.drain_writing())
        self.unread.step()
        self.rebalancer.step()
        segments = self.rebalancer.take_segments()
        if segments is not None:
            self.files.placement.change(segments)

    def take_memory(self) -> int | None:
        free = [at for at, request in self.held if request.ended()]
        self.held = [(at, request) for at, request in self.held if not request.ended()]
        self.memory += free
        return self.memory.pop() if self.memory else None

    def give(self, at: int, request: SlotRequest) -> None:
        self.held.append((at, request))

    def busy(self) -> set[int]:
        """Slots that a late write may still touch."""
        writes = [r for _, r in self.held if r.op is Op.WRITE and not r.ended()]
        return {slot for request in writes for slot in request.slots.tolist()}

    def store(self, name: int) -> bool:
        """Store a block; whether it is durable."""
        if self.pauses.state is WriteState.PAUSED or self.index.find(key_of(name)) is not None:
            return False
        at = self.take_memory()
        if at is None:
            return False
        try:
            slots = self.index.allocate(1)
        except StoreFullError:
            self.memory.append(at)
            return False
        slot, written = int(slots[0]), False
        if slot not in self.busy():
            assert self.index.publish(slot, key_of(name))
            written = self._write(name, slots, at)
        else:
            self.memory.append(at)
        if written and self.index.find(key_of(name)) == slot:
            self.index.durable(slots)
        else:
            self.index.drop(slots)
        self.index.unpin(slots)
        return written

    def _write(self, name: int, slots: np.ndarray[Any, Any], at: int) -> bool:
        view = self.opened.arena.view(at, PAGED.slot_bytes)
        view[:] = 0
        pages = view[PAGED.header_bytes :].reshape(PAGED.pages, -1)
        pages[:, : PAGED.payload_bytes] = content(PAGED, name)
        place_at = np.array([at], dtype=np.uint64)
        epochs = self.index.epochs(slots)
        self.files.codec.seal(slots, epochs, key_rows([key_of(name)]), place_at, place_at, None)
        good = False
        for again in (False, True):
            request = self.files.submit(Op.WRITE, slots, 0, PAGED.slot_bytes, place_at, again=again)
            good = bool(request.wait()[0] or request.readable()[0])
            if good or not request.ended() or request.out_of_reach()[0]:
                break
        self.give(at, request)
        return good

    def load(self, name: int) -> bool | None:
        """Read a block; whether it came. None: it is not found."""
        found = self.index.find(key_of(name))
        at = None if found is None else self.take_memory()
        if found is None or at is None:
            return None
        slots = array([found])
        self.index.pin(slots)
        epochs = self.index.epochs(slots)
        self.files.replicas.stored_in(slots, epochs)
        extents = SlotExtents(
            slots, 0, PAGED.kv_pages, np.array([at], dtype=np.uint64), headed=True
        )
        digests = HeaderDigests(
            self.files.codec, extents, epochs, key_rows([key_of(name)]), _keep_nothing
        )
        read = VerifiedRead(self.files, extents, digests)
        good = bool(read.finish()[0])
        if good:
            view = self.opened.arena.view(at, PAGED.slot_bytes)[PAGED.header_bytes :]
            pages = view.reshape(PAGED.pages, -1)[:, : PAGED.payload_bytes]
            assert (pages == content(PAGED, name)).all(), f"block {name} has other bytes"
        if read.bad[0]:
            self.index.drop(slots)
            self.counters.add("slots_dropped", 1, cause="read_error")
        elif read.unread[0]:
            self.unread.failed([(found, -1)])
        holders = read.holders()
        if holders:
            self.give(at, holders[0][0])
        else:
            self.memory.append(at)
        self.index.unpin(slots)
        return good

    def wait(self, seconds: float) -> None:
        """Time passes, and devices out of use are tried as often as they are due."""
        end = self.now + seconds
        while self.now < end:
            pause_s = self.prober.step()
            self.report()
            self.now = min(end, self.now + (seconds if pause_s is None else max(0.01, pause_s)))
        self.prober.step()
        self.report()

    def close(self) -> None:
        for device in list(self.engine.faults):
            self.engine.heal(device)
        assert self.rebalancer.close()
        assert self.index.close()
        self.opened.close()


def _keep_nothing(slots: object, digests: object) -> None:
    """No context needs them."""


class FaultSequence:
    """One sequence of faults, and what must be found in the end."""

    def __init__(self, root: Path, seed: int, replicas: int) -> None:
        self.random = random.Random(seed)
        self.root, self.replicas = root, replicas
        self.paths = [root / f"ssd{i}" for i in range(DEVICES)]
        for path in [*self.paths, root / "state"]:
            path.mkdir(mode=0o700)
        self.durable: set[int] = set()
        self.given_up: Counter[str] = Counter()
        """Causes for which blocks are not found, over all lives."""
        self.life = Life(root, self.paths, replicas, 1000.0)
        self.names = 0

    def store(self, most: int) -> None:
        for _ in range(self.random.randint(1, most)):
            name, self.names = self.names + 1, self.names + 1
            if self.life.store(name):
                self.durable.add(name)
            self.life.report()

    def load(self) -> None:
        known = sorted(self.durable)
        for name in self.random.sample(known, min(4, len(known))):
            self.life.load(name)
            self.life.report()

    def fault(self) -> None:
        device = self.random.randrange(len(self.life.opened.devices))
        if device in self.life.engine.faults:
            self.life.engine.heal(device)
        else:
            self.life.engine.faults[device] = self.random.choice(FAULTS)

    def restart(self) -> None:
        """Open the store with all devices, or without one."""
        self.end_life()
        paths = list(self.paths)
        if self.random.random() < 0.5:
            del paths[self.random.randrange(DEVICES)]
        self.life = Life(self.root, paths, self.replicas, self.life.now)

    def end_life(self) -> None:
        counters, index = self.life.counters, self.life.index
        self.life.close()
        for cause in ("read_error", "device_lost", "restriped", "replaced"):
            self.given_up[cause] += int(counters.total("slots_dropped", cause=cause))
        self.given_up["evicted"] += index.counters["evictions"]

    def run(self, steps: int) -> None:
        self.store(12)
        for _ in range(steps):
            deed = self.random.random()
            if deed < 0.3:
                self.fault()
            elif deed < 0.5:
                self.store(3)
            elif deed < 0.75:
                self.load()
            elif deed < 0.98:
                self.life.wait(self.random.choice((0.1, 1.0, 5.0, 30.0)))
            else:
                self.restart()
        if len(self.life.paths) < DEVICES:
            self.end_life()
            self.life = Life(self.root, self.paths, self.replicas, self.life.now)

    def settle(self) -> None:
        """All faults end, and time passes; a block that is stored is the trial of writes."""
        for device in range(DEVICES):
            self.life.engine.heal(device)
        for _ in range(3):
            self.life.wait(2 * LAST_RETRY_S)
            self.store(1)
        assert self.life.health.quarantined == frozenset()

    def check(self) -> None:
        """Everything durable is found, byte for byte, or a counter has the cause."""
        found = {name for name in self.durable if self.life.load(name)}
        there = {n for n in self.durable if self.life.index.find(key_of(n)) is not None}
        assert found == there, "found, and cannot be read"
        missing = self.durable - there
        self.end_life()
        assert len(missing) <= self.given_up.total(), (missing, self.given_up)


def run(seeds: Sequence[int]) -> Counter[str]:
    causes: Counter[str] = Counter()
    for seed in seeds:
        root = Path(tempfile.mkdtemp(prefix="ssdkv-test-", dir=disk_directory()))
        try:
            sequence = FaultSequence(root, seed, 1 + seed % 2)
            try:
                sequence.run(steps=25)
                sequence.settle()
                sequence.check()
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise
            causes += sequence.given_up
        finally:
            shutil.rmtree(root)
    return causes


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Faults are logged by the thousand; and the power stays on, so that no disk need be waited
    for."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda fd: None)
    with caplog.at_level("CRITICAL"):
        yield


@pytest.mark.slow
def test_faults_that_end_cost_nothing() -> None:
    assert health.CONDEMN_S == 10.0
    run(range(200))


@pytest.mark.soak
def test_faults_that_end_cost_nothing_for_long(soak_rounds: int) -> None:
    first = random.SystemRandom().randrange(1 << 30)
    run(range(first, first + 1000 * soak_rounds))
