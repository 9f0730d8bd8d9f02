"""Ownership of files: every file of a store names it, and a file without its name is no proof.

Only whole names count: that of a superblock, of a journal's header or of a manifest whose checksum
is right, of whatever version.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

from vllm_ssdkv.store.devices.wear import NAME as WEAR
from vllm_ssdkv.store.format import journal_record, manifest, superblock
from vllm_ssdkv.store.format.journal_record import HEADER_BYTES, JOURNAL
from vllm_ssdkv.store.format.manifest import COPY, NAME
from vllm_ssdkv.store.format.superblock import BLOCK_BYTES, COPY_OFFSETS

DATA_NAME = re.compile(r"rank(\d+)\.data")
JOURNALS = (JOURNAL, f"{JOURNAL}.tmp", f"{JOURNAL}.rejected")
MANIFESTS = (f"{NAME}.tmp", f"{COPY}.tmp", COPY, NAME)
NAMELESS = (WEAR, f"{WEAR}.tmp")
"""Files of the state directory that name no store."""

_MOST_BYTES = 64 << 20
"""Maximum size of a manifest; a larger file is none."""


def files_named_alike(directory: Path) -> list[Path]:
    """Files with the names of a store's in a device's or the state directory, whoever's they are:
    data first, the manifest last. Blocks on I/O."""
    try:
        entries = sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    data = [entry for entry in entries if DATA_NAME.fullmatch(entry.name)]
    names = {entry.name for entry in entries}
    return data + [directory / n for n in (*JOURNALS, *NAMELESS, *MANIFESTS) if n in names]


def open_regular(path: Path, access: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file, with ``access``; the caller closes it. Never waits.

    Raises:
        OSError: there is none, or it is a symbolic link, a pipe or the like.
    """
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a symbolic link", str(path))
    fd = os.open(path, access | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return fd


def owner(fd: int, name: str) -> str | None:
    """UUID of the store that an open file names; None: it names none that is whole. Blocks on I/O.

    Args:
        fd: Descriptor of the file or block device, open for reading.
        name: Of the file, which says what it should be; empty for a block device.

    Raises:
        OSError: it cannot be read.
    """
    if name in JOURNALS:
        found = journal_record.store_named(os.pread(fd, HEADER_BYTES, 0))
    elif name in MANIFESTS:
        return manifest.store_named(os.pread(fd, min(_MOST_BYTES, os.fstat(fd).st_size), 0))
    else:
        found = superblock.store_named([os.pread(fd, BLOCK_BYTES, at) for at in COPY_OFFSETS])
    return None if found is None else str(found)


def owner_of(path: Path) -> str | None:
    """As :func:`owner`, of a regular file or a block device by its path.

    Raises:
        OSError: it cannot be opened or read.
    """
    if path.is_block_device():
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        name = ""
    else:
        fd, name = open_regular(path), path.name
    try:
        return owner(fd, name)
    finally:
        os.close(fd)


def owners_of_data(place: Path) -> set[str]:
    """UUIDs of all stores that have data on a device. Blocks on I/O."""
    files = [place] if place.is_block_device() else files_named_alike(place)
    found: set[str] = set()
    for file in files:
        if file == place or DATA_NAME.fullmatch(file.name):
            try:
                named = owner_of(file)
            except OSError:
                continue
            found |= set() if named is None else {named}
    return found
