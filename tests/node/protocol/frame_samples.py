"""One frame of each message, and changes of them as whoever attacks a node would make them."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.mutation import INTERESTING, mutated
from vllm_ssdkv.node.protocol.frames import HEADER_BYTES, Control, Flag, Header
from vllm_ssdkv.node.protocol.messages import (
    KINDS,
    Arrived,
    AskDrives,
    AskGauges,
    AskStatus,
    AskVolumes,
    Attend,
    Attended,
    AttendRoom,
    AttendShape,
    Bind,
    Bound,
    Claim,
    Claimed,
    Copied,
    Discard,
    Done,
    Drive,
    Drives,
    Drop,
    Find,
    Forget,
    ForgetAll,
    Gauges,
    GoOn,
    Grant,
    Hello,
    Last,
    Leave,
    Load,
    LoadEnded,
    Lookup,
    Message,
    MoveBytes,
    Moved,
    OpenVolumes,
    Pin,
    Position,
    Publish,
    Region,
    RemoveVolume,
    Save,
    SessionStatus,
    Slots,
    Status,
    StoreSpec,
    StoreStatus,
    Taken,
    TellBlocks,
    TellRow,
    TellWeights,
    Touch,
    Unpin,
    Volumes,
    VolumesOpened,
    VolumeStatus,
    Welcome,
    WriteFailed,
    Written,
    encode,
    kind_of,
    pack,
)

KEYS = bytes(range(32)) * 3
NUMBERS = pack([0, 1, 2])
SPEC = StoreSpec({"model": "a/model", "heads": 2, "dtype": "bfloat16"}, 2, 4096, 1, 16, "a/m", "")
SAMPLES: list[Message] = [
    Hello(1, 1, "worker", "calls", "run", 0, SPEC, b""),
    Hello(1, 1, "scheduler", "calls", "run", 0, SPEC, b""),
    Hello(1, 1, "status", "calls", "run"),
    Welcome(1, b"session", b"node", 5.0, 1.0, 100),
    Done(),
    Bind(1.0),
    Bound([b"digest", b"another"]),
    Lookup(KEYS),
    Lookup(KEYS, 7),
    Lookup(KEYS, 7, take_over=True),
    Leave(7),
    Find(KEYS),
    GoOn(7),
    Slots(NUMBERS, NUMBERS),
    Slots(NUMBERS, NUMBERS, 2),
    Last(KEYS, 0, 3, [0, 1]),
    Position(2),
    Claim(KEYS),
    Claimed(NUMBERS, NUMBERS),
    Grant(3),
    Publish(NUMBERS, NUMBERS, KEYS),
    Touch(KEYS),
    Pin(NUMBERS, NUMBERS),
    Unpin(NUMBERS, NUMBERS),
    Drop(NUMBERS, NUMBERS, "bad"),
    ForgetAll(),
    AskGauges(),
    Gauges({"free": 3}, {"hits": 4}),
    TellWeights(b"digest"),
    Region(8192),
    Save(NUMBERS, NUMBERS, KEYS, NUMBERS),
    Save(NUMBERS, NUMBERS, KEYS, b"", bound=False),
    Taken(NUMBERS),
    Written(NUMBERS, NUMBERS),
    WriteFailed(NUMBERS, NUMBERS),
    Discard(NUMBERS, NUMBERS),
    Load("request", NUMBERS, NUMBERS, KEYS, NUMBERS, 3),
    Arrived(0, NUMBERS, NUMBERS),
    Copied(0),
    LoadEnded(True, b"", b"", tokens_from_dram=48),
    AskStatus(),
    Status(
        "1.0",
        1,
        5.0,
        False,
        [StoreStatus("a/m", "/ssd", 1, 16, 9, 8, 7, 6, 5, 4)],
        [SessionStatus("tcp://x:1", "worker", "run", 0, "a/m", 3.0, 2, 1)],
    ),
    Hello(1, 1, "volume", "calls", "run"),
    AskDrives("a/m"),
    Drives([Drive(b"n" * 16, "/ssd", 1 << 30)]),
    AskVolumes([b"n" * 16]),
    Volumes([VolumeStatus(b"n" * 16, "/ssd", "a/m", 1 << 30, True, 0.0)]),
    OpenVolumes([b"n" * 16, None], [1 << 30, 0], "a/m", 10.0),
    VolumesOpened(1 << 24, 3 << 40),
    MoveBytes(0, False, pack([0, 4096]), pack([4096, 4096])),
    Moved(pack([4096, -5])),
    RemoveVolume(b"n" * 16),
    AttendShape(2, 2, 1, 16, 4, 64, "float32", 100),
    TellBlocks(NUMBERS, b"", b""),
    TellRow(0, 0, NUMBERS),
    Forget(NUMBERS, b""),
    Attend(0, 1.0, NUMBERS, b"q"),
    Attended(b"s", NUMBERS, NUMBERS, 0.0, 0.0),
    AttendRoom(100, 1000),
]
"""Of each kind at least one; ``test_fuzz`` holds it to that."""


def framed(
    message: Message, sequence: int, *, call_id: int = 0, payload: bytes = b"", flags: int = 0
) -> bytes:
    """Bytes of a frame as a channel sends it."""
    body = encode(message)
    header = Header(
        kind_of(message),
        flags=flags,
        sequence=sequence,
        call_id=call_id,
        body_bytes=len(body),
        payload_bytes=len(payload),
    )
    return header.pack() + body + payload


def hostile_session(source: random.Random, sequence: int = 0) -> bytes:
    """Up to ten frames in some order, whole or changed; their sequence is right more often than
    not, so that what comes behind it is reached."""
    out = bytearray()
    for number in range(sequence, sequence + source.randint(1, 10)):
        out += _hostile_frame(source, number)
    if source.random() < 0.2:
        out = bytearray(mutated(bytes(out), source, bytes(out)))
    return bytes(out)


def _hostile_frame(source: random.Random, sequence: int) -> bytes:
    if source.random() < 0.05:
        return Header(source.choice(list(Control)), sequence=sequence).pack()
    message = source.choice(SAMPLES)
    body, payload = encode(message), b""
    header = Header(kind_of(message), sequence=sequence, call_id=source.randrange(5))
    if source.random() < 0.5:
        body = mutated(body, source, encode(source.choice(SAMPLES)))
    if source.random() < 0.1:
        payload = source.randbytes(source.randrange(200))
    header = replace(header, body_bytes=len(body), payload_bytes=len(payload))
    match source.randrange(12):
        case 0:
            header = replace(header, kind=source.choice([*KINDS, 0, 15, 19, 65535]))
        case 1:
            header = replace(header, call_id=source.choice(INTERESTING))
        case 2:
            header = replace(header, body_bytes=source.choice(INTERESTING) % 2**32)
        case 3:
            header = replace(header, payload_bytes=source.choice(INTERESTING) % 2**32)
        case 4:
            header = replace(header, flags=source.choice([Flag.ANSWER, Flag.ANSWER | Flag.ERROR]))
        case 5:
            header = replace(header, sequence=(sequence + source.choice([-1, 1, 9])) % 2**32)
        case 6:
            header = replace(header, version=source.randrange(4))
        case 7:
            header = replace(header, descriptors=source.randrange(6))
    packed = header.pack()
    if source.random() < 0.05:
        packed = mutated(packed, source, packed)[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")
    return packed + body + payload
