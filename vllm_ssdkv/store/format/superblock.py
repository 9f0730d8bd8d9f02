"""The superblock: whose data file this is, and what the slots in it look like.

One block of 4096 bytes, stored twice (:data:`COPY_OFFSETS`). An update goes to the copy that the
epoch's parity selects, so that a torn write leaves the other copy valid. Bytes: ``docs/format.md``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final, Literal
from uuid import UUID

from vllm_ssdkv.base.checksum import checksum_bytes
from vllm_ssdkv.base.errors import FingerprintMismatchError, FormatError
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.format.slot_geometry import (
    GIVEN_UNITS,
    PAGE_RECORDS,
    SUPERBLOCK_BYTES,
    SlotGeometry,
    format_version,
)

KEY_ID_BYTES: Final = 16


MAGIC = b"SSDKVSUP"
BLOCK_BYTES = 4096
COPY_OFFSETS = (0, SUPERBLOCK_BYTES // 2)
_KINDS: tuple[Literal["opaque"], Literal["paged"]] = ("opaque", "paged")
_CIPHERS = (False, True)
"""True if slots are encrypted, with AES-256-GCM."""

# magic, version, block_bytes, store, device, rank, channel_pages, scaled_from, record, epoch, kind,
# layers, heads, groups, payload_bytes, unit_bytes, fingerprint digest, JSON length, cipher,
# key id, summary_pages; then the fingerprint's text, and from version 7 on _UNITS
_FIXED = struct.Struct("<8s2I16s16s4IQ4IQI16sII16sI")
_UNITS = struct.Struct("<I")
_TAIL = struct.Struct("<Q")
_BODY = BLOCK_BYTES - _TAIL.size
_STORE = slice(16, 32)
"""Bytes of the store's UUID in every version."""


def _given_units(block: bytes, version: int, at: int) -> int:
    """Number of units behind the fingerprint's text; 0 where the version has none."""
    if version != GIVEN_UNITS or at + _UNITS.size > _BODY:
        return 0
    return int(_UNITS.unpack_from(block, at)[0])


def _check_head(head: Sequence[object], expected: Sequence[object]) -> None:
    """Check what every version has: magic, version, block_bytes, checksum. Raises FormatError."""
    names = ("magic", "version", "block_bytes", "checksum")
    for name, found, wanted in zip(names, head, expected, strict=True):
        if found != wanted:
            cure = ""
            if name == "version" and head[-1] == expected[-1]:
                cure = ": another release made it; use that one, or another directory"
            raise FormatError(f"superblock: {name} is {found!r}, expected {wanted!r}{cure}")


def _decode_fingerprint(block: bytes, digest: bytes, text_bytes: int) -> Fingerprint:
    """The text behind the fixed fields. Raises FormatError."""
    if _FIXED.size + text_bytes > _BODY:
        raise FormatError(f"superblock: text_bytes is {text_bytes}, too large")
    fingerprint = Fingerprint.from_json(block[_FIXED.size : _FIXED.size + text_bytes])
    if fingerprint.digest != digest:
        raise FormatError("superblock: fingerprint digest is not that of its fields")
    if len(fingerprint.canonical) != text_bytes:
        raise FormatError("superblock: fingerprint text is not written as we write it")
    return fingerprint


@dataclass(frozen=True, slots=True)
class Superblock:
    """Contents of a superblock.

    Attributes:
        store: The store's identity, equal on all its devices and in the manifest.
        device: This data file's identity.
        rank: Rank whose data the file holds: those of the first pipeline stage come first.
        unit_bytes: Stripe unit (:attr:`SlotGeometry.unit_bytes`).
        epoch: Grows with every write of the superblock.
        geometry: Shape of the slots.
        fingerprint: What the KV inside belongs to.
        key_id: Names the key that slots are encrypted with (:attr:`StoreKey.key_id`), 16 bytes;
            zero where they are not.
    """

    store: UUID
    device: UUID
    rank: int
    unit_bytes: int
    epoch: int
    geometry: SlotGeometry
    fingerprint: Fingerprint
    key_id: bytes = bytes(KEY_ID_BYTES)

    @property
    def copy_offset(self) -> int:
        """Offset in the data file at which this epoch's block is written."""
        return COPY_OFFSETS[self.epoch % len(COPY_OFFSETS)]

    def encode(self) -> bytes:
        """The block, 4096 bytes.

        Raises:
            ValueError: the fingerprint does not fit, or a number does not fit its field.
        """
        text = self.fingerprint.canonical
        shape = self.geometry
        block = bytearray(BLOCK_BYTES)
        try:
            _FIXED.pack_into(
                block,
                0,
                MAGIC,
                shape.version,
                BLOCK_BYTES,
                self.store.bytes,
                self.device.bytes,
                self.rank,
                shape.channel_pages,
                shape.scaled_from,
                PAGE_RECORDS.index(shape.record),
                self.epoch,
                _KINDS.index(shape.kind),
                shape.layers,
                shape.heads,
                shape.groups,
                shape.payload_bytes,
                self.unit_bytes,
                self.fingerprint.digest,
                len(text),
                _CIPHERS.index(shape.encrypted),
                self.key_id,
                shape.summary_pages,
            )
        except struct.error as exc:
            raise ValueError(f"superblock: {exc}") from exc
        end = _FIXED.size + len(text)
        if end + (_UNITS.size if shape.units else 0) > _BODY:
            raise ValueError(
                f"superblock: a fingerprint of {len(text)} bytes does not fit {BLOCK_BYTES} bytes"
            )
        block[_FIXED.size : end] = text
        if shape.units:
            _UNITS.pack_into(block, end, shape.units)
        _TAIL.pack_into(block, _BODY, checksum_bytes(memoryview(block)[:_BODY]))
        return bytes(block)

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Superblock:
        """Read one copy.

        Raises:
            FormatError: the text names the field that is wrong.
        """
        block = bytes(data)
        if len(block) != BLOCK_BYTES:
            raise FormatError(f"superblock: length is {len(block)}, expected {BLOCK_BYTES}")
        (
            *head,
            store,
            device,
            rank,
            channel_pages,
            scaled_from,
            record,
            epoch,
            kind,
            layers,
            heads,
            groups,
            payload_bytes,
            unit_bytes,
            digest,
            text_bytes,
            cipher,
            key_id,
            summary_pages,
        ) = _FIXED.unpack_from(block)
        head.append(_TAIL.unpack_from(block, _BODY)[0])
        known = PAGE_RECORDS[min(record, len(PAGE_RECORDS) - 1)]
        units = _given_units(block, head[1], _FIXED.size + text_bytes)
        version = format_version(summary_pages, known, units)
        expected = (MAGIC, version, BLOCK_BYTES, checksum_bytes(block[:_BODY]))
        _check_head(head, expected)
        fingerprint = _decode_fingerprint(block, digest, text_bytes)
        if record >= len(PAGE_RECORDS):
            raise FormatError(f"superblock: record is {record}")
        if kind >= len(_KINDS):
            raise FormatError(f"superblock: kind is {kind}")
        if cipher >= len(_CIPHERS):
            raise FormatError(f"superblock: cipher is {cipher}")
        try:
            geometry = SlotGeometry(
                _KINDS[kind],
                layers,
                heads,
                groups,
                payload_bytes,
                _CIPHERS[cipher],
                summary_pages,
                channel_pages,
                scaled_from,
                known,
                units,
            )
        except ValueError as exc:
            raise FormatError(f"superblock: {exc}") from exc
        found = cls(
            store=UUID(bytes=store),
            device=UUID(bytes=device),
            rank=rank,
            unit_bytes=unit_bytes,
            epoch=epoch,
            geometry=geometry,
            fingerprint=fingerprint,
            key_id=key_id,
        )
        if found.encode() != block:
            raise FormatError("superblock: bytes that are zero in this version are not")
        return found

    def require(self, expected: Superblock, path: str) -> None:
        """Check a superblock found at ``path`` against the one expected; the epoch may differ.

        Raises:
            FingerprintMismatchError: it holds KV of something else; lists the differences.
            FormatError: another field differs; the text names it.
        """
        differences = self.fingerprint.differences(expected.fingerprint)
        if differences:
            raise FingerprintMismatchError(
                f"{path} holds KV of another model or layout (stored != configured): "
                f"{'; '.join(differences)}. Use another directory, or delete this file."
            )
        for field in fields(self):
            found, wanted = getattr(self, field.name), getattr(expected, field.name)
            if field.name != "epoch" and found != wanted:
                raise FormatError(
                    f"{path}: superblock: {field.name} is {found}, expected {wanted}. The data "
                    "file belongs to another store; name another place, or delete it."
                )


def store_named(copies: Sequence[bytes]) -> UUID | None:
    """The store that superblocks name, of whatever version; None: none is whole, or they differ.

    Args:
        copies: The blocks read at :data:`COPY_OFFSETS`; shorter ones (end of file) are allowed.
    """
    found = {
        UUID(bytes=copy[_STORE])
        for copy in copies
        if len(copy) == BLOCK_BYTES
        and copy.startswith(MAGIC)
        and _TAIL.unpack_from(copy, _BODY)[0] == checksum_bytes(copy[:_BODY])
    }
    return found.pop() if len(found) == 1 else None


def newest(copies: Sequence[bytes], path: str) -> Superblock | None:
    """The valid copy with the highest epoch; None when every copy is all zeros (a new file).

    Args:
        copies: The blocks read at :data:`COPY_OFFSETS`; shorter ones (end of file) are allowed.
        path: Names the file in errors.

    Raises:
        FormatError: no copy is valid, but there is data: it must not be overwritten unasked.
    """
    found: Superblock | None = None
    errors: list[str] = []
    for offset, copy in zip(COPY_OFFSETS, copies, strict=True):
        if not copy.strip(b"\0"):
            continue
        try:
            block = Superblock.decode(copy)
        except FormatError as exc:
            errors.append(f"at {offset}: {exc}")
            continue
        if found is None or block.epoch > found.epoch:
            found = block
    if found is None and errors:
        raise not_empty(path, "; ".join(errors))
    return found


def not_empty(path: str, why: str) -> FormatError:
    """The error of a file or block device that holds something else."""
    return FormatError(
        f"{path} is not empty and holds no superblock ({why}). If it is the "
        "store's, `ssdkv fsck --repair` restores it; if its content is not needed, delete the "
        "file (or zero the first 1 MiB of a raw device)."
    )


def data_file_path(directory: Path, rank: int) -> Path:
    """The data file of a rank on a device that is a directory."""
    return directory / f"rank{rank}.data"
