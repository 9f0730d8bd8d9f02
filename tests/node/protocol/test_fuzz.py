"""Hostile bytes for a channel and for messages: refused with a reason, or read as they mean."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
import tracemalloc
from collections.abc import Iterator

import pytest

from tests.mutation import mutated
from tests.node.protocol.frame_samples import SAMPLES, framed, hostile_session
from tests.node.protocol.linked import raw_and_channel
from vllm_ssdkv.base.errors import NodeError, ProtocolError
from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.node.protocol.channel import Channel
from vllm_ssdkv.node.protocol.messages import (
    KINDS,
    Lookup,
    decode,
    encode,
    kind_of,
    unpack,
    unpack_keys,
)

CAUSES = {"magic", "flags", "version", "sequence", "size", "files", "kind", "credit", "body"}
SOAKED = "SSDKV_SOAK_NODE_S" in os.environ


def sources(seconds: float, least: int) -> Iterator[random.Random]:
    """Sources of inputs until the time is over: the same in every short run."""
    first = random.randrange(1 << 32) if SOAKED else 1
    end = time.monotonic() + seconds
    number = 0
    while number < least or time.monotonic() < end:
        yield random.Random(f"{first} {number}")
        number += 1


def test_every_message_has_a_sample_that_is_read_as_it_was_written() -> None:
    assert {kind_of(message) for message in SAMPLES} == set(KINDS)
    for message in SAMPLES:
        assert decode(kind_of(message), encode(message)) == message


@pytest.mark.rounds
@pytest.mark.timeout(7200)
def test_bodies(node_seconds: float) -> None:
    refused = taken = 0
    for source in sources(node_seconds, 500):
        message = source.choice(SAMPLES)
        body = mutated(encode(message), source, encode(source.choice(SAMPLES)))
        try:
            read = decode(kind_of(message), body)
        except ValueError:
            refused += 1
            continue
        taken += 1
        assert decode(kind_of(read), encode(read)) == read
        if isinstance(read, Lookup) and len(read.keys) % 32 == 0:
            assert b"".join(unpack_keys(read.keys)) == read.keys
    assert refused > 50
    assert taken > 50


@pytest.mark.parametrize("depth", [100, 5000])
def test_nested_bodies_are_refused(depth: int) -> None:
    for opening in (b"\x91", b"\x81\xa1a", b"\xdd\0\0\0\1"):
        for kind in KINDS:
            with pytest.raises(ValueError, match="not a"):
                decode(kind, opening * depth + b"\xc0")


def test_lengths_that_lie_cost_nothing() -> None:
    """A list, a text or bytes of 4 GiB are announced and do not come."""
    tracemalloc.start()
    for prefix in (b"\xdd", b"\xdb", b"\xc6", b"\xdf", b"\x91\xdd", b"\x91\xc6", b"\x91\xdf"):
        for kind in KINDS:
            with pytest.raises(ValueError, match="not a"):
                decode(kind, prefix + b"\xff\xff\xff\xff")
    assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    tracemalloc.stop()


def test_arrays_of_broken_length_are_refused() -> None:
    for length in (1, 7, 9, 31):
        with pytest.raises(ValueError, match="size must be a multiple"):
            unpack(bytes(length))
        with pytest.raises(ValueError, match="are no keys"):
            unpack_keys(bytes(length))


def received(channel: Channel) -> tuple[NodeError, int]:
    """Error that ended a channel, and how many messages came before."""
    for count in itertools.count():
        try:
            frame = channel.receive(5.0)
            assert frame.message is not None or frame.error
            channel.discard_payload(5.0)
        except NodeError as error:
            return error, count
    raise AssertionError


@pytest.mark.rounds
@pytest.mark.timeout(7200)
def test_frames(node_seconds: float) -> None:
    """Streams of frames, after which the other side ends: each channel ends, with an error of
    ours, and leaves no descriptor and no thread."""
    causes: set[str] = set()
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    read = 0
    for source in sources(node_seconds, 300):
        data = hostile_session(source)
        with raw_and_channel(agreed=source.random() < 0.8) as (raw, channel):
            channel.grant(source.choice([0, 100, 10_000]))
            raw.sendall(data)
            raw.shutdown(1)
            end, count = received(channel)
            read += count
            if isinstance(end, ProtocolError):
                causes.add(end.cause)
            assert "until the deadline" not in str(end), data
    assert causes == CAUSES
    assert read > 100
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert threading.active_count() == threads


def test_an_announced_payload_takes_no_memory() -> None:
    with raw_and_channel() as (raw, channel):
        channel.grant(1 << 30)
        tracemalloc.start()
        raw.sendall(framed(Lookup(b""), 0, payload=b"")[:28] + (1 << 30).to_bytes(4, "little"))
        raw.sendall(encode(Lookup(b"")))
        assert channel.receive(5.0).payload_bytes == 1 << 30
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
        tracemalloc.stop()
