"""Records of the journal and the header of its file: encoding and checking. No I/O.

Layout (little endian, ``docs/format.md``): a header of 128 bytes, then records of 72 bytes. Both
end with the xxh3-64 of the bytes before. Records are read by the native
:class:`~vllm_ssdkv._index.Replay`: the newest per slot, of those the ones that hold a key, of those
the newest per key. A lost ``DEL`` may leave a slot that has since been overwritten: its header then
names another epoch, and the reader refuses it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv._index import encode_records as native_encode_records
from vllm_ssdkv.base.checksum import checksum_bytes
from vllm_ssdkv.base.errors import FormatError
from vllm_ssdkv.store.format.fingerprint import DIGEST_BYTES
from vllm_ssdkv.store.format.slot_geometry import of_another_version

JOURNAL = "journal"
"""Name of the file, in the state directory."""


MAGIC = b"SSDKVJNL"
VERSION = 1
HEADER_BYTES = 128
RECORD_BYTES = 72
_SUM_BYTES = 8

# magic, version, header_bytes, record_bytes, reserved, store, fingerprint digest, reserved
_HEADER = struct.Struct("<8s3I4x16s16s64x")


class Kind(IntEnum):
    """Kind of a record."""

    PUT = 1
    """Record after which the slot holds the key, written in this epoch."""
    DEL = 2
    """Record after which nothing can be found in the slot."""


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
    if data[:HEADER_BYTES] != encode_header(store, fingerprint):
        raise FormatError("journal: bytes that are zero in this version are not")


def refuse_another_version(data: bytes, path: Path) -> None:
    """Refuse the first bytes of a journal file that is whole, and that another release made.

    Raises:
        FormatError: names the file, the versions and the way out.
    """
    if not is_whole(data):
        return
    magic, version, *_ = _HEADER.unpack_from(data)
    if magic == MAGIC and version != VERSION:
        raise of_another_version(path, str(version), str(VERSION))


def store_named(data: bytes) -> UUID | None:
    """The store that these first bytes of a journal file name, of whatever version; None: they are
    no header that is whole."""
    if not data.startswith(MAGIC) or not is_whole(data):
        return None
    _, _, _, _, owner, _ = _HEADER.unpack_from(data)
    return UUID(bytes=owner)


def is_whole(data: bytes) -> bool:
    """Check whether these first bytes of a journal file are a whole header, of any store."""
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
) -> bytes:
    """Sealed records with consecutive sequence numbers.

    Args:
        kind: Kind of all records.
        slots: Slot numbers, shape [n].
        epochs: Epochs, shape [n].
        keys: 32 bytes each for ``PUT``, None for ``DEL``.
        first_sequence: Sequence number of the first.

    Raises:
        ValueError: lengths differ, or a key has not 32 bytes.
    """
    listed = None if keys is None else list(keys)
    return native_encode_records(int(kind), slots, epochs, listed, first_sequence)
