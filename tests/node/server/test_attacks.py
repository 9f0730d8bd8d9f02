"""A node and its worst clients: what is wrong is refused with a reason, and others are served."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.kit.alone import environment_with_tests
from tests.kit.node import NodeProcess
from tests.kit.server import free_port
from tests.kit.waiting import until
from tests.node.protocol.frame_samples import SAMPLES, framed, hostile_session
from tests.node.server.attacker import SPEC, WAIT_S, Attacker, connected, raw, raw_worker
from vllm_ssdkv.base.errors import NodeError, NodeRefusedError
from vllm_ssdkv.base.node_address import Address
from vllm_ssdkv.node.protocol.frames import Control, Flag, Header
from vllm_ssdkv.node.protocol.messages import (
    MAX_ENTRIES,
    MAX_LOADING,
    Arrived,
    AskGauges,
    Bind,
    Claim,
    Claimed,
    Done,
    Drop,
    Gauges,
    Hello,
    Last,
    Load,
    LoadEnded,
    Lookup,
    Pin,
    Region,
    Save,
    Slots,
    Taken,
    Unpin,
    Written,
    encode,
    kind_of,
    pack,
    unpack,
)
from vllm_ssdkv.node.protocol.shared_memory import make_shared
from vllm_ssdkv.node.server.dram_loads import MOST

SOAKED = "SSDKV_SOAK_NODE_S" in os.environ
LEASE_S = 2.0
NOT_ALLOWED = r"Operation not permitted|Permission denied"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node that all attacks of this file meet; at the end it is whole."""
    root, ports = tmp_path_factory.mktemp("node"), (free_port(), free_port())
    options = {"lease": LEASE_S, "transfer": "1MiB", "most_sessions": 24}
    options["listen"] = [f"unix://{root}/node.sock", f"tcp://127.0.0.1:{ports[0]}"]
    options["metrics"] = f"127.0.0.1:{ports[1]}"
    with NodeProcess(root, **options) as found:
        # As many stores as it has shares: whoever comes later takes the place of one.
        for spec in (SPEC, replace(SPEC, name="another")):
            with Attacker(Address.parse(found.address), "scheduler", spec=spec):
                pass
        before = vitals(found)
        yield found
        assert served(found)
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline and beyond(vitals(found), before):
            time.sleep(0.2)
        assert not beyond(vitals(found), before), (vitals(found), before)
        assert "Traceback" not in found.log()
        assert found.end() == 0


def vitals(node: NodeProcess) -> tuple[int, int, int]:
    """File descriptors, threads and MiB of memory of a node."""
    assert node.process is not None
    proc = Path(f"/proc/{node.process.pid}")
    (resident,) = (
        int(line.split()[1])
        for line in (proc / "status").read_text().splitlines()
        if line.startswith("VmRSS")
    )
    return len(list((proc / "fd").iterdir())), len(list((proc / "task").iterdir())), resident >> 10


def beyond(now: tuple[int, int, int], before: tuple[int, int, int]) -> bool:
    """Check whether a node has kept something of those who are gone."""
    # Of I/O engines, which start threads when they need them; some hundred sessions came and went.
    # The node's DRAM, 64 MiB, is no memory of the process before its frames are used.
    room = (4, 8, 64 + 32)
    return any(a > b + more for a, b, more in zip(now, before, room, strict=True))


def keys(first: int, count: int) -> bytes:
    return b"".join(number.to_bytes(32, "little") for number in range(first, first + count))


def options_of(node: NodeProcess) -> tuple[Address, int]:
    """Its address over TCP, and the port of its metrics."""
    options = json.loads(node.config.read_text())
    return Address.parse(options["listen"][1]), int(options["metrics"].rpartition(":")[2])


def served(node: NodeProcess, address: Address | None = None) -> bool:
    """Check whether an engine gets its answers, and soon."""
    begin = time.monotonic()
    with Attacker(address or Address.parse(node.address), "scheduler", "good") as good:
        assert isinstance(good.call(Lookup(keys(1, 10))).message, Slots)
        claimed = good.call(Claim(keys(random.randrange(1 << 60), 1))).message
        assert isinstance(claimed, Claimed)
        assert unpack(claimed.slots)[0] >= 0
    assert time.monotonic() < begin + 10
    return True


def refusal(sock: socket.socket) -> str:
    """Reason in the refusal that comes next."""
    while True:
        header = Header.unpack(_exactly(sock, 32))
        body = _exactly(sock, header.body_bytes)
        if header.kind == Control.REFUSED:
            return body.decode()


def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    data = sock.recv(nbytes, socket.MSG_WAITALL) if nbytes else b""
    assert len(data) == nbytes, "the node ended the connection without a reason"
    return data


# ---- frames ----

HELLO = Hello(1, 1, "scheduler", "calls", "raw", 0, SPEC)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: a-node\r\n\r\n", "begins with b'GET '"),
        (framed(Done(), 0), "begins with a hello"),
        (framed(HELLO, 1), "frame 1 came where frame 0"),
        (framed(HELLO, 0, payload=b"x"), "1 of payload"),
        (Header(16, body_bytes=1 << 20).pack(), "1048576 bytes of body"),
        (framed(Hello(7, 9, "scheduler", "calls", "raw", 0, SPEC), 0), "speaks versions 7 to 9"),
        (  # of a release whose hello has another shape
            Header(kind_of(HELLO), version=9, body_bytes=1).pack() + b"x",
            "speaks versions 9 to 9 of the protocol",
        ),
        (framed(Hello(1, 1, "worker", "bytes", "raw", 0, SPEC), 0), "begins with the connection"),
        (
            framed(HELLO, 0).replace(encode(SPEC), encode(replace(SPEC, ranks=65))),
            "Expected `int` <= 64",
        ),
        (
            framed(Hello(1, 1, "worker", "bytes", "raw", 0, SPEC, b"x" * 16), 0),
            "no such session to join",
        ),
        (framed(Hello(1, 1, "worker", "calls", "raw", 1, SPEC), 0), "names no store"),
        (framed(Hello(1, 1, "worker", "calls", "raw", 0, None), 0), "names no store"),
        (framed(Hello(1, 1, "scheduler", "calls", "a\nb", 0, SPEC), 0), "not a Hello"),
    ],
)
def test_what_is_no_hello_is_refused(node: NodeProcess, data: bytes, reason: str) -> None:
    with raw(node) as sock:
        sock.sendall(data)
        assert reason in refusal(sock)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (framed(HELLO, 0), "frame 0 came where frame 1"),
        (framed(AskGauges(), 1) * 2, "frame 1 came where frame 2"),
        (framed(HELLO, 1), "a Hello came among the calls"),
        (framed(Slots(b"", b""), 1), "a Slots came among the calls"),
        (framed(AskGauges(), 1, flags=Flag.ANSWER), "is no call"),
        (framed(AskGauges(), 1, payload=b"x"), "credit for 0"),
        (
            Header(kind_of(AskGauges()), version=2, sequence=1, body_bytes=1).pack(),
            "of version 2; 1 was agreed on",
        ),
        (Header(kind_of(Lookup(b"")), sequence=1, body_bytes=1 << 25).pack(), "bytes of body"),
        (framed(Lookup(b"x" * 31), 1), "31 bytes are no keys"),
        (framed(Pin(pack([1, 2]), pack([1])), 1), "2 slots with 1 epochs"),
        (framed(Drop(pack([1]), pack([1]), "no such cause"), 1), "Drop"),
        (framed(Last(keys(1, 3), 5, 2, [0]), 1), "Last"),
    ],
)
def test_what_is_no_call_is_refused(node: NodeProcess, data: bytes, reason: str) -> None:
    with raw(node) as sock:
        sock.sendall(framed(HELLO, 0))
        sock.sendall(data)
        assert reason in refusal(sock)


def test_a_recorded_session_cannot_be_played_again(node: NodeProcess) -> None:
    """The second connection of a session, as somebody has seen it."""
    address = Address.parse(node.address)
    with Attacker(address, "worker") as attacker:
        session = attacker.welcome.session
        with raw(node) as sock:
            sock.sendall(framed(Hello(1, 1, "worker", "bytes", "attack", 0, SPEC, session), 0))
            assert "no such session" in refusal(sock)
    with raw(node) as sock:
        sock.sendall(framed(Hello(1, 1, "worker", "bytes", "attack", 0, SPEC, session), 0))
        assert "no such session" in refusal(sock)


@pytest.mark.rounds
@pytest.mark.timeout(7200)
def test_hostile_frames_after_every_hello(node: NodeProcess, node_seconds: float) -> None:
    """The node goes on, loses nothing and says nothing of a defect of its own."""
    hellos = [framed(m, 0) for m in SAMPLES if isinstance(m, Hello)]
    hellos += [framed(HELLO, 0), framed(Hello(1, 1, "worker", "calls", "raw", 0, SPEC), 0)]
    first = random.randrange(1 << 32) if SOAKED else 1
    end, number = time.monotonic() + 3 * node_seconds, 0
    while number < 100 or time.monotonic() < end:
        source = random.Random(f"{first} {number}")
        data = b"" if source.random() < 0.1 else source.choice(hellos)
        data += hostile_session(source, 1 if data else 0)
        with raw(node) as sock:
            try:
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(65536):
                    pass
            except ConnectionError:
                pass
        number += 1
        if number % 200 == 0:
            assert served(node), f"seed {first}, session {number}"
    assert served(node)
    assert "Traceback" not in node.log(), f"seed {first}"


@pytest.mark.rounds
@pytest.mark.timeout(7200)
def test_hostile_frames_among_bytes(node: NodeProcess, node_seconds: float) -> None:
    first = random.randrange(1 << 32) if SOAKED else 1
    end, number = time.monotonic() + 2 * node_seconds, 0
    while number < 50 or time.monotonic() < end:
        source = random.Random(f"{first} {number}")
        calls, stream, _ = raw_worker(Address.parse(node.address), f"run {number % 3}")
        with calls, stream, contextlib.suppress(ConnectionError):
            stream.sendall(hostile_session(source, 1))
            stream.shutdown(socket.SHUT_WR)
            while stream.recv(65536):
                pass
        number += 1
    assert served(node)
    assert "Traceback" not in node.log(), f"seed {first}"


# ---- calls that fit and mean harm ----


def test_slots_that_are_not_there_do_nothing(node: NodeProcess) -> None:
    far = pack([0, 5, 1 << 40, (1 << 63) - 1])
    with Attacker(Address.parse(node.address), "scheduler") as attacker:
        for message in (
            Pin(far, far),
            Unpin(far, far),
            Drop(far, far, "read_error"),
            Last(keys(1, 3), 1 << 62, (1 << 62) + 3, [0, 255]),
        ):
            attacker.calls.send(message, timeout=WAIT_S)
            frame = attacker.call(AskGauges())
            while not isinstance(frame.message, Gauges):
                frame = attacker.calls.receive(WAIT_S)
            assert frame.message.gauges["pinned"] == 0


def test_pins_of_others_are_not_undone(node: NodeProcess) -> None:
    address = Address.parse(node.address)
    with Attacker(address, "scheduler", "a") as good, Attacker(address, "scheduler", "b") as bad:
        claimed = good.call(Claim(keys(500, 3))).message
        assert isinstance(claimed, Claimed)
        for _ in range(3):
            bad.calls.send(Unpin(claimed.slots, claimed.epochs), timeout=WAIT_S)
        gauges = bad.call(AskGauges()).message
        assert isinstance(gauges, Gauges)
        assert gauges.gauges["pinned"] == 3
        # Nor may it save into them.
        saved = Attacker(address, "worker", "b")
        with saved:
            places = pack([0, 0, 0])
            _share_region(saved, 1 << 20)
            frame = saved.tell(Save(claimed.slots, claimed.epochs, keys(500, 3), places))
            assert isinstance(frame.message, Taken)
            assert unpack(frame.message.lost).tolist() == [0, 1, 2]


def test_a_session_that_takes_every_slot_gives_them_back(node: NodeProcess) -> None:
    address = Address.parse(node.address)
    with Attacker(address, "scheduler") as attacker:
        slots = attacker.welcome.num_slots
        for first in range(0, slots + 1000, 1000):
            attacker.call(Claim(keys(10_000 + first, 1000)))
        gauges = attacker.call(AskGauges()).message
        assert isinstance(gauges, Gauges)
        assert gauges.gauges["free"] == 0
        # Others are told that there is no room; nothing else happens to them.
        with Attacker(address, "scheduler", "good") as good:
            claimed = good.call(Claim(keys(1, 1))).message
            assert isinstance(claimed, Claimed)
            assert unpack(claimed.slots)[0] < 0
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        with Attacker(address, "scheduler", "good") as good:
            gauges = good.call(AskGauges()).message
            assert isinstance(gauges, Gauges)
            if gauges.gauges["pinned"] == 0:
                break
        time.sleep(0.1)
    assert served(node)


def test_too_many_sessions_are_refused(node: NodeProcess) -> None:
    address, sessions = Address.parse(node.address), []
    _nobody_is_left(node)
    try:
        for _ in range(24):
            sessions.append(Attacker(address, "scheduler"))
        with pytest.raises(NodeRefusedError, match="most_sessions"):
            Attacker(address, "scheduler")
    finally:
        for session in sessions:
            session.__exit__()
    _nobody_is_left(node)
    assert served(node)


def _nobody_is_left(node: NodeProcess) -> None:
    """Wait until the node has forgotten the sessions of tests before."""
    until(lambda: not any(one.role != "status" for one in node.status().sessions))


# ---- memory ----


def _share_region(attacker: Attacker, nbytes: int, announced: int | None = None) -> None:
    descriptor = make_shared("ssdkv-attack", nbytes)
    assert attacker.bytes is not None
    region = Region(announced or nbytes)
    attacker.bytes.send(region, descriptors=[descriptor], timeout=WAIT_S)
    os.close(descriptor)


def _end(attacker: Attacker) -> str:
    """Why the connection for bytes ended."""
    assert attacker.bytes is not None
    while True:
        try:
            attacker.bytes.receive(WAIT_S)
        except NodeError as error:
            return str(error)


def _refused(attacker: Attacker, reason: str) -> None:
    assert attacker.bytes is not None
    attacker.bytes.silence_s = WAIT_S
    with pytest.raises(NodeRefusedError, match=reason):
        attacker.bytes.receive(WAIT_S)


def test_a_region_that_can_shrink_is_refused(node: NodeProcess) -> None:
    descriptor = os.memfd_create("ssdkv-attack", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 1 << 20)
    with Attacker(Address.parse(node.address), "worker") as attacker:
        assert attacker.bytes is not None
        attacker.bytes.send(Region(1 << 20), descriptors=[descriptor], timeout=WAIT_S)
        _refused(attacker, "cannot shrink")
    os.close(descriptor)


@pytest.mark.parametrize("file", ["/dev/zero", "/dev/null", "/proc/self/mem", "/"])
def test_a_file_that_is_no_memory_is_refused(node: NodeProcess, file: str) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    with Attacker(Address.parse(node.address), "worker") as attacker:
        assert attacker.bytes is not None
        attacker.bytes.send(Region(1 << 20), descriptors=[descriptor], timeout=WAIT_S)
        _refused(attacker, r"no shared memory|were announced|cannot shrink")
    os.close(descriptor)


def test_regions_of_a_wrong_size_or_number_are_refused(node: NodeProcess) -> None:
    address = Address.parse(node.address)
    with Attacker(address, "worker") as attacker:
        _share_region(attacker, 1 << 20, announced=1 << 19)
        _refused(attacker, "were announced")
    with Attacker(address, "worker") as attacker:
        _share_region(attacker, 8 << 20)
        _refused(attacker, "may be")
    with Attacker(address, "worker") as attacker:
        for _ in range(2):
            _share_region(attacker, 1 << 20)
        _refused(attacker, "comes once")
    with Attacker(address, "worker") as attacker:
        assert attacker.bytes is not None
        attacker.bytes.send(Region(1 << 20), timeout=WAIT_S)
        _refused(attacker, "with one descriptor")


@pytest.mark.parametrize("place", [-1, 1, (1 << 20) - 1, 1 << 20, 1 << 62])
def test_places_outside_the_region_are_refused(node: NodeProcess, place: int) -> None:
    address = Address.parse(node.address)
    with Attacker(address, "scheduler") as scheduler, Attacker(address, "worker") as attacker:
        claimed = scheduler.call(Claim(keys(700, 1))).message
        assert isinstance(claimed, Claimed)
        _share_region(attacker, 1 << 20)
        assert attacker.bytes is not None
        save = Save(claimed.slots, claimed.epochs, keys(700, 1), pack([place]))
        attacker.bytes.send(save, call_id=3, timeout=WAIT_S)
        if place == 1:  # any place inside will do
            assert isinstance(attacker.bytes.receive(WAIT_S).message, Taken)
        else:
            _refused(attacker, "outside the transfer region")


def test_the_arena_cannot_be_written(node: NodeProcess) -> None:
    import mmap

    with Attacker(Address.parse(node.address), "worker") as attacker:
        nbytes = attacker.welcome.arena_bytes
        with pytest.raises(OSError, match=NOT_ALLOWED):
            os.pwrite(attacker.arena, b"x", 0)
        with pytest.raises(OSError, match=NOT_ALLOWED):
            mmap.mmap(attacker.arena, nbytes, mmap.MAP_SHARED, mmap.PROT_WRITE)
        again = os.open(f"/proc/self/fd/{attacker.arena}", os.O_RDWR)
        with pytest.raises(OSError, match=NOT_ALLOWED):
            mmap.mmap(again, nbytes, mmap.MAP_SHARED, mmap.PROT_WRITE)
        for length in (0, nbytes // 2):
            with pytest.raises(OSError, match=NOT_ALLOWED):
                os.ftruncate(again, length)
        os.close(again)


def test_loads_of_what_is_not_there_end_at_once(node: NodeProcess) -> None:
    with Attacker(Address.parse(node.address), "worker") as attacker:
        for slots, epochs in ([0], [1]), ([1 << 40], [1]), ([-3], [0]), ([0, 0], [1, 1]):
            count = len(slots)
            load = Load("r", pack(slots), pack(epochs), keys(1, count), pack([1] * count), count)
            ended = attacker.tell(load).message
            assert isinstance(ended, LoadEnded)
            assert not ended.complete


def test_loads_without_end_are_refused(node: NodeProcess) -> None:
    """A client that asks and asks, and copies nothing: memory of the node stays as it is."""
    address = Address.parse(node.address)
    with Attacker(address, "scheduler") as scheduler, Attacker(address, "worker") as attacker:
        claimed = scheduler.call(Claim(keys(900, 1))).message
        assert isinstance(claimed, Claimed)
        _share_region(attacker, 1 << 20)
        saved = attacker.tell(Save(claimed.slots, claimed.epochs, keys(900, 1), pack([0])))
        assert isinstance(saved.message, Taken)
        load = Load("r", claimed.slots, claimed.epochs, keys(900, 1), pack([1]), 1)
        assert attacker.bytes is not None
        attacker.bytes.silence_s = WAIT_S
        with contextlib.suppress(NodeError):
            for _ in range(100_000):
                attacker.bytes.send(load, call_id=5, timeout=WAIT_S)
        # As too many, or, on a slow machine before that, because it copies nothing.
        _end(attacker)
    assert "loads wait" in node.log() or "did not copy" in node.log()
    assert served(node)


def test_blocks_of_loads_under_way_are_bounded(node: NodeProcess) -> None:
    """Few loads, each of as many blocks as a message may have."""
    address = Address.parse(node.address)
    with Attacker(address, "scheduler") as scheduler, Attacker(address, "worker") as attacker:
        load, count = _stored(scheduler, attacker, 930), MAX_ENTRIES
        many = replace(
            load,
            slots=load.slots * count,
            epochs=load.epochs * count,
            keys=load.keys * count,
            blocks=pack([1] * count),
        )
        assert attacker.bytes is not None
        attacker.bytes.silence_s = WAIT_S
        with contextlib.suppress(NodeError):
            for number in range(MAX_LOADING // count + 2):
                attacker.bytes.send(many, call_id=number + 1, timeout=WAIT_S)
        _end(attacker)
    assert f"more than {MAX_LOADING} blocks" in node.log()
    assert served(node)


def _stored(scheduler: Attacker, attacker: Attacker, number: int) -> Load:
    """Save a block; the message that loads it."""
    claimed = scheduler.call(Claim(keys(number, 1))).message
    assert isinstance(claimed, Claimed)
    _share_region(attacker, 1 << 20)
    saved = attacker.tell(Save(claimed.slots, claimed.epochs, keys(number, 1), pack([0])))
    assert isinstance(saved.message, Taken)
    return Load("r", claimed.slots, claimed.epochs, keys(number, 1), pack([1]), 1)


def test_frames_are_lent_to_so_many_loads_only(node: NodeProcess) -> None:
    """The others go through the loader, which does not say how a load ends before it has."""
    address = Address.parse(node.address)
    with Attacker(address, "scheduler") as scheduler, Attacker(address, "worker") as attacker:
        load = _stored(scheduler, attacker, 910)
        assert attacker.bytes is not None
        for number in range(10, 10 + MOST + 2):
            attacker.bytes.send(load, call_id=number, timeout=WAIT_S)
        at_once = 0
        while at_once <= MOST:
            message = attacker.bytes.receive(WAIT_S).message
            if isinstance(message, Arrived):
                if message.ended is None:
                    break
                at_once += 1
        assert at_once == MOST


def test_frames_that_are_never_copied_end_the_session(node: NodeProcess) -> None:
    address = Address.parse(node.address)
    until(lambda: not any(one.role == "worker" for one in node.status().sessions))
    with Attacker(address, "scheduler") as scheduler, Attacker(address, "worker") as attacker:
        load = _stored(scheduler, attacker, 920)
        begun = time.monotonic()
        arrived = attacker.tell(load).message
        if isinstance(arrived, Written):  # of what was saved
            assert attacker.bytes is not None
            arrived = attacker.bytes.receive(WAIT_S).message
        assert isinstance(arrived, Arrived)
        assert arrived.ended is not None
        _end(attacker)
        assert time.monotonic() - begun > LEASE_S / 2
    assert "did not copy" in node.log()
    assert served(node)


# ---- clients that stand still ----


def test_connections_that_say_nothing_keep_nobody_out(node: NodeProcess) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            sock = stack.enter_context(connected(Address.parse(node.address)))
        sock.sendall(framed(HELLO, 0)[:20])
        assert served(node)


def test_silent_connections_over_tcp_have_a_budget_of_their_own(node: NodeProcess) -> None:
    """Connections of one address; ``test_newcomers.py`` has those of others."""
    address, _ = options_of(node)
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connected(address)) for _ in range(40)]
        for sock in socks[:32]:
            with contextlib.suppress(ConnectionError):
                assert sock.recv(1) == b""
        assert served(node, address)
        assert served(node)


def test_silent_readers_of_metrics_keep_nobody_out(node: NodeProcess) -> None:
    address, port = options_of(node)
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S))
        assert served(node, address)
        url = f"http://127.0.0.1:{port}/metrics"
        with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
            refused = b'vllm:ssdkv_node_refusals_total{cause="limit"}'
            (line,) = (one for one in answer.read().splitlines() if one.startswith(refused))
        assert float(line.split()[-1]) >= 24


@pytest.mark.soak
def test_connections_that_say_nothing_are_ended(node: NodeProcess) -> None:
    """Within the time for a hello."""
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connected(Address.parse(node.address))) for _ in range(60)]
        socks[0].sendall(framed(HELLO, 0)[:20])
        for sock in socks:
            while sock.recv(4096):  # the reason, or nothing
                pass


def test_who_goes_while_it_waits_for_weights_is_forgotten(node: NodeProcess) -> None:
    """An engine that is killed while it starts: its session does not wait on."""
    with raw(node) as sock:
        sock.sendall(framed(HELLO, 0) + framed(Bind(500.0), 1, call_id=2))
        while not any(one.run == "raw" for one in node.status().sessions):
            time.sleep(0.02)
    until(lambda: not any(one.run == "raw" for one in node.status().sessions))


def test_a_lease_ends_with_silence(node: NodeProcess) -> None:
    with Attacker(Address.parse(node.address), "scheduler", "silent", beats=False) as attacker:
        attacker.call(Claim(keys(5000, 10)))
        assert any(one.run == "silent" and one.pins == 10 for one in node.status().sessions)
        until(lambda: not any(one.run == "silent" for one in node.status().sessions))


STOPPED = """
import os, signal, sys
from tests.node.protocol.frame_samples import framed
from tests.node.server.attacker import Attacker, raw_worker
from vllm_ssdkv.base.node_address import Address
from vllm_ssdkv.node.protocol.messages import Claim, Save

address, key = Address.parse(sys.argv[1]), bytes(31) + b"s"
scheduler = Attacker(address, "scheduler", "stopped", beats=False)
claimed = scheduler.call(Claim(key)).message
calls, stream, welcome = raw_worker(address, "stopped")
save = Save(claimed.slots, claimed.epochs, key, b"")
data = framed(save, 1, call_id=2, payload=bytes(welcome.frame_bytes))
stream.sendall(data[: -welcome.frame_bytes // 2])
print("half", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_stopped_client_amid_a_save_harms_nobody(tmp_path: Path) -> None:
    """Half of a payload came over TCP; another engine saves and finds meanwhile."""
    address = f"tcp://127.0.0.1:{free_port()}"
    with NodeProcess(tmp_path, listen=[address], lease=4.0) as node:
        command = [sys.executable, "-P", "-c", STOPPED, address]
        environment = environment_with_tests(tmp_path)
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as stopped:
            try:
                assert stopped.stdout is not None
                assert stopped.stdout.readline() == b"half\n"
                time.sleep(0.2)
                begin = time.monotonic()
                _save_and_find(Address.parse(address))
                assert time.monotonic() < begin + 3.0
                # Its lease ends, and what it had claimed goes.
                until(lambda: not any(one.run == "stopped" for one in node.status().sessions))
            finally:
                stopped.send_signal(signal.SIGCONT)
                stopped.kill()


def _save_and_find(address: Address) -> None:
    with (
        Attacker(address, "scheduler", "good") as scheduler,
        Attacker(address, "worker", "good") as worker,
    ):
        claimed = scheduler.call(Claim(keys(1, 3))).message
        assert isinstance(claimed, Claimed)
        frame_bytes = worker.welcome.frame_bytes
        assert worker.bytes is not None
        worker.bytes.credits.add(3 * frame_bytes)  # the node gives more
        save = Save(claimed.slots, claimed.epochs, keys(1, 3), b"")
        answer = worker.tell(save, payload=[bytes(3 * frame_bytes)]).message
        assert isinstance(answer, Taken)
        assert answer.lost == b""
        found = scheduler.call(Lookup(keys(1, 3))).message
        assert isinstance(found, Slots)
        assert found.slots == claimed.slots
