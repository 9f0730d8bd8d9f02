"""Order of frames on a connection for attention."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.node.protocol.linked import WAIT_S, Ends, linked
from vllm_ssdkv.base.errors import ProtocolError
from vllm_ssdkv.node.client.attention import AttentionWire
from vllm_ssdkv.node.protocol.messages import Attend, Attended, AttendRoom, pack

ROOM = AttendRoom(1 << 16, 1 << 20)
LARGE = 4 << 20
"""Bytes of states: more than sockets hold."""


def answer(ends: Ends, call: int) -> None:
    states = bytes([call]) * LARGE
    ends.node.send(Attended(states, b"", b"", 0.0, 0.0), call_id=call, answer=True, timeout=WAIT_S)


Tell = Callable[[AttentionWire], object]


@pytest.mark.parametrize(
    "tell",
    [
        lambda wire: wire.send(Attend(0, 1.0, pack([1]), bytes(LARGE)), 5.0),
        lambda wire: wire.tell_row(0, 0, np.arange(1 << 16), 5.0),
        lambda wire: wire.tell_blocks(
            np.arange(1 << 9),
            np.zeros((1 << 9, 1 << 10), dtype=np.int64),
            np.zeros((1 << 9, 1 << 10), dtype=np.uint64),
            5.0,
        ),
        lambda wire: wire.forget(np.arange(1 << 16), [], 5.0),
    ],
    ids=["call", "row", "blocks", "forget"],
)
def test_answers_are_received_before_anything_is_sent(tell: Tell, tmp_path: Path) -> None:
    """The node answers all calls before it receives again, as its one thread does."""
    with linked("unix", tmp_path, tmp_path) as ends:
        wire = AttentionWire(ends.engine, ROOM)

        def serve() -> None:
            for call in (1, 2):
                assert isinstance(ends.node.receive(WAIT_S).message, Attend)
                answer(ends, call)
            ends.node.receive(WAIT_S)

        thread = threading.Thread(target=serve)
        thread.start()
        calls = [wire.send(Attend(0, 1.0, pack([1]), b""), 5.0) for _ in range(2)]
        tell(wire)
        for call in reversed(calls):
            assert wire.receive(call, time.monotonic() + 5.0).states == bytes([call]) * LARGE
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_an_answer_to_another_call_is_refused(tmp_path: Path) -> None:
    with linked("unix", tmp_path, tmp_path) as ends:
        wire = AttentionWire(ends.engine, ROOM)
        call = wire.send(Attend(0, 1.0, pack([1]), b""), 5.0)
        ends.node.send(
            Attended(b"", b"", b"", 0.0, 0.0), call_id=call + 1, answer=True, timeout=WAIT_S
        )
        with pytest.raises(ProtocolError, match="not an answer"):
            wire.receive(call, time.monotonic() + 5.0)
