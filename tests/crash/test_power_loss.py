"""The power goes at any instant: what was synced is found, and nothing wrong is ever served.

The index and its journal are real, on the twin of a drive in ``power.py``; so are slot headers and
checksums, in a data file that only this test writes. What the design promises: after a sync of the
journal, at least every :data:`SYNC_INTERVAL_S`, an index entry survives. The data of a slot is only
as safe as the drive makes it, which is why every read checks it.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

import numpy as np
import pytest

from tests.crash.power import PowerTwin
from tests.store.headers import encoded
from tests.store.index.test_slot_index import key, slots_of
from vllm_ssdkv.base.checksum import checksum_bytes
from vllm_ssdkv.base.errors import FormatError, StoreFullError
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.format.slot_header import SlotHeader, decode
from vllm_ssdkv.store.index.journal import Journal
from vllm_ssdkv.store.index.recovery import Recover
from vllm_ssdkv.store.index.slot_index import SlotIndex

pytestmark = pytest.mark.slow

GEOMETRY = SlotGeometry("opaque", layers=2, heads=1, groups=1, payload_bytes=4000)
STORE = UUID(int=7)
DIGEST = bytes(range(16))
SLOTS = 60
LIVES = 3
RUNS = 6
LATEST = {False: 900, True: 90}
"""Calls after which the power goes at the latest: calls of any kind, and syncs and the like."""


def page(number: int, layer: int) -> bytes:
    """What belongs into a page of block ``number``."""
    return np.random.default_rng([number, layer]).bytes(GEOMETRY.payload_bytes)


def slot_bytes(number: int, slot: int, epoch: int) -> bytes:
    data = np.zeros(GEOMETRY.slot_bytes, dtype=np.uint8)
    sums = np.zeros(GEOMETRY.pages, dtype=np.uint64)
    for layer in range(GEOMETRY.pages):
        payload = np.frombuffer(page(number, layer), dtype=np.uint8)
        begin = GEOMETRY.page_offset(layer)
        data[begin : begin + payload.size] = payload
        sums[layer] = checksum_bytes(payload)
    header = SlotHeader(key(number), slot, epoch, 0, sums)
    data[: GEOMETRY.header_bytes] = encoded(header, GEOMETRY, DIGEST)
    return data.tobytes()


def served(data: bytes, number: int, slot: int, epoch: int) -> list[bytes] | None:
    """The pages that a reader of this slot gets; None: a miss."""
    at = slot * GEOMETRY.slot_bytes
    mine = data[at : at + GEOMETRY.slot_bytes].ljust(GEOMETRY.slot_bytes, b"\0")
    try:
        header = decode(mine, GEOMETRY, DIGEST, key=key(number), slot=slot, epoch=epoch, rank=0)
    except FormatError:
        return None
    begins = [GEOMETRY.page_offset(layer) for layer in range(GEOMETRY.pages)]
    pages = [mine[begin : begin + GEOMETRY.payload_bytes] for begin in begins]
    sums = [checksum_bytes(one) for one in pages]
    return pages if sums == header.checksums.tolist() else None


@dataclass
class Totals:
    """What happened in all lives, so that a test can see that it tested something."""

    promised: int = 0
    hits: int = 0
    misses: int = 0
    forgotten: int = 0
    rewrites: int = 0
    corrupt: int = 0
    refused: int = 0


@dataclass
class Store:
    """A store that lives, loses its power, and lives again on what is left."""

    source: random.Random
    background: bool
    totals: Totals
    known: dict[int, int] = field(default_factory=dict)
    """Number to slot of blocks that were durable, as far as they are known to exist."""
    promised: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Number to slot and epoch of blocks that a sync has made safe."""
    at_loss: dict[int, tuple[int, int]] = field(default_factory=dict)
    written: set[tuple[int, int, int]] = field(default_factory=set)
    """Number, slot and epoch of everything that was ever written."""
    next_number: int = 0

    def open(self, directory: Path, recover: Recover = "quiet") -> SlotIndex:
        journal = Journal(
            directory / "journal",
            store=STORE,
            fingerprint=DIGEST,
            num_slots=SLOTS,
            slack_records=10,
            recover=recover,
            sync_interval_s=0.002 if self.background else None,
        )
        return SlotIndex(SLOTS, journal)

    def live(self, directory: Path) -> dict[str, bytes]:
        """Store, evict and drop until the power goes; what is left."""
        rare = self.source.random() < 0.5
        twin = PowerTwin(directory, self.source, self.source.randint(1, LATEST[rare]), rare=rare)
        twin.at_loss = self._remember
        twin.start()
        try:
            index = self.open(directory)
            fd = os.open(directory / "data", os.O_RDWR | os.O_CREAT)
            try:
                while twin.image is None:
                    self._step(index, fd)
            finally:
                os.close(fd)
                index.close()
        finally:
            twin.stop()
        self.totals.rewrites += index.counters["journal_rewrites"]
        return twin.image

    def _remember(self) -> None:
        self.at_loss = dict(self.promised)

    def _step(self, index: SlotIndex, fd: int) -> None:
        match self.source.randrange(12):
            case 0:
                self._sync(index)
            case 1 if self.known:
                number = self.source.choice(list(self.known))
                slot = self._forget(number)
                index.drop(slot)
            case 2:
                os.fdatasync(fd)
            case 3 if self.known:
                index.touch(slots_of(*self.source.sample(list(self.known.values()), 1)))
            case _:
                self._store(index, fd, self.source.randint(1, 6))

    def _sync(self, index: SlotIndex) -> None:
        safe = {n: (slot, index.epoch(slot)) for n, slot in self.known.items()}
        if index.flush():
            self.promised = safe
            self.totals.promised += len(safe)

    def _forget(self, number: int) -> int:
        """From now on nobody needs to find it."""
        self.promised.pop(number, None)
        return self.known.pop(number)

    def _store(self, index: SlotIndex, fd: int, count: int) -> None:
        evicted = index.order()[: max(0, count - index.gauges()["free"])].tolist()
        for number in [n for n, slot in self.known.items() if slot in evicted]:
            self._forget(number)
        try:
            slots = index.allocate(count)
        except StoreFullError:
            return
        numbers = list(range(self.next_number, self.next_number + count))
        self.next_number += count
        for number, slot in zip(numbers, slots.tolist(), strict=True):
            epoch = index.epoch(slot)
            self.written.add((number, slot, epoch))
            os.pwrite(fd, slot_bytes(number, slot, epoch), slot * GEOMETRY.slot_bytes)
            assert index.publish(slot, key(number))
        index.durable(slots)
        self.known.update(zip(numbers, slots.tolist(), strict=True))
        index.unpin(slots)

    def check(self, directory: Path) -> None:
        """Look at what a power loss left, as a restart does."""
        index = self.open(directory)
        data = (directory / "data").read_bytes() if (directory / "data").exists() else b""
        gauges = index.gauges()
        assert gauges["free"] + gauges["ready"] == gauges["evictable"] + gauges["free"] == SLOTS
        found: dict[int, int] = {}
        for number in range(self.next_number):
            slot = index.find(key(number))
            if slot is None:
                continue
            epoch = index.epoch(slot)
            assert (number, slot, epoch) in self.written
            found[number] = slot
            pages = served(data, number, slot, epoch)
            if pages is None:
                self.totals.misses += 1
            else:
                assert pages == [page(number, layer) for layer in range(GEOMETRY.pages)]
                self.totals.hits += 1
        assert len(found) == gauges["ready"] == len(set(found.values()))
        for number, (slot, epoch) in self.at_loss.items():
            assert found.get(number) == slot
            assert index.epoch(slot) == epoch
        self.totals.forgotten += len(set(self.known) - set(found))
        self.totals.corrupt += index.counters["journal_corrupt_records"]
        index.close()
        self.known = found
        self.promised = {n: (s, index.epoch(s)) for n, s in found.items()}

    def is_refused(self, directory: Path) -> bool:
        """Whether a strict start finds damage. It leaves the file as it is."""
        before = (directory / "journal").read_bytes() if (directory / "journal").exists() else b""
        try:
            journal = Journal(
                directory / "journal",
                store=STORE,
                fingerprint=DIGEST,
                num_slots=SLOTS,
                recover="strict",
                sync_interval_s=None,
            )
        except FormatError:
            assert (directory / "journal").read_bytes() == before
            return True
        journal._file.close()
        return False


@contextmanager
def left_behind(image: dict[str, bytes]) -> Iterator[Path]:
    """A directory with what is left."""
    with tempfile.TemporaryDirectory(prefix="ssdkv-power-") as name:
        for file, content in image.items():
            (Path(name) / file).write_bytes(content)
        yield Path(name)


def lose_power(seed: int, totals: Totals, *, background: bool) -> None:
    store = Store(random.Random(seed), background, totals)
    image: dict[str, bytes] = {}
    for _ in range(LIVES):
        with left_behind(image) as directory:
            image = store.live(directory)
        with left_behind(image) as directory:
            totals.refused += store.is_refused(directory)
            store.check(directory)
            image = {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("background", [False, True])
def test_power_losses(background: bool) -> None:
    totals = Totals()
    for seed in range(RUNS):
        lose_power(seed, totals, background=background)
    # The runs were as eventful as they are meant to be.
    assert min(totals.promised, totals.hits, totals.misses, totals.rewrites) > RUNS
    assert totals.forgotten > 0
    assert totals.corrupt > 0


@pytest.mark.soak
def test_many_power_losses(soak_rounds: int) -> None:
    totals = Totals()
    first = random.randrange(1 << 30)
    for seed in range(first, first + 2 * soak_rounds):
        lose_power(seed, totals, background=bool(seed % 2))
    assert totals.hits > 0
