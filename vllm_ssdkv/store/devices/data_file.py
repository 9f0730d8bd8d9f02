"""A data file's superblock: claimed at start, so that no other store's bytes are taken for ours."""

from __future__ import annotations

import logging
import mmap
import os
import stat
import uuid
from collections.abc import Callable, Container
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from vllm_ssdkv.base.errors import DeviceError, FormatError
from vllm_ssdkv.store.devices.data_device import OpenDevice
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.format.slot_geometry import SUPERBLOCK_BYTES, SlotGeometry
from vllm_ssdkv.store.format.superblock import (
    BLOCK_BYTES,
    COPY_OFFSETS,
    Superblock,
    newest,
    not_empty,
)

logger = logging.getLogger(__name__)


class OpenFile(Protocol):
    """A data file or block device that is open: :class:`OpenDevice` and what commands open."""

    @property
    def fd(self) -> int: ...
    @property
    def path(self) -> Path: ...


def read_copies(device: OpenFile) -> list[bytes]:
    """Read the bytes at each of :data:`COPY_OFFSETS`; less than a block at the end. Blocks on I/O.

    Raises:
        DeviceError: the device cannot be read.
    """
    return [_read(device, offset) for offset in COPY_OFFSETS]


def read_superblock(device: OpenDevice) -> Superblock | None:
    """The valid superblock with the highest epoch, or None for a new file. Blocks on I/O.

    Raises:
        FormatError: there is data, but no valid superblock.
        DeviceError: the device cannot be read.
    """
    copies = read_copies(device)
    found = newest(copies, str(device.path))
    if found is not None:
        for offset, copy in zip(COPY_OFFSETS, copies, strict=True):
            _warn_of_damage(device, offset, copy)
    elif not is_empty(device):
        raise not_empty(str(device.path), "there is data beside where one would be")
    return found


def is_empty(device: OpenFile) -> bool:
    """Check whether there is nothing where superblocks would be, like in a file that is new.

    Of a block device, whether there is nothing before the slots: of a file system (btrfs), a RAID
    or a volume the first blocks may be zeros. Blocks on I/O.

    Raises:
        DeviceError: the device cannot be read.
    """
    if not stat.S_ISBLK(os.fstat(device.fd).st_mode):
        return not any(copy.strip(b"\0") for copy in read_copies(device))
    return not _read(device, 0, SUPERBLOCK_BYTES).strip(b"\0")


def peek_superblock(path: Path) -> Superblock | None:
    """As :func:`read_superblock`, of a file or block device that is neither open nor locked.

    Raises:
        FormatError: there is data, but no valid superblock.
        OSError: it cannot be opened or read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        return newest([os.pread(fd, BLOCK_BYTES, at) for at in COPY_OFFSETS], str(path))
    finally:
        os.close(fd)


def _warn_of_damage(device: OpenDevice, offset: int, copy: bytes) -> None:
    try:
        Superblock.decode(copy)
    except FormatError as error:
        logger.warning(
            "%s: the superblock at %d is damaged (%s) and is written anew from the other copy",
            device.path,
            offset,
            error,
        )


def write_superblock(device: OpenFile, block: Superblock) -> None:
    """Write the copy that the block's epoch selects. Blocks on I/O.

    Raises:
        DeviceError: the device cannot be written.
    """
    with mmap.mmap(-1, BLOCK_BYTES) as page:  # page-aligned, as O_DIRECT wants
        page[:] = block.encode()
        try:
            written = os.pwrite(device.fd, page, block.copy_offset)
            os.fdatasync(device.fd)
        except OSError as error:
            raise DeviceError(f"{device.path}: superblock: {error.strerror}") from error
    if written != BLOCK_BYTES:
        raise DeviceError(f"{device.path}: superblock: only {written} bytes were written")


def _read(device: OpenFile, offset: int, nbytes: int = BLOCK_BYTES) -> bytes:
    with mmap.mmap(-1, nbytes) as page:  # page-aligned, as O_DIRECT wants
        try:
            count = os.preadv(device.fd, [page], offset)
        except OSError as error:
            raise DeviceError(f"{device.path}: superblock: {error.strerror}") from error
        return bytes(page[:count])


def claim(
    device: OpenDevice,
    *,
    store: uuid.UUID,
    known: str,
    rank: int,
    geometry: SlotGeometry,
    fingerprint: Fingerprint,
    key_id: bytes,
    renamed: Callable[[str], None],
    elsewhere: Container[str] = (),
) -> str:
    """Check that the file is this store's, or make it so if it is new. Blocks on I/O.

    Both copies of the superblock are brought up to date, so one that was damaged is mended.

    Args:
        known: UUID that the manifest has for this file, empty for none.
        key_id: As in the superblock.
        renamed: Told the new UUID of a file that the manifest knows and that is made anew, before
            it is: the manifest must have it first. A kill between leaves an empty file, which the
            next start makes anew; the other way round it would leave one that nobody knows. Also
            told that of a file of this store that the manifest does not know: whatever is in it,
            nobody counts on it.
        elsewhere: UUIDs of files that belong to other devices.

    Returns:
        The UUID of the file; other than ``known`` when the file is new.

    Raises:
        FingerprintMismatchError, FormatError: it belongs to something else.
        DeviceError: it cannot be read or written.
    """
    found = read_superblock(device)
    mine = uuid.UUID(known) if known and found is not None else uuid.uuid4()
    stranger = found is not None and found.store == store and str(found.device) not in elsewhere
    if found is not None and (not known or stranger):
        mine = found.device  # we were killed before the manifest was saved, or it was here before
    expected = Superblock(
        store=store,
        device=mine,
        rank=rank,
        unit_bytes=geometry.unit_bytes,
        epoch=1 if found is None else found.epoch + 1,
        geometry=geometry,
        fingerprint=fingerprint,
        key_id=key_id,
    )
    if found is not None:
        found.require(expected, str(device.path))
        if known and str(mine) != known:
            logger.error(
                "ssdkv: the data file %s is not the one that was here last: what was stored on "
                "either is computed again",
                device.path,
            )
            renamed(str(mine))
    elif known:
        logger.error(
            "ssdkv: the data file %s is missing or empty: it is made anew, what was stored on it "
            "is computed again",
            device.path,
        )
        renamed(str(mine))
    write_both(device, expected)
    return str(mine)


def write_both(device: OpenFile, block: Superblock) -> None:
    """Write the block, and with the next epoch its other copy. Blocks on I/O.

    Raises:
        DeviceError: the device cannot be written.
    """
    write_superblock(device, block)
    write_superblock(device, replace(block, epoch=block.epoch + 1))
