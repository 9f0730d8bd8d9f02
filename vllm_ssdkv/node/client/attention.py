"""Calls of a worker to one node that attends to contexts: the client's end of the connection."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import NodeError, NodeRefusedError, ProtocolError
from vllm_ssdkv.node.client.session import Session
from vllm_ssdkv.node.protocol.channel import Channel
from vllm_ssdkv.node.protocol.messages import (
    MAX_ENTRIES,
    Attend,
    Attended,
    AttendRoom,
    AttendShape,
    Forget,
    TellBlocks,
    TellRow,
    pack,
)

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

_TOLD_BYTES: Final = 4 << 20
"""Places in one message, at most."""


class AttentionWire:
    """One connection for attention. One thread at a time; any thread may call :meth:`abort`.

    Answers come in the order of the calls, and may be taken in another one. A node reads nothing
    while it sends: what comes for calls that went before is received first, whatever is sent.

    Example:
        wire = AttentionWire.open(session, shape, timeout=3.0)
        call = wire.send(Attend(0, 0.1, pack([1]), query), timeout=3.0)
        answer = wire.receive(call, deadline)
    """

    def __init__(self, channel: Channel, room: AttendRoom):
        """``channel``: after the hellos; it is closed with this. ``room``: of the node."""
        self._channel, self.room = channel, room
        self._number = self._came = 0
        self._waiting: dict[int, Attended] = {}
        self._over = False

    @classmethod
    def open(cls, session: Session, shape: AttendShape, timeout: float) -> AttentionWire:
        """Connect, and tell the shape.

        Raises:
            NodeError: the node does not answer, or refuses; the text has its reason.
        """
        channel = session.open_attention(timeout)
        try:
            channel.send(shape, call_id=1, timeout=timeout)
            frame = channel.receive(timeout)
            if frame.message is None:
                raise NodeRefusedError(f"{channel.peer}: {frame.error}")
            if not isinstance(frame.message, AttendRoom):
                raise ProtocolError("answer", f"{channel.peer} answered a shape with another thing")
        except NodeError:
            channel.close()
            raise
        return cls(channel, frame.message)

    @property
    def over(self) -> bool:
        """Check whether it has ended. For the thread that uses it, while no call is under way."""
        return self._over or self._channel.peer_left

    def tell_blocks(self, slots: I64, places: I64, digests: U64, timeout: float) -> None:
        """Tell where pages of blocks lie, both [n, pages]. See :class:`TellBlocks`.

        Raises:
            NodeError: the connection is over.
        """
        self._take_answers(timeout)
        most = max(1, min(MAX_ENTRIES, _TOLD_BYTES // (8 * max(1, places.shape[1]))))
        for first in range(0, len(slots), most):
            part = slice(first, first + most)
            message = TellBlocks(
                pack(slots[part]),
                places[part].astype("<i8", copy=False).tobytes(),
                digests[part].astype("<u8", copy=False).tobytes(),
            )
            self._channel.send(message, timeout=timeout)

    def tell_row(self, row: int, keep: int, slots: I64, timeout: float) -> None:
        """Tell blocks of a row behind its first ``keep``. See :class:`TellRow`.

        Raises:
            NodeError: the connection is over.
        """
        self._take_answers(timeout)
        for first in range(0, max(1, len(slots)), MAX_ENTRIES):
            part = slots[first : first + MAX_ENTRIES]
            self._channel.send(TellRow(row, keep + first, pack(part)), timeout=timeout)

    def forget(self, slots: I64, rows: Sequence[int], timeout: float) -> None:
        """Slots get other bytes, rows are no more.

        Raises:
            NodeError: the connection is over.
        """
        self._take_answers(timeout)
        for first in range(0, max(1, len(slots)), MAX_ENTRIES):
            part = slots[first : first + MAX_ENTRIES]
            self._channel.send(Forget(pack(part), pack(rows if not first else [])), timeout=timeout)

    def send(self, message: Attend, timeout: float) -> int:
        """Call; returns the number of the call.

        Raises:
            NodeError: the connection is over.
        """
        self._take_answers(timeout)
        self._number += 1
        self._channel.send(message, call_id=self._number, timeout=timeout)
        return self._number

    def receive(self, call: int, deadline: float) -> Attended:
        """Answer to a call.

        Args:
            call: Its number.
            deadline: Of ``time.monotonic``.

        Raises:
            NodeError: it did not come in time, or the connection is over.
        """
        if call not in self._waiting and not self._came < call <= self._number:
            raise ValueError(f"the answer to call {call} was taken, or nobody has called")
        while call not in self._waiting:
            self._take_answer(deadline)
        return self._waiting.pop(call)

    def _take_answers(self, timeout: float) -> None:
        """Have the answers to all calls here, so that the node is ready to receive."""
        deadline = time.monotonic() + timeout
        while self._came < self._number:
            self._take_answer(deadline)

    def _take_answer(self, deadline: float) -> None:
        frame = self._channel.receive(max(0.001, deadline - time.monotonic()))
        message, next_call = frame.message, self._came + 1
        is_ours = frame.is_answer and frame.call_id == next_call and not frame.payload_bytes
        if not isinstance(message, Attended) or not is_ours:
            raise ProtocolError("answer", f"{self._channel.peer}: {frame.error or 'not an answer'}")
        self._waiting[next_call] = message
        self._came = next_call

    def abort(self) -> None:
        """End it; who waits in it gets a NodeGoneError."""
        self._over = True
        self._channel.abort()

    def close(self) -> None:
        """End it, and give the socket back. No other thread uses it."""
        self._over = True
        self._channel.close()
