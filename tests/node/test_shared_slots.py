"""Slots of volumes that engines share, on a real node: who may write one, and who reads it."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from tests.faults import set_faults
from tests.kit.waiting import PATIENCE_S, until
from tests.node.test_volumes import DEADLINE_S, VOLUME, Host
from tests.store.placement.test_rebalancer import GEOMETRY, Saver
from vllm_ssdkv.base.errors import NodeError, StoreError, StoreFullError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.base.node_address import Address
from vllm_ssdkv.cli.node.node import app
from vllm_ssdkv.node.client.node_drives import NodeDrives, find_drives
from vllm_ssdkv.node.client.node_engine import NodeEngine
from vllm_ssdkv.node.client.node_existence import NodeExistence
from vllm_ssdkv.node.client.node_link import NodeLink
from vllm_ssdkv.node.client.session import Peer, Session
from vllm_ssdkv.node.client.shared_slots import SharedSlots
from vllm_ssdkv.node.client.volume_link import VolumeLink
from vllm_ssdkv.node.protocol.messages import (
    OpenVolumes,
    Publish,
    StoreSpec,
    StoreStatus,
    VolumesOpened,
    pack,
    shared_volume,
)
from vllm_ssdkv.node.server import volume_link
from vllm_ssdkv.store.devices.health import DeviceHealth
from vllm_ssdkv.store.devices.remote_devices import RemoteVolume
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.format.slot_geometry import SUPERBLOCK_BYTES
from vllm_ssdkv.store.index.slot_index import SlotIndex, SlotState
from vllm_ssdkv.store.io.engines.protocol import Op
from vllm_ssdkv.store.memory.arena import Arena
from vllm_ssdkv.store.own_store import OwnStore
from vllm_ssdkv.store.placement.placement import Placement
from vllm_ssdkv.store.placement.rebalancer import Rebalancer
from vllm_ssdkv.store.placement.segments import arrange

SLOTS = 8
SPEC = StoreSpec({"model": "a model"}, 2, 4096, 1, 32, "a model", "a model", SLOTS, b"so they lie")


def key(number: int) -> bytes:
    return hashlib.blake2b(str(number).encode(), digest_size=32).digest()


def scheduler_of(address: str, run: str = "one", spec: StoreSpec = SPEC) -> NodeLink:
    """Link of an engine's scheduler, which is to be started."""
    peer = Peer(Address.parse(address), None, "scheduler", run, store=spec)
    return NodeLink(peer, Counters(), with_bytes=False)


class Sharer:
    """An engine: its worker, which has the volumes, and its scheduler."""

    def __init__(self, address: str, run: str, spec: StoreSpec = SPEC):
        peer = Peer(Address.parse(address), None, "volume", run)
        self.arena = Arena(1 << 20)
        self.worker = VolumeLink(peer, Counters(), "a model", DEADLINE_S, shared=True)
        drives = self.worker.start()
        digest = Fingerprint(spec.fingerprint).digest
        self.names = [shared_volume(drive.name, digest, 0) for drive in drives]
        names = [name.bytes for name in self.names]
        self.worker.open(names, [VOLUME] * len(names), self.arena.view(0, self.arena.nbytes))
        self.link = scheduler_of(address, run, spec)
        try:
            self.link.start()
        except BaseException:
            self.worker.close(DEADLINE_S)
            raise
        member = NodeExistence(self.link, Counters(), SLOTS)
        self.slots = SharedSlots(member, address, Counters(), SlotIndex(1, None))

    def store(self, *numbers: int) -> list[int]:
        """Store blocks, and have them found; their slots, which stay pinned."""
        self.slots.obtain(len(numbers))
        self.slots.reserve(len(numbers))
        slots = self.slots.allocate(len(numbers), reserved=True)
        for slot, number in zip(slots.tolist(), numbers, strict=True):
            assert self.slots.publish(slot, key(number))
        self.slots.durable(slots)
        self.settle()
        return [int(slot) for slot in slots]

    def settle(self) -> None:
        """Return when the node has done what it was told."""
        self.find(-1)

    def find(self, *numbers: int) -> list[int]:
        """Slots of the longest prefix of these blocks."""
        self.slots.step()
        return [int(slot) for slot in self.slots.lookup([key(number) for number in numbers])]

    def read(self, *numbers: int) -> list[int]:
        """Slots of these blocks, pinned."""
        found = self.find(*numbers)
        self.slots.pin(np.array(found))
        self.settle()
        return found

    def write(self, place: int, byte: int) -> int:
        """Result of a worker's write, which fills a place on the first drive with a byte."""
        self.arena.view(0, 4096)[:] = byte
        return self._move(Op.WRITE, place)

    def read_byte(self, place: int) -> int:
        """Byte that a place on the first drive is filled with."""
        assert self._move(Op.READ, place) == 4096
        (byte,) = set(self.arena.view(0, 4096).tolist())
        return int(byte)

    def _move(self, op: Op, place: int) -> int:
        none, drives = np.zeros(2, dtype=np.int64), np.arange(2, dtype=np.int64)
        engine = NodeEngine(self.arena, none, drives, lambda _: self.worker.wire)
        at = np.array([SUPERBLOCK_BYTES + 4096 * place], dtype=np.uint64)
        zero = np.zeros(1, dtype=np.uint64)
        lengths = np.array([4096], dtype=np.uint32)
        batch = engine.submit(op, zero.astype(np.uint16), at, lengths, zero)
        assert batch.wait(DEADLINE_S)
        return int(batch.results()[0])

    def let_go(self, slots: list[int]) -> None:
        self.slots.unpin(np.array(slots))
        self.settle()

    def close(self) -> None:
        self.slots.close()
        self.worker.close(DEADLINE_S)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def sharers(host: Host) -> Iterator[tuple[Sharer, Sharer]]:
    made = Sharer(host.address, "one"), Sharer(host.address, "two")
    yield made
    for sharer in made:
        sharer.close()


def status(host: Host) -> StoreStatus:
    assert host.node is not None
    return host.node.status().stores[0]


def runs(host: Host) -> set[str]:
    """Engines that have a session."""
    assert host.node is not None
    return {session.run for session in host.node.status().sessions}


def room(sharer: Sharer) -> int:
    """Slots that an engine may have for new blocks."""
    for count in range(SLOTS, 0, -1):
        sharer.slots.obtain(count)
        if sharer.slots.available() == count:
            sharer.slots.step()
            sharer.slots.step()
            return count
    return 0


def test_a_block_is_found_by_all_when_it_is_written(sharers: tuple[Sharer, Sharer]) -> None:
    writer, reader = sharers
    writer.slots.obtain(2)
    writer.slots.reserve(2)
    slots = writer.slots.allocate(2, reserved=True)
    assert all(writer.slots.publish(slot, key(i)) for i, slot in enumerate(slots.tolist()))
    assert writer.slots.find(key(0)) == slots[0], "requests of one engine share it at once"
    assert reader.find(0, 1) == []
    writer.slots.durable(slots)
    writer.settle()
    assert reader.find(0, 1, 2) == slots.tolist()
    epochs = [sharer.slots.epochs(slots).tolist() for sharer in sharers]
    assert epochs[0] == epochs[1]


def test_a_slot_has_one_writer(sharers: tuple[Sharer, Sharer]) -> None:
    first, second = sharers
    mine, other = first.store(0, 1, 2), second.store(3, 4)
    assert not set(mine) & set(other)
    # What the other engine says of a slot that it has not been granted changes nothing.
    session = second.link.session
    assert session is not None
    first.slots.obtain(1)
    first.slots.reserve(1)
    slot = first.slots.allocate(1, reserved=True)
    session.tell(Publish(pack(slot), pack(first.slots.epochs(slot)), key(9)))
    assert second.find(9) == []
    assert first.slots.publish(int(slot[0]), key(5))
    first.slots.durable(slot)
    first.settle()
    assert second.find(5) == slot.tolist()


def test_no_slot_is_taken_from_a_reader(host: Host, sharers: tuple[Sharer, Sharer]) -> None:
    writer, reader = sharers
    slots = writer.store(0, 1, 2)
    assert reader.read(0, 1) == slots[:2]
    writer.let_go(slots)
    assert room(writer) == SLOTS - 2, "the third one may go"
    assert writer.read(0, 1) == slots[:2]
    reader.let_go(slots[:2])
    assert room(reader) == SLOTS - 2, "each reader's claim counts"
    assert reader.find(2) == []
    writer.let_go(slots[:2])
    assert until(lambda: status(host).pinned == 0)
    assert room(reader) == SLOTS
    assert writer.find(0) == []


def written_anew(writer: Sharer, reader: Sharer) -> tuple[int, int]:
    """A slot that the reader has found, and the number of the block that it has since got."""
    (slot,) = writer.store(0)
    writer.let_go([slot])
    assert reader.find(0) == [slot]
    numbers = range(10, 10 + SLOTS)
    return slot, numbers[writer.store(*numbers).index(slot)]


def test_a_slot_that_was_written_anew_before_its_pin_is_not_taken_for_what_it_was(
    sharers: tuple[Sharer, Sharer],
) -> None:
    """Workers know slots by number: they would give a request what the slot held before."""
    writer, reader = sharers
    slot, new = written_anew(writer, reader)
    assert reader.slots.lookup([key(new)]).tolist() == [slot]
    assert reader.slots.lookup([key(0)]).tolist() == [], "in the same step"
    reader.slots.step()
    reader.slots.lookup([key(new)])
    reader.slots.pin(np.array([slot]))
    writer.slots.drop(slot)
    writer.let_go([slot])
    reader.let_go([slot])
    assert writer.store(20) == [slot]
    assert reader.find(20) == [slot]
    assert reader.slots.find(key(20)) == slot


def test_a_pin_that_came_too_late_hides_what_the_slot_holds_now(
    sharers: tuple[Sharer, Sharer],
) -> None:
    writer, reader = sharers
    slot, new = written_anew(writer, reader)
    reader.slots.pin(np.array([slot]))
    reader.settle()
    assert reader.find(new) == []
    assert reader.slots.find(key(new)) is None, "no context gets it either"
    assert reader.slots.state(slot) is SlotState.READY
    reader.let_go([slot])
    assert reader.slots.state(slot) is SlotState.FREE
    assert reader.read(new) == [slot]


def test_a_block_that_was_stored_anew_before_its_pin_is_hidden(
    sharers: tuple[Sharer, Sharer],
) -> None:
    writer, reader = sharers
    (slot,) = writer.store(0)
    writer.let_go([slot])
    assert reader.find(0) == [slot]
    writer.store(*range(10, 10 + SLOTS))
    writer.slots.drop(slot)
    writer.let_go([slot])
    assert writer.store(0) == [slot]
    reader.slots.pin(np.array([slot]))
    reader.settle()
    assert reader.find(0) == [], "nobody keeps it for this engine"
    reader.let_go([slot])
    assert reader.find(0) == [slot]


def test_a_session_may_end_between_look_up_and_reservation(
    sharers: tuple[Sharer, Sharer],
) -> None:
    first, _ = sharers
    first.slots.obtain(2)
    assert first.link.session is not None
    first.link.session.end()
    assert first.slots.lookup([key(0)]).tolist() == []
    first.slots.reserve(2)
    with pytest.raises(StoreFullError):
        first.slots.allocate(1, reserved=True)
    assert first.slots.take_loss()
    first.slots.unreserve(2)
    with pytest.raises(StoreFullError):
        first.slots.reserve(1)


def test_what_one_engine_cannot_reach_is_found_by_others(
    sharers: tuple[Sharer, Sharer],
) -> None:
    first, second = sharers
    slots = first.store(0, 1)
    found = arrange(GEOMETRY, [], [1.0], [2 * SLOTS])
    state, counters = SlotIndex(found.numbers, None), Counters()
    placement = Placement(GEOMETRY, found.segments, 1)
    rebalancer = Rebalancer(state, placement, [1.0], Saver(), counters)
    own = OwnStore.of(first.slots, rebalancer, ["/a"], counters, whole=True)
    first.slots.usable = lambda: False
    own.unread.failed([(slot, -1) for slot in slots])
    assert not own.unread.give_up()
    first.settle()
    assert first.slots.find(key(0)) is None
    assert second.find(0, 1) == slots
    assert counters.total("slots_dropped", cause="read_error") == 0
    first.slots.usable = lambda: True
    own.unread.failed([(slots[1], -1)])
    first.settle()
    assert second.find(0, 1) == slots[:1]
    assert counters.total("slots_dropped", cause="read_error") == 1


def test_claims_of_an_engine_end_with_it(host: Host, sharers: tuple[Sharer, Sharer]) -> None:
    writer, reader = sharers
    slots = writer.store(0, 1)
    writer.slots.obtain(3)
    writer.slots.reserve(3)
    assert status(host).pinned == 5
    assert reader.read(0) == slots[:1]
    writer.close()
    assert until(lambda: status(host).pinned == 1)
    assert reader.find(0, 1) == slots
    reader.slots.obtain(6)
    assert reader.slots.available() == 6
    reader.slots.step()
    reader.slots.step()


def test_the_last_writes_of_an_engine_end_before_its_claims(
    host: Host, sharers: tuple[Sharer, Sharer]
) -> None:
    """A scheduler may be gone alone: its workers could still write into slots that it had."""
    writer, _ = sharers
    writer.slots.obtain(1)
    before = writer.worker.session
    assert before is not None
    assert writer.link.session is not None
    writer.link.session.end()
    assert until(lambda: before.ended)
    assert until(lambda: status(host).pinned == 0)
    assert until(lambda: writer.worker.session not in (None, before))


@contextlib.contextmanager
def late_writes(tmp_path: Path) -> Iterator[tuple[Host, Sharer, Sharer]]:
    """A node on which write number ``SLOTS`` of a worker ends when ``faults`` goes."""
    hung = tmp_path / "faults"
    late = {"kind": "latency", "op": "write", "count": 1, "seconds": 600.0}
    set_faults(hung, {**late, "after": SLOTS - 1})
    io = {"deadline": 2.0, "engine": "threads", "fault_file": str(hung)}
    host = Host(tmp_path, io=io)
    host.start()
    made = Sharer(host.address, "one"), Sharer(host.address, "two")
    try:
        yield host, *made
    finally:
        for sharer in made:
            sharer.close()
        host.stop()


def hung_write(writer: Sharer) -> int:
    """Slot of an engine whose write has failed, and is still under way."""
    writer.slots.obtain(1)
    writer.slots.reserve(1)
    slot = int(writer.slots.allocate(1, reserved=True)[0])
    assert [writer.write(SLOTS, 0) for _ in range(SLOTS - 1)] == [4096] * (SLOTS - 1)
    assert writer.write(slot, 1) == -errno.EIO
    return slot


def test_a_write_that_hangs_destroys_nothing_that_another_engine_has_stored(
    tmp_path: Path,
) -> None:
    """The node answers in time that it has failed; its bytes may come to the drive later."""
    with late_writes(tmp_path) as (host, first, second):
        slot = hung_write(first)
        first.slots.drop(slot)
        first.let_go([slot])
        others = range(room(second))
        assert len(others) == SLOTS - 1
        slots = second.store(*others)
        assert [second.write(slot, 2) for slot in slots] == [4096] * len(slots)
        second.let_go(slots)
        (tmp_path / "faults").unlink()
        assert until(lambda: room(second) == SLOTS), "it has its slot when the write has ended"
        assert [second.read_byte(slot) for slot in slots] == [2] * len(slots)
        second.settle()
        assert status(host).pinned == 0


def test_a_write_that_hangs_outlives_no_claim(tmp_path: Path) -> None:
    with late_writes(tmp_path) as (host, first, second):
        hung_write(first)
        first.close()
        assert until(lambda: "one" not in runs(host))
        assert room(second) == SLOTS - 1
        second.close()
        assert until(lambda: not runs(host))
        third = Sharer(host.address, "three")
        assert room(third) == SLOTS - 1, "nor the last engine"
        third.close()


def test_a_write_that_was_tried_again_on_another_connection_outlives_no_claim(
    tmp_path: Path,
) -> None:
    with late_writes(tmp_path) as (_, first, second):
        slot = hung_write(first)
        before = first.worker.session
        assert before is not None
        before.end()
        assert until(lambda: first.worker.session not in (None, before))
        assert first.write(slot, 1) == 4096
        assert first.slots.publish(slot, key(0))
        first.slots.durable(slot)
        first.let_go([slot])
        assert room(second) == SLOTS - 1
        assert second.find(0) == [slot]


def test_workers_whose_scheduler_is_gone_write_no_more(
    host: Host, sharers: tuple[Sharer, Sharer]
) -> None:
    writer, other = sharers
    other.close()
    writer.slots.close()
    assert until(lambda: writer.worker.session is None)
    session = Session.open(writer.worker.peer, with_bytes=False, timeout=5.0)
    names = [name.bytes for name in writer.names]
    again = OpenVolumes(
        names, [VOLUME] * len(names), "a model", DEADLINE_S, shared=True, again=True
    )
    with pytest.raises(NodeError, match="scheduler of these workers is gone"):
        session.call(again, VolumesOpened)
    session.close()
    host.stop()
    host.start()
    node = host.node
    assert node is not None
    assert until(lambda: node.counters.total("node_calls", call="OpenVolumes") > 1)
    assert writer.worker.session is None, "nor after a restart of the node"
    link = scheduler_of(host.address)
    link.start()
    assert until(lambda: writer.worker.session is not None)
    assert writer.worker.since > 0
    link.close()


def test_workers_are_told_which_slots_their_engine_has_lost(
    host: Host, sharers: tuple[Sharer, Sharer]
) -> None:
    writer, _ = sharers
    (slot,) = writer.store(0)
    epoch = writer.slots.epoch(slot)
    workers, scheduler = writer.worker.session, writer.link.session
    assert workers is not None
    assert scheduler is not None
    workers.end()
    assert until(lambda: writer.worker.session not in (None, workers))
    assert writer.worker.since <= epoch, "its scheduler has them still"
    workers = writer.worker.session
    scheduler.end()
    assert until(lambda: writer.worker.session not in (None, workers))
    assert writer.worker.since > epoch
    assert until(lambda: writer.link.session not in (None, scheduler))
    writer.let_go([slot])
    (slot,) = writer.store(1)
    assert writer.slots.epoch(slot) >= writer.worker.since


def test_workers_write_no_slots_that_their_engine_has_lost(host: Host, tmp_path: Path) -> None:
    peers = [Peer(Address.parse(host.address), None, "volume", "one")]
    found = find_drives(peers, "a model", tmp_path / "state")
    digest = Fingerprint(SPEC.fingerprint).digest
    drives = NodeDrives(peers, found, "a model", Counters(), DEADLINE_S, digest)
    volumes = [RemoteVolume(str(one.stub), UUID(bytes=one.drive.name), VOLUME) for one in found]
    engine = drives.open_engine(volumes, Arena(1 << 20))
    health = DeviceHealth([volume.path for volume in volumes], DEADLINE_S, Counters())
    drives.watch(health)
    link = scheduler_of(host.address)
    scheduler = link.start()
    assert health.writes_since == 0
    scheduler.end()
    assert until(lambda: health.writes_since > 0)
    assert until(lambda: not health.quarantined)
    link.close()
    assert drives.close(DEADLINE_S)
    assert engine.close(DEADLINE_S)


def test_workers_that_are_back_at_once_do_not_hold_up_the_end_of_claims(
    host: Host, sharers: tuple[Sharer, Sharer], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends, written = volume_link.VolumeLink.close, threading.Event()

    def slowly(link: volume_link.VolumeLink) -> None:
        written.wait(PATIENCE_S)
        ends(link)

    monkeypatch.setattr(volume_link.VolumeLink, "close", slowly)
    writer, _ = sharers
    writer.slots.obtain(1)
    before = writer.worker.session
    assert before is not None
    assert writer.link.session is not None
    writer.link.session.end()
    assert until(lambda: writer.worker.session not in (None, before))
    assert status(host).pinned == 1
    written.set()
    # Whoever waited for the new session would do so for two deadlines of 10 s.
    assert until(lambda: status(host).pinned == 0, seconds=15.0)


def test_a_restart_finds_what_was_written_and_knows_no_claims(
    host: Host, sharers: tuple[Sharer, Sharer]
) -> None:
    writer, reader = sharers
    slots = writer.store(0, 1)
    epochs = writer.slots.epochs(np.array(slots)).tolist()
    writer.slots.obtain(2)
    writer.slots.reserve(2)
    assert not writer.slots.take_loss()
    host.stop()
    assert until(writer.slots.take_loss)
    assert until(lambda: reader.link.session is None)
    assert writer.find(0) == []
    host.start()
    assert until(lambda: writer.link.session is not None and reader.link.session is not None)
    assert status(host).pinned == 0
    assert reader.find(0, 1) == slots
    assert reader.slots.epochs(np.array(slots)).tolist() == epochs
    assert writer.find(0, 1) == [], "its workers have still to forget what these slots were"
    assert writer.slots.find(key(0)) is None
    assert writer.slots.state(slots[0]) is SlotState.READY
    with pytest.raises(StoreFullError):
        writer.slots.allocate(1, reserved=True)
    writer.slots.unreserve(2)
    writer.let_go(slots)
    assert writer.slots.state(slots[0]) is SlotState.FREE
    assert writer.read(0, 1) == slots
    assert status(host).pinned == 2
    writer.let_go(slots)
    assert status(host).pinned == 0
    new = reader.store(7)
    assert reader.slots.epoch(new[0]) > max(epochs)


def test_slots_of_before_are_granted_when_workers_have_forgotten_them(
    host: Host, sharers: tuple[Sharer, Sharer]
) -> None:
    writer, _ = sharers
    slots = writer.store(*range(SLOTS))
    host.stop()
    host.start()
    assert until(writer.slots.take_loss)
    assert until(lambda: writer.link.session is not None)
    writer.slots.obtain(1)
    assert writer.slots.available() == 0
    writer.let_go(slots)
    assert status(host).pinned == 0
    writer.slots.obtain(1)
    assert writer.slots.available() == 1
    writer.slots.computes_no_more("a request")
    writer.settle()
    assert status(host).pinned == 0
    (slot,) = writer.store(SLOTS)
    assert writer.find(SLOTS) == [slot]


def test_slots_that_a_request_needs_no_more_go_back(
    host: Host, sharers: tuple[Sharer, Sharer]
) -> None:
    writer, _ = sharers
    writer.slots.obtain(3)
    writer.slots.reserve(3)
    writer.slots.unreserve(2)
    assert until(lambda: status(host).pinned == 1)


def test_a_block_that_two_have_computed_is_stored_once(
    host: Host, sharers: tuple[Sharer, Sharer]
) -> None:
    first, second = sharers
    (slot,), (other,) = first.store(0), second.store(0)
    assert slot != other
    assert first.find(0) == second.find(0) == [slot]
    second.let_go([other])
    assert until(lambda: status(host).pinned == 1)
    assert status(host).ready == 1


def test_a_block_that_is_wrong_is_found_by_nobody(sharers: tuple[Sharer, Sharer]) -> None:
    first, second = sharers
    slots = first.store(0, 1)
    assert second.read(0, 1) == slots
    second.slots.drop(slots[0])
    second.settle()
    assert first.find(0, 1) == []
    second.slots.step()
    assert second.slots.find(key(0)) is None
    assert second.slots.mask(np.array(slots[1:])) == (0, 1)
    second.settle()
    assert first.find(1) == []


def test_a_slot_of_several_blocks_is_dropped_once(sharers: tuple[Sharer, Sharer]) -> None:
    first, _ = sharers
    slots = first.store(0, 1)
    first.slots.drop(np.array([slots[0]] * 3 + [slots[1]]))
    first.settle()
    assert first.slots.counters["dropped"] == 2


def test_a_request_waits_for_blocks_that_another_engine_computes(
    sharers: tuple[Sharer, Sharer],
) -> None:
    first, second = sharers
    keys = [key(0), key(1)]
    assert not first.slots.awaits("a", keys, lambda: None)
    assert second.slots.awaits("b", keys, lambda: None)
    first.store(0, 1)
    assert until(lambda: not second.slots.awaits("b", keys, lambda: None))
    assert len(second.slots.lookup(keys)) == 2


def test_a_reset_hides_what_is_stored_from_one_engine(sharers: tuple[Sharer, Sharer]) -> None:
    first, second = sharers
    (slot,) = first.store(0)
    first.slots.forget_stored()
    assert first.slots.find(key(0)) is None
    assert first.find(0) == []
    assert second.find(0) == [slot]
    first.let_go([slot])
    (anew,) = first.store(0)
    assert second.find(0) == first.find(0) == [anew]


def test_drives_that_are_gone_have_no_room(sharers: tuple[Sharer, Sharer]) -> None:
    first, _ = sharers
    first.slots.obtain(2)
    first.slots.reserve(1)
    first.slots.usable = lambda: False
    assert first.slots.available() == 0
    with pytest.raises(StoreFullError):
        first.slots.reserve(1)
    with pytest.raises(StoreFullError):
        first.slots.allocate(1, reserved=True)
    first.slots.usable = lambda: True
    with pytest.raises(ValueError, match="unreserve 2 of 1"):
        first.slots.unreserve(2)


def test_engines_whose_slots_lie_otherwise_are_refused(
    host: Host, sharers: tuple[Sharer, Sharer]
) -> None:
    for other in (
        msgspec.structs.replace(SPEC, slots=SLOTS + 1),
        msgspec.structs.replace(SPEC, layout=b"otherwise"),
    ):
        with pytest.raises(
            StoreError, match=r"lie otherwise in the volumes: .* the capacity that they had"
        ):
            Sharer(host.address, "three", other)
    for sharer in sharers:
        sharer.close()
    assert host.node is not None
    assert until(lambda: not host.node or not host.node.status().stores)
    with pytest.raises(
        StoreError, match=r"8 slots lie otherwise in the volume .* the capacity that they had"
    ):
        Sharer(host.address, "three", msgspec.structs.replace(SPEC, layout=b"otherwise"))


def test_more_slots_than_the_volumes_have_room_for_are_refused(host: Host) -> None:
    """Their index would take all memory of the node."""
    for slots in (1 << 30, 2 * VOLUME // 8192 + 1):
        with pytest.raises(StoreError, match=f"{slots} slots of at least 8192 bytes do not lie"):
            Sharer(host.address, "one", msgspec.structs.replace(SPEC, slots=slots))
    most = msgspec.structs.replace(SPEC, slots=2 * VOLUME // 8192)
    Sharer(host.address, "one", most).close()


def test_an_index_stays_open_until_its_volume_is_removed(host: Host, tmp_path: Path) -> None:
    """Reading a long journal may take longer than an engine waits: it would never be done."""
    first = Sharer(host.address, "one")
    volumes = [str(UUID(bytes=name.bytes)) for name in first.names]
    about = tmp_path / "ssd0" / "volumes" / volumes[0] / "shared.json"
    first.let_go(first.store(0))
    first.slots.close()
    assert until(lambda: not runs(host))
    second = Sharer(host.address, "two")
    assert second.find(0)
    assert json.loads(about.read_text())["opened"] == 1
    second.worker.close(DEADLINE_S)
    assert until(lambda: "in use by an engine" in remove(host, volumes[0]))
    second.slots.close()
    assert until(lambda: remove(host, volumes[0]) and not about.exists())
    third = Sharer(host.address, "three")
    assert third.find(0) == []
    third.close()


def remove(host: Host, volume: str) -> str:
    """Output of the command that removes a volume."""
    return CliRunner().invoke(app, ["volumes", host.address, "--remove", volume]).output


def test_volumes_that_are_shared_stay_locked_until_the_last_session_ends(
    host: Host, sharers: tuple[Sharer, Sharer]
) -> None:
    first, second = sharers
    name = UUID(bytes=first.names[0].bytes)

    def open_alone() -> None:
        peer = Peer(Address.parse(host.address), None, "volume", "alone")
        link = VolumeLink(peer, Counters(), "a model", DEADLINE_S)
        drives = link.start()
        try:
            link.open([name.bytes, None][: len(drives)], [VOLUME, 0], first.arena.view(0, 4096))
        finally:
            link.close(DEADLINE_S)

    first.close()
    with pytest.raises((StoreError, NodeError), match="in use"):
        open_alone()
    second.close()
    assert host.node is not None
    assert until(lambda: not host.node or not host.node.status().sessions)
    open_alone()
