"""Channels: what is sent arrives, whatever is wrong is refused, and every wait ends."""

from __future__ import annotations

import array
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kit.waiting import until
from tests.node.protocol.linked import KINDS, WAIT_S, Ends, channel_pair, linked, raw_and_channel
from vllm_ssdkv.base.errors import NodeError, NodeGoneError, NodeRefusedError, ProtocolError
from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.node.protocol.frames import DEFAULT_LIMITS, HELLO_LIMITS, Control, Flag, Header
from vllm_ssdkv.node.protocol.messages import Copied, Done, Lookup, Region, encode, kind_of


@pytest.fixture(params=KINDS)
def ends(request: pytest.FixtureRequest, tmp_path: Path, keys: Path) -> Iterator[Ends]:
    with linked(request.param, tmp_path, keys) as found:
        yield found


def in_thread(work: Callable[[], object]) -> Callable[[], object]:
    """Begin the work in a thread; the call returns what it returns, or raises what it raises."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(work())
        except NodeError as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def result() -> object:
        thread.join(WAIT_S)
        (value,) = results
        if isinstance(value, NodeError):
            raise value
        return value

    return result


def frame(message: Copied | Done | Region, sequence: int = 0, **fields: int) -> bytes:
    """Bytes of a frame as a channel sends it, with other fields in its header."""
    body = encode(message)
    header = Header(kind_of(message), sequence=sequence, body_bytes=len(body))
    return replace(header, **fields).pack() + body


# ---- what is sent arrives ----


def test_calls_and_answers(ends: Ends) -> None:
    ends.engine.send(Lookup(b"k" * 64), call_id=5, timeout=WAIT_S)
    got = ends.node.receive(WAIT_S)
    assert (got.message, got.call_id, got.is_answer) == (Lookup(b"k" * 64), 5, False)
    ends.node.send(Copied(3), call_id=5, answer=True, timeout=WAIT_S)
    got = ends.engine.receive(WAIT_S)
    assert (got.message, got.call_id, got.is_answer, got.error) == (Copied(3), 5, True, "")


def test_a_call_that_failed_leaves_the_connection(ends: Ends) -> None:
    ends.node.send_error(5, "no such store " + "ü" * 4000, timeout=WAIT_S)
    ends.node.send(Done(), timeout=WAIT_S)
    got = ends.engine.receive(WAIT_S)
    assert (got.message, got.call_id, got.is_answer) == (None, 5, True)
    assert got.error.startswith("no such store üü")
    assert ends.engine.receive(WAIT_S).message == Done()


@pytest.mark.parametrize("nbytes", [1, 4097, 5 * MIB])
def test_payload_goes_from_buffers_to_buffers(ends: Ends, nbytes: int) -> None:
    """In other pieces than it was sent in; more of them than one call of the system takes."""
    source = random.Random(nbytes)
    data = source.randbytes(nbytes)
    cuts = sorted(source.randrange(nbytes) for _ in range(700))
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, nbytes], strict=True)]
    into = bytearray(nbytes)
    view, middle = memoryview(into), nbytes // 3
    ends.node.grant(nbytes)
    # The credit is taken from the socket by whoever receives.
    reading = in_thread(lambda: ends.engine.receive(WAIT_S).message)
    sending = in_thread(lambda: ends.engine.send(Copied(1), pieces, timeout=WAIT_S))
    assert ends.node.receive(WAIT_S).payload_bytes == nbytes
    ends.node.receive_payload([view[:middle], view[middle:]], WAIT_S)
    sending()
    assert into == data
    ends.node.send(Done(), timeout=WAIT_S)
    assert reading() == Done()


def test_a_payload_may_be_discarded(ends: Ends) -> None:
    ends.node.grant(3 * MIB)
    reading = in_thread(lambda: ends.engine.receive(WAIT_S).message)

    def send() -> None:
        ends.engine.send(Copied(1), [bytes(3 * MIB)], timeout=WAIT_S)
        ends.engine.send(Copied(2), timeout=WAIT_S)

    sending = in_thread(send)
    ends.node.receive(WAIT_S)
    with pytest.raises(ValueError, match="were not received"):
        ends.node.receive(WAIT_S)
    with pytest.raises(ValueError, match="for a payload of 3145728"):
        ends.node.receive_payload([bytearray(5)], WAIT_S)
    ends.node.discard_payload(WAIT_S)
    assert ends.node.receive(WAIT_S).message == Copied(2)
    sending()
    ends.node.send(Done(), timeout=WAIT_S)
    reading()


def test_frames_of_several_threads_do_not_mix(ends: Ends) -> None:
    senders, each, nbytes = 4, 25, 50_000
    ends.node.grant(senders * each * nbytes)
    reading = in_thread(lambda: ends.engine.receive(WAIT_S).message)

    def send(number: int) -> None:
        for _ in range(each):
            ends.engine.send(
                Copied(number), [bytes([number]) * nbytes], call_id=number, timeout=WAIT_S
            )

    sending = [in_thread(lambda n=n: send(n)) for n in range(senders)]  # type: ignore[misc]
    for _ in range(senders * each):
        got = ends.node.receive(WAIT_S)
        into = bytearray(got.payload_bytes)
        ends.node.receive_payload([into], WAIT_S)
        assert got.message == Copied(got.call_id)
        assert into == bytes([got.call_id]) * nbytes
    for one in sending:
        one()
    ends.node.send(Done(), timeout=WAIT_S)
    reading()


def test_both_sides_may_send_all_the_time(ends: Ends) -> None:
    """More than the sockets hold, with credits that go back: neither waits for the other."""
    times, nbytes, sent = 40, MIB, threading.Barrier(2)

    def receive(channel_name: str) -> None:
        channel = getattr(ends, channel_name)
        into = bytearray(nbytes)
        for _ in range(times):
            channel.receive(WAIT_S)
            channel.receive_payload([into], WAIT_S)
            channel.grant(nbytes)
        assert channel.receive(WAIT_S).message == Done()

    def send(channel_name: str) -> None:
        channel = getattr(ends, channel_name)
        for _ in range(times):
            channel.send(Copied(1), [bytes(nbytes)], timeout=WAIT_S)
        # Until then both sides receive, and so take the other's credits.
        sent.wait(WAIT_S)
        channel.send(Done(), timeout=WAIT_S)

    for channel in (ends.engine, ends.node):
        channel.grant(2 * nbytes)
    work = [
        in_thread(lambda w=work, n=name: w(n))  # type: ignore[misc]
        for work in (receive, send)
        for name in ("engine", "node")
    ]
    for one in work:
        one()


def test_descriptors_go_through_a_unix_socket(tmp_path: Path) -> None:
    ours, theirs = channel_pair()
    file = (tmp_path / "file").open("w+b")
    file.write(b"content")
    file.flush()
    theirs.most_descriptors = 2
    ours.send(Copied(1), descriptors=[file.fileno(), file.fileno()], timeout=WAIT_S)
    ours.send(Copied(2), timeout=WAIT_S)
    got = theirs.receive(WAIT_S)
    assert [os.pread(descriptor, 7, 0) for descriptor in got.descriptors] == [b"content"] * 2
    assert not any(os.get_inheritable(descriptor) for descriptor in got.descriptors)
    assert theirs.receive(WAIT_S).descriptors == []
    for descriptor in got.descriptors:
        os.close(descriptor)
    file.close()
    ours.close()
    theirs.close()


# ---- every wait ends ----


def test_silence_ends_a_wait(ends: Ends) -> None:
    with pytest.raises(NodeGoneError, match="sent nothing until the deadline"):
        ends.engine.receive(0.05)
    # The other side learns of it at once.
    with pytest.raises(NodeGoneError):
        ends.node.receive(WAIT_S)


def test_heartbeats_end_silence_and_are_not_seen(ends: Ends) -> None:
    ends.node.silence_s = 2.5  # a machine may stand still for as long as 2 s
    ends.engine.start_heartbeat(0.05)
    waiting = in_thread(lambda: ends.node.receive(None).message)
    time.sleep(2.8)
    ends.engine.send(Done(), timeout=WAIT_S)
    assert waiting() == Done()


def test_a_peer_without_heartbeats_is_gone(ends: Ends) -> None:
    ends.node.silence_s = 0.05
    with pytest.raises(NodeGoneError, match="sent nothing"):
        ends.node.receive(None)


def test_a_wait_without_any_deadline_is_a_mistake(ends: Ends) -> None:
    with pytest.raises(ValueError, match="needs a deadline"):
        ends.node.receive(None)


def test_heartbeats_do_not_put_off_a_deadline(ends: Ends) -> None:
    ends.engine.start_heartbeat(0.02)
    begin = time.monotonic()
    with pytest.raises(NodeGoneError):
        ends.node.receive(0.3)
    assert time.monotonic() < begin + 5


@pytest.mark.parametrize("stall", ["deadline", "stall"])
def test_a_peer_that_takes_nothing_ends_a_send(ends: Ends, stall: str) -> None:
    ends.engine.credits.add(64 * MIB)
    if stall == "stall":
        ends.engine.stall_s = 0.1
    begin = time.monotonic()
    with pytest.raises(NodeGoneError, match="took nothing until the deadline"):
        ends.engine.send(Done(), [bytes(64 * MIB)], timeout=0.1 if stall == "deadline" else WAIT_S)
    assert time.monotonic() < begin + 5
    # A frame that ended in its middle has none behind it.
    with pytest.raises(NodeGoneError, match="has ended"):
        ends.engine.send(Done(), timeout=WAIT_S)


def test_a_frame_that_stops_in_its_middle_ends_the_wait() -> None:
    for length in (5, 32, 33):
        with raw_and_channel() as (raw, channel):
            channel.stall_s = 0.05
            raw.sendall(frame(Copied(5))[:length])
            with pytest.raises(NodeGoneError, match="sent nothing"):
                channel.receive(WAIT_S)


def test_a_body_that_drips_in_has_an_end() -> None:
    """A byte now and then keeps no thread for longer than the time for a body."""
    with raw_and_channel() as (raw, channel):
        channel.stall_s = 0.3
        raw.sendall(Header(22, body_bytes=10_000).pack())
        ended = threading.Event()

        def drip() -> None:
            while not ended.wait(0.02):
                raw.sendall(b"x")

        dripping = in_thread(drip)
        begin = time.monotonic()
        with pytest.raises(NodeGoneError):
            channel.receive(WAIT_S)
        assert time.monotonic() < begin + 5
        ended.set()
        dripping()


def test_no_credit_ends_a_send(ends: Ends) -> None:
    with pytest.raises(NodeGoneError, match="0 of 5 bytes"):
        ends.engine.send(Done(), [b"12345"], timeout=0.05)


def test_another_thread_may_end_every_wait(ends: Ends) -> None:
    ends.engine.credits.add(64 * MIB)
    waits = [
        in_thread(lambda: ends.engine.receive(WAIT_S)),
        in_thread(lambda: ends.engine.send(Done(), [bytes(64 * MIB)], timeout=WAIT_S)),
        in_thread(lambda: ends.engine.send(Done(), [bytes(128 * MIB)], timeout=WAIT_S)),
        in_thread(lambda: ends.engine.send(Done(), timeout=WAIT_S)),
    ]
    time.sleep(0.1)
    begin = time.monotonic()
    ends.engine.abort()
    for wait in waits:
        with pytest.raises(NodeGoneError):
            wait()
    assert time.monotonic() < begin + 5


def test_who_does_not_receive_may_see_that_the_peer_left(ends: Ends) -> None:
    """Though bytes of it are still to be received."""
    assert not ends.node.peer_left
    ends.engine.send(Done(), timeout=WAIT_S)
    assert not ends.node.peer_left
    ends.engine.close()
    until(lambda: ends.node.peer_left)


def test_an_end_is_told_from_a_refusal(ends: Ends) -> None:
    ends.node.close()
    with pytest.raises(NodeGoneError, match=r"ended the connection|is broken"):
        ends.engine.receive(WAIT_S)


def test_a_refusal_arrives_with_its_reason(ends: Ends) -> None:
    """However much the other side had sent, and this one not read."""
    for _ in range(20):
        ends.engine.send(Lookup(bytes(3200)), timeout=WAIT_S)
    refusing = in_thread(lambda: ends.node.refuse("this node is draining"))
    with pytest.raises(NodeRefusedError, match="refused the connection: this node is draining"):
        ends.engine.receive(WAIT_S)
    refusing()
    with pytest.raises(NodeGoneError):
        ends.node.send(Done(), timeout=WAIT_S)


# ---- whatever is wrong is refused ----


def refused(
    data: bytes, cause: str, match: str | None = None, *, agreed: bool = True, before: int = 0
) -> None:
    """Look for a refusal of the frame that comes after so many good ones."""
    with raw_and_channel(agreed=agreed) as (raw, channel):
        raw.sendall(data)
        for _ in range(before):
            channel.receive(WAIT_S)
        with pytest.raises(ProtocolError, match=match) as error:
            channel.receive(WAIT_S)
        assert error.value.cause == cause
        # The other side is told.
        refusing = in_thread(lambda: channel.refuse(str(error.value)))
        header = Header.unpack(raw.recv(32, socket.MSG_WAITALL))
        assert header.kind == Control.REFUSED
        assert raw.recv(header.body_bytes, socket.MSG_WAITALL).decode() == str(error.value)
        assert raw.recv(1) == b""
        raw.close()
        refusing()


def test_frames_that_are_refused() -> None:
    good = frame(Copied(5))
    refused(b"GET / HTTP/1.1\r\nHost: node\r\n\r\n      ", "magic", "begins with b'GET '")
    refused(good + good, "sequence", "frame 0 came where frame 1 was expected", before=1)
    refused(frame(Copied(5), 1), "sequence")
    refused(frame(Copied(5), version=2), "version", "2; 1 was agreed on")
    refused(frame(Copied(5), version=0), "version")
    refused(frame(Copied(5), kind=15), "kind")
    refused(frame(Copied(5), kind=999), "body", "no message has kind 999")
    refused(frame(Copied(5), kind=kind_of(Lookup(b""))), "body", "not a Lookup")
    refused(frame(Copied(5), flags=Flag.ERROR), "flags")
    refused(frame(Copied(5), descriptors=1), "files", "brings 1 descriptors; 0 may be")
    refused(frame(Copied(5), descriptors=5), "files", "announces 5")
    refused(frame(Copied(5), body_bytes=DEFAULT_LIMITS.body + 1), "size")
    refused(frame(Copied(5), payload_bytes=DEFAULT_LIMITS.payload + 1), "size")
    refused(frame(Copied(5), payload_bytes=1), "credit", "credit for 0")
    refused(frame(Copied(5), body_bytes=HELLO_LIMITS.body + 1), "size", agreed=False)
    refused(frame(Copied(5), payload_bytes=1), "size", agreed=False)


def test_more_payload_than_credit_is_refused() -> None:
    with raw_and_channel() as (raw, channel):
        channel.grant(10)
        raw.sendall(
            frame(Copied(1), payload_bytes=8) + bytes(8) + frame(Copied(1), 1, payload_bytes=3)
        )
        channel.receive(WAIT_S)
        channel.discard_payload(WAIT_S)
        with pytest.raises(ProtocolError, match="3 bytes came with credit for 2"):
            channel.receive(WAIT_S)


def descriptors_open() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("count", [1, 4, 9])
def test_descriptors_that_nobody_announced_are_closed(count: int) -> None:
    with raw_and_channel() as (raw, channel):
        channel.most_descriptors = 4
        before = descriptors_open()
        rights = array.array("i", [raw.fileno()] * count)
        raw.sendmsg([frame(Copied(5))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        with pytest.raises(ProtocolError) as error:
            channel.receive(WAIT_S)
        assert error.value.cause == "files"
        assert descriptors_open() == before


def test_announced_descriptors_that_do_not_come_are_missed() -> None:
    with raw_and_channel() as (raw, channel):
        channel.most_descriptors = 4
        raw.sendall(frame(Copied(5), descriptors=1))
        with pytest.raises(ProtocolError, match="with 0 descriptors and says 1"):
            channel.receive(WAIT_S)


@pytest.mark.parametrize("kind", [kind_of(Copied(5)), 999])
def test_descriptors_that_may_not_be_are_closed(kind: int) -> None:
    with raw_and_channel() as (raw, channel):
        before = descriptors_open()
        rights = array.array("i", [raw.fileno()])
        data = frame(Copied(5), kind=kind, descriptors=1)
        raw.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        with pytest.raises(ProtocolError, match="0 may be"):
            channel.receive(WAIT_S)
        assert descriptors_open() == before


def test_descriptors_beside_a_body_are_closed() -> None:
    with raw_and_channel() as (raw, channel):
        before = descriptors_open()
        data = frame(Copied(5))
        raw.sendall(data[:32])
        rights = array.array("i", [raw.fileno()])
        raw.sendmsg([data[32:]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        assert channel.receive(WAIT_S).message == Copied(5)
        assert descriptors_open() == before


def test_descriptors_of_a_refused_message_are_closed() -> None:
    with raw_and_channel() as (raw, channel):
        channel.most_descriptors = 4
        before = descriptors_open()
        rights = array.array("i", [raw.fileno()])
        raw.sendmsg(
            [frame(Copied(5), kind=999, descriptors=1)],
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)],
        )
        with pytest.raises(ProtocolError):
            channel.receive(WAIT_S)
        assert descriptors_open() == before


def test_nothing_is_left_of_a_channel(tmp_path: Path, keys: Path) -> None:
    for kind in KINDS:
        directory = tmp_path / kind
        directory.mkdir()
        before, threads = descriptors_open(), threading.active_count()
        with linked(kind, directory, keys) as ends:
            ends.engine.start_heartbeat(0.01)
            ends.node.grant(5)
            ends.engine.send(Done(), timeout=WAIT_S)
            ends.node.receive(WAIT_S)
            ends.engine.close()
            ends.engine.close()
        assert descriptors_open() == before
        assert threading.active_count() == threads
