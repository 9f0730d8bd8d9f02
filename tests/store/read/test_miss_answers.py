"""Pages that a device asks for in a step: each comes right, or is lost, whatever the drives do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kit.waiting import until
from tests.store.chosen_pages import BOTH, context, right
from tests.store.conftest import SHORT_S, SUMMED, MakeStore, StoreRig, array
from vllm_ssdkv import _io
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.io.engines.protocol import Op
from vllm_ssdkv.store.io.verified_read import VerifiedRead
from vllm_ssdkv.store.read.miss_answers import MissAnswers

BLOCKS, MOST = 8, 24
SLOTS = range(4)


class Device:
    """Stand-in for a device: it asks, and looks at what is answered.

    Attributes:
        answers: Service of the missing pages.
        base: Number from which the tickets of its step are counted.
    """

    def __init__(self, rig: StoreRig, names: dict[int, int]) -> None:
        geometry = rig.geometry
        self.rig, self.names, self.slots = rig, names, list(names)
        self.mail = np.zeros((2, 2, 2 + MOST), dtype=np.int64)
        self.pages = geometry.pages_per_layer
        ask, answer = (self.mail[i].ctypes.data for i in range(2))
        mail = _io.Mailbox(ask, answer, MOST, geometry.layers, BLOCKS, self.pages)
        self.answers: MissAnswers = rig.store.answer_misses(mail)
        self.base = 0

    def begin(self) -> None:
        """Begin a step of one row, whose context these slots are."""
        self.base = self.answers.begin([array(self.slots)])

    def ask(self, layer: int, wanted: list[tuple[int, int]]) -> list[int]:
        """Addresses of pages, by block and number in the layer, of which each is right; 0: lost."""
        request, reply = self.mail[:, self.base // self.rig.geometry.layers % 2]
        request[2 : 2 + len(wanted)] = [block * self.pages + page for block, page in wanted]
        request[1] = len(wanted)
        request[0] = ticket = self.base + layer + 1
        until(lambda: reply[0] == ticket, "the answer")
        found: list[int] = reply[2 : 2 + len(wanted)].tolist()
        arena = self.rig.store.arena
        for (block, page), address in zip(wanted, found, strict=True):
            if address:
                at = address - arena.address
                held = arena.view(at, self.rig.geometry.payload_bytes).tobytes()
                name = self.names[self.slots[block]]
                assert held == right(self.rig.geometry, name, layer, page)
        assert reply[1] == found.count(0)
        return found

    def end(self) -> _io.Served:
        """End the step, whose pages are read no more."""
        served = self.answers.end()
        assert served is not None
        self.answers.release(served.places)
        return served


@contextmanager
def device_of(rig: StoreRig, deadline_s: float | None = None) -> Iterator[Device]:
    names = context(rig, SLOTS)
    if deadline_s is not None:
        rig.deadline(deadline_s)
    device = Device(rig, names)
    try:
        yield device
    finally:
        device.answers.close()
        rig.store.drop_context("r")
        rig.assert_no_leak()


def bytes_read(rig: StoreRig) -> float:
    return sum(rig.total("bytes_read", device=path) for path in rig.paths)


def every(device: Device, blocks: int = len(SLOTS)) -> list[tuple[int, int]]:
    return [(block, page) for block in range(blocks) for page in range(device.pages)][:MOST]


@BOTH
@pytest.mark.parametrize("faulty", [False, True], ids=["native", "slow"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_what_a_device_asks_for_comes_right(
    make_store: MakeStore, geometry: SlotGeometry, faulty: bool, replicas: int
) -> None:
    """Native code brings it, or the read that knows copies and faults."""
    rig = make_store(geometry, faulty=faulty, replicas=replicas)
    with device_of(rig) as device:
        before, read = bytes_read(rig), 0
        for step in range(3):
            device.begin()
            for layer in range(geometry.layers):
                assert all(device.ask(layer, every(device, 2)))
            served = device.end()
            assert served.lost == 0
            asked = geometry.layers * len(every(device, 2))
            assert served.held + served.read == asked
            assert served.slow == (served.read if faulty else 0)
            assert served.read == asked or step
            assert device.answers.end() is None
            read += served.read
        assert bytes_read(rig) - before == read * geometry.page_bytes


@BOTH
def test_a_wrong_page_is_lost_and_its_slot_reported(
    make_store: MakeStore, geometry: SlotGeometry
) -> None:
    rig = make_store(geometry, faulty=False)
    with device_of(rig) as device:
        rig.flip(device.slots[1], geometry.page_offset(geometry.first_page(0)) + 9)
        device.begin()
        found = device.ask(0, wanted := every(device, 2))
        assert [entry for entry, at in zip(wanted, found, strict=True) if not at] == [(1, 0)]
        device.end()
        assert rig.store._fetcher.take_bad() == [device.slots[1]]


def test_a_wrong_page_comes_from_its_other_copy(make_store: MakeStore) -> None:
    rig = make_store(SUMMED, replicas=2, faulty=False)
    with device_of(rig) as device:
        rig.flip(device.slots[0], SUMMED.page_offset(SUMMED.first_page(0)) + 9, copy=0)
        for layer in range(2):  # of which the first one tells that a copy is wrong
            device.begin()
            assert all(device.ask(layer, wanted := every(device, 1)))
            assert device.end().slow == (1, len(wanted))[layer]
        assert rig.store._fetcher.take_bad() == []


def test_a_hung_drive_loses_pages_and_keeps_their_places(make_store: MakeStore) -> None:
    rig = make_store(SUMMED)
    with device_of(rig, SHORT_S) as device:
        rig.faults({"kind": "stall", "op": "read"})
        device.begin()
        assert not any(device.ask(0, wanted := every(device, 1)))
        device.end()
        assert rig.store._pages is not None
        assert rig.store._pages.taken() == len(wanted)
        assert rig.total("io_deadline_exceeded") > 0
        device.begin()  # by now the drives are out of use
        assert not any(device.ask(0, wanted))
        device.end()
        rig.faults()


def test_a_slow_drive_is_waited_for(make_store: MakeStore) -> None:
    rig = make_store(SUMMED)
    with device_of(rig) as device:
        rig.faults({"kind": "latency", "op": "read", "seconds": 0.05})
        device.begin()
        assert all(device.ask(0, every(device, 2)))
        assert device.end().lost == 0


def test_a_drive_that_fails_loses_pages_and_its_slots_are_tried_again(
    make_store: MakeStore,
) -> None:
    rig = make_store(SUMMED)
    with device_of(rig) as device:
        rig.faults({"kind": "eio", "op": "read"})
        device.begin()
        assert not any(device.ask(0, every(device, 2)))
        device.end()
        assert rig.store._fetcher.take_unread() == device.slots[:2]
        rig.faults()
        device.begin()
        assert all(device.ask(0, every(device, 2)))
        device.end()


def test_a_drive_on_which_native_code_has_waited_in_vain_is_out_of_use(
    make_store: MakeStore,
) -> None:
    rig = make_store(SUMMED)
    with device_of(rig) as device:
        rig.faults({"kind": "stall", "op": "read", "device": 1})
        arrays = (np.array([one], dtype) for one, dtype in ((1, "u2"), (0, "u8"), (4096, "u4")))
        of, offset, length = arrays
        batch = rig.files.engine.submit(Op.READ, of, offset, length, offset)
        served = SimpleNamespace(bytes=[4096, 0], overdue=[(batch, of, length)])
        device.begin()
        with pytest.MonkeyPatch.context() as patch:
            stub = SimpleNamespace(disarm=lambda: served)
            patch.setattr(device.answers, "_service", stub)
            device.answers.end()
        device.answers._service.disarm()
        assert rig.files.health.out_of_use(np.arange(3, dtype=np.uint16)).tolist() == [
            False,
            True,
            False,
        ]
        rig.faults()


def test_a_read_that_ends_behind_its_step_finds_nothing_out(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots may be another's by then, and nobody knows their checksums any more."""
    rig = make_store(SUMMED)
    ends, finish = threading.Event(), VerifiedRead.finish

    def late(read: VerifiedRead) -> NDArray[np.bool_]:
        assert ends.wait(60)
        return finish(read)

    with device_of(rig, SHORT_S) as device:
        monkeypatch.setattr(VerifiedRead, "finish", late)
        device.begin()
        assert not any(device.ask(0, every(device, 1)))
        device.end()
        rig.store.drop_context("r")
        ends.set()
        until(lambda: bool(device.answers._ended), "the read")
        device.slots = []
        device.begin()
        device.end()
        assert rig.store._fetcher.take_bad() == []


def test_nobody_answers_behind_the_end(make_store: MakeStore) -> None:
    rig = make_store(SUMMED, faulty=False)
    with device_of(rig) as device:
        device.answers.close()
        device.begin()
        assert device.base == 0
        assert device.answers.end() is None
