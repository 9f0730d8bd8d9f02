"""Frames on the wire: a header of 32 bytes, a body, a payload.

Little-endian. The body is MessagePack of one message, the payload raw bytes. One connection
carries one sequence of frames in each direction.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Final

from vllm_ssdkv.base.errors import ProtocolError

MAGIC = b"SKVN"
VERSIONS = range(1, 2)
"""Versions of the protocol that this package speaks."""

HEADER = struct.Struct("<4sHHHHIQII")
"""Magic, version, kind, flags, descriptors, sequence, call id, bytes of body, of payload."""

_TLS_RECORDS = {b"\x15\x03", b"\x16\x03"}
"""Beginnings of what TLS says first: an alert, or its hello."""

HEADER_BYTES = HEADER.size
MOST_DESCRIPTORS = 4
"""File descriptors of one frame."""


class Flag:
    """Flags of a frame; other bits are refused. Plain numbers: those of ``enum`` cost as much as
    the rest of a header.

    Attributes:
        ANSWER: Answers the call of the same id.
        ERROR: This answer is a refusal of that call alone; its body is the reason.
    """

    NONE: Final = 0
    ANSWER: Final = 1
    ERROR: Final = 2


_KNOWN_FLAGS = Flag.ANSWER | Flag.ERROR


class Control(enum.IntEnum):
    """Kinds of frames that channels send themselves; kinds of messages begin at 16.

    Attributes:
        HEARTBEAT: Nothing; says that the sender is alive.
        CREDIT: The receiver has room for so many more bytes of payload; the call id is the number.
        REFUSED: The sender ends the connection; the body is the reason in UTF-8.
    """

    HEARTBEAT = 1
    CREDIT = 2
    REFUSED = 3


FIRST_MESSAGE_KIND = 16


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """Largest frames that a side takes, in bytes."""

    body: int
    payload: int


HELLO_LIMITS = FrameLimits(body=64 << 10, payload=0)
"""Limits of frames until both sides have said hello."""

DEFAULT_LIMITS = FrameLimits(body=16 << 20, payload=1 << 30)


@dataclass(slots=True)
class Header:
    """Header of one frame.

    Example:
        >>> Header.unpack(Header(kind=16, body_bytes=3).pack()).body_bytes
        3

    Attributes:
        sequence: Frames that the sender sent before on this connection, modulo 2**32.
        call_id: Names a call and its answer; 0 where none is expected.
    """

    kind: int
    version: int = VERSIONS[-1]
    flags: int = 0
    descriptors: int = 0
    sequence: int = 0
    call_id: int = 0
    body_bytes: int = 0
    payload_bytes: int = 0

    def pack(self) -> bytes:
        """Bytes of the header, :data:`HEADER_BYTES` long."""
        return HEADER.pack(
            MAGIC,
            self.version,
            self.kind,
            self.flags,
            self.descriptors,
            self.sequence,
            self.call_id,
            self.body_bytes,
            self.payload_bytes,
        )

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> Header:
        """Header in ``data``, exactly :data:`HEADER_BYTES` long; only magic and flags are checked.

        Raises:
            ProtocolError: these are no bytes of a header.
        """
        magic, version, kind, flags, descriptors, *numbers = HEADER.unpack(data)
        if magic[:2] in _TLS_RECORDS:
            raise ProtocolError(
                "magic", "the other side has keys and speaks TLS; this one has none"
            )
        if magic != MAGIC:
            raise ProtocolError("magic", f"a frame begins with {magic!r}, not with {MAGIC!r}")
        if flags & ~_KNOWN_FLAGS or (flags & Flag.ERROR and not flags & Flag.ANSWER):
            raise ProtocolError("flags", f"a frame has flags {flags:#x}, which mean nothing")
        return cls(kind, version, flags, descriptors, *numbers)

    def check(self, limits: FrameLimits, sequence: int) -> None:
        """Check sizes, kind and place in the sequence.

        Raises:
            ProtocolError: the frame is larger than ``limits``, replayed, or out of order.
        """
        if self.sequence != sequence:
            raise ProtocolError(
                "sequence", f"frame {self.sequence} came where frame {sequence} was expected"
            )
        if self.body_bytes > limits.body or self.payload_bytes > limits.payload:
            raise ProtocolError(
                "size",
                f"a frame has {self.body_bytes} bytes of body and {self.payload_bytes} of "
                f"payload; {limits.body} and {limits.payload} are the most here",
            )
        if self.descriptors > MOST_DESCRIPTORS:
            raise ProtocolError("files", f"a frame announces {self.descriptors} descriptors")
        if self.kind < FIRST_MESSAGE_KIND:
            self._check_control()

    def _check_control(self) -> None:
        plain = self.payload_bytes == self.descriptors == self.flags == 0
        if self.kind == Control.REFUSED and plain and self.body_bytes <= MOST_REASON_BYTES:
            return
        known = {Control.HEARTBEAT, Control.CREDIT}
        if not (self.kind in known and plain and self.body_bytes == 0):
            raise ProtocolError("kind", f"a frame of kind {self.kind} is malformed or unknown")


MOST_REASON_BYTES = 2048
"""Bytes of the text of a refusal."""


def negotiate(ours: range, lowest: int, highest: int) -> int:
    """Newest version that both sides speak.

    Raises:
        ProtocolError: there is none; the text names the versions of both.
    """
    version = min(ours[-1], highest)
    if version < max(ours[0], lowest):
        raise ProtocolError(
            "version",
            f"the other side speaks versions {lowest} to {highest} of the protocol, this one "
            f"{ours[0]} to {ours[-1]}; install releases of vllm-ssdkv that overlap",
        )
    return version
