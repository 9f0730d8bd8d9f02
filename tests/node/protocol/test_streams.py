"""Frames through a stream that moves as few bytes at once as it likes."""

from __future__ import annotations

import random
import select
import threading
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.node.protocol.linked import WAIT_S
from vllm_ssdkv.node.protocol.channel import Channel
from vllm_ssdkv.node.protocol.frames import DEFAULT_LIMITS
from vllm_ssdkv.node.protocol.messages import Copied, Done, Lookup, Message
from vllm_ssdkv.node.protocol.streams import WouldBlockError


class Pipe:
    """Bytes that both ends of a trickle share: what one sent and the other did not receive."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.changed = threading.Condition()


class Trickle:
    """A stream in memory that moves a few bytes at once, and often none."""

    def __init__(self, out: Pipe, into: Pipe, source: random.Random) -> None:
        self._out = out
        self._into = into
        self._source = source

    def send(self, views: Sequence[memoryview], descriptors: Sequence[int]) -> int:
        if self._source.random() < 0.3:
            raise WouldBlockError(select.POLLOUT)
        data = b"".join(bytes(view) for view in views)[: self._source.randint(1, 40)]
        with self._out.changed:
            self._out.data += data
            self._out.changed.notify_all()
        return len(data)

    def receive(self, into: memoryview) -> int:
        with self._into.changed:
            count = min(len(into), len(self._into.data), self._source.randint(1, 40))
            if count == 0 or self._source.random() < 0.3:
                raise WouldBlockError(select.POLLIN)
            into[:count] = self._into.data[:count]
            del self._into.data[:count]
            return count

    def receive_first(self, into: memoryview) -> tuple[int, list[int]]:
        return self.receive(into), []

    def wait(self, blocked: WouldBlockError, *, sending: bool, deadline: float) -> None:
        if not sending:
            with self._into.changed:
                self._into.changed.wait_for(lambda: len(self._into.data) > 0, WAIT_S)

    def peer_left(self) -> bool:
        return False

    def shutdown_sending(self) -> None:
        """Nothing is there to end."""

    def abort(self) -> None:
        """Nothing is there to end."""

    def close(self) -> None:
        """Nothing is there to close."""


MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.just(Done()),
    st.builds(Copied, st.integers(0, 2**62)),
    st.builds(Lookup, st.binary(max_size=20).map(lambda data: data * 32)),
)
SENT = st.lists(st.tuples(MESSAGES, st.lists(st.binary(max_size=60), max_size=5)), max_size=8)


@given(SENT, st.integers(0, 2**32))
@settings(deadline=None)
def test_frames_arrive_whole_however_their_bytes_come(
    sent: list[tuple[Message, list[bytes]]], seed: int
) -> None:
    there, back = Pipe(), Pipe()
    sender = Channel(Trickle(there, back, random.Random(seed)), "a test", is_unix=False)
    receiver = Channel(Trickle(back, there, random.Random(seed + 1)), "a test", is_unix=False)
    for channel in (sender, receiver):
        channel.agree(1, DEFAULT_LIMITS)
    receiver.grant(1 << 20)
    sender.credits.add(1 << 20)

    def send() -> None:
        for number, (message, payload) in enumerate(sent):
            sender.send(message, payload, call_id=number, timeout=WAIT_S)

    thread = threading.Thread(target=send)
    thread.start()
    for number, (message, payload) in enumerate(sent):
        frame = receiver.receive(WAIT_S)
        assert (frame.message, frame.call_id) == (message, number)
        into = bytearray(frame.payload_bytes)
        receiver.receive_payload([into], WAIT_S)
        assert into == b"".join(payload)
    thread.join(WAIT_S)
    assert not there.data
    for channel in (sender, receiver):
        channel.close()
