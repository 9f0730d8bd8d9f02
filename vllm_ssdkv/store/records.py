"""Records of the journal and the header of its file: encoding, checking, replay. No I/O.

Layout (little endian, ``docs/format.md``): a header of 128 bytes, then records of 72 bytes. Both
end with the xxh3-64 of the bytes before.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.errors import FormatError
from vllm_ssdkv.store.checksum import checksum_bytes, checksum_pages
from vllm_ssdkv.store.fingerprint import DIGEST_BYTES
from vllm_ssdkv.store.header import KEY_BYTES

MAGIC = b"SSDKVJNL"
VERSION = 1
HEADER_BYTES = 128
RECORD_BYTES = 72
_SUM_BYTES = 8

# magic, version, header_bytes, record_bytes, reserved, store, fingerprint digest, reserved
_HEADER = struct.Struct("<8s3I4x16s16s64x")

RECORD = np.dtype(
    [
        ("kind", "<u4"),
        ("reserved", "<u4"),
        ("slot", "<u8"),
        ("epoch", "<u8"),
        ("sequence", "<u8"),
        ("key", np.uint8, (KEY_BYTES,)),
        ("checksum", "<u8"),
    ]
)
"""One record; ``key`` is zero in a ``DEL``."""

Records: TypeAlias = NDArray[np.void]
"""Array of :data:`RECORD`, shape [n]."""


class Kind(IntEnum):
    """What a record says."""

    PUT = 1
    """From now on the slot holds the key, written in this epoch."""
    DEL = 2
    """From now on the slot holds nothing that may be found."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What a journal says, newest record per slot and per key.

    Attributes:
        slots: Slots that hold a key, int64, shape [n], in the order of their records.
        epochs: Epoch of each, int64, shape [n].
        keys: Key of each, 32 bytes.
        corrupt: Records that failed their checksum, an incomplete last one included.
        newest_epoch: Highest epoch of any valid record, 0 when there is none.
        newest_sequence: Highest sequence of any valid record, 0 when there is none.
    """

    slots: NDArray[np.int64]
    epochs: NDArray[np.int64]
    keys: list[bytes]
    corrupt: int
    newest_epoch: int
    newest_sequence: int


def encode_header(store: UUID, fingerprint: bytes) -> bytes:
    """The file header, 128 bytes.

    Raises:
        ValueError: the fingerprint digest has another length than 16.
    """
    if len(fingerprint) != DIGEST_BYTES:
        raise ValueError(f"fingerprint digest of {len(fingerprint)} bytes")
    body = _HEADER.pack(MAGIC, VERSION, HEADER_BYTES, RECORD_BYTES, store.bytes, fingerprint)
    return body + checksum_bytes(body).to_bytes(_SUM_BYTES, "little")


def check_header(data: bytes, store: UUID, fingerprint: bytes) -> None:
    """Check the first bytes of a journal file.

    Raises:
        FormatError: the text names the field that is wrong.
    """
    if len(data) < HEADER_BYTES:
        raise FormatError(f"journal: header has {len(data)} bytes, expected {HEADER_BYTES}")
    magic, version, header_bytes, record_bytes, owner, digest = _HEADER.unpack_from(data)
    found_sum = int.from_bytes(data[_HEADER.size : HEADER_BYTES], "little")
    for field, found, expected in (
        ("magic", magic.hex(), MAGIC.hex()),
        ("version", version, VERSION),
        ("header_bytes", header_bytes, HEADER_BYTES),
        ("record_bytes", record_bytes, RECORD_BYTES),
        ("checksum", found_sum, checksum_bytes(data[: _HEADER.size])),
        ("store", UUID(bytes=owner), store),
        ("fingerprint", digest.hex(), fingerprint.hex()),
    ):
        if found != expected:
            raise FormatError(f"journal: {field} is {found}, expected {expected}")


def is_whole(data: bytes) -> bool:
    """Whether these first bytes of a journal file are a header as it was written, whoever's."""
    if len(data) < HEADER_BYTES:
        return False
    found = int.from_bytes(data[_HEADER.size : HEADER_BYTES], "little")
    return found == checksum_bytes(data[: _HEADER.size])


def encode_records(
    kind: Kind,
    slots: NDArray[np.int64],
    epochs: NDArray[np.int64],
    keys: Sequence[bytes] | None,
    first_sequence: int,
) -> Records:
    """Sealed records with consecutive sequence numbers.

    Args:
        kind: Kind of all records.
        slots: Slot numbers, shape [n].
        epochs: Epochs, shape [n].
        keys: 32 bytes each for ``PUT``, None for ``DEL``.
        first_sequence: Sequence number of the first.

    Raises:
        ValueError: the keys do not have 32 bytes each.
    """
    records: Records = np.zeros(slots.size, dtype=RECORD)
    records["kind"] = kind
    records["slot"] = slots
    records["epoch"] = epochs
    records["sequence"] = np.arange(slots.size, dtype=np.uint64) + np.uint64(first_sequence)
    if keys is not None:
        joined = np.frombuffer(b"".join(keys), dtype=np.uint8)
        records["key"] = joined.reshape(slots.size, KEY_BYTES)
    records["checksum"] = _checksums(records)
    return records


def _checksums(records: Records) -> NDArray[np.uint64]:
    first = np.uint64(records.ctypes.data)
    at = first + np.arange(records.size, dtype=np.uint64) * np.uint64(RECORD_BYTES)
    return checksum_pages(at, RECORD_BYTES - _SUM_BYTES)


def replay(data: bytes | bytearray | memoryview) -> Replay:
    """Read everything after the file header. Bad records are skipped and counted, never raised.

    A record is 72 bytes from a multiple of 72, so that one bad record costs no other. A lost
    ``DEL`` may leave a slot that has since been overwritten: its header then names another epoch,
    and the reader refuses it.
    """
    whole = len(data) // RECORD_BYTES
    records: Records = np.zeros(whole, dtype=RECORD)
    if whole:  # a copy, since what is returned must not depend on the caller's buffer
        records[:] = np.frombuffer(data, dtype=RECORD, count=whole)
    good = _checksums(records) == records["checksum"]
    good &= np.isin(records["kind"], [int(k) for k in Kind])
    # Both are signed 64-bit in memory; nothing that we write exceeds it.
    limit = np.uint64(2**63)
    good &= (records["slot"] < limit) & (records["epoch"] < limit)
    corrupt = whole - int(good.sum()) + int(len(data) % RECORD_BYTES > 0)
    records = records[good]
    records = records[np.argsort(records["sequence"], kind="stable")]
    newest_epoch = int(records["epoch"].max(initial=0))
    newest_sequence = int(records["sequence"].max(initial=0))
    live = _newest_by(records, records["slot"])
    live = live[live["kind"] == Kind.PUT]
    live = _newest_by(live, np.ascontiguousarray(live["key"]).view(f"V{KEY_BYTES}").reshape(-1))
    raw = live["key"].tobytes()
    return Replay(
        slots=live["slot"].astype(np.int64),
        epochs=live["epoch"].astype(np.int64),
        keys=[raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)],
        corrupt=corrupt,
        newest_epoch=newest_epoch,
        newest_sequence=newest_sequence,
    )


def _newest_by(records: Records, values: NDArray[np.generic]) -> Records:
    """Of records in order of sequence, the last of each value; the order is kept."""
    _, from_end = np.unique(values[::-1], return_index=True)
    newest: Records = records[np.sort(records.size - 1 - from_end)]
    return newest
