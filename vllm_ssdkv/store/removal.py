"""Removing a store: its own files, when nobody uses them, and nothing else."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_ssdkv.errors import DeviceError, FormatError, StoreError
from vllm_ssdkv.store.durable import sync_directory
from vllm_ssdkv.store.file_lock import lock_file
from vllm_ssdkv.store.manifest import COPY, NAME, has_manifest
from vllm_ssdkv.store.open import JOURNAL
from vllm_ssdkv.store.stored import find_store, is_raw
from vllm_ssdkv.store.superblock import BLOCK_BYTES, COPY_OFFSETS, MAGIC
from vllm_ssdkv.store.wear import NAME as WEAR

_DATA = re.compile(r"rank\d+\.data")
_MANIFESTS = (NAME, COPY)
_OTHERS = (
    JOURNAL,
    f"{JOURNAL}.tmp",
    f"{JOURNAL}.rejected",
    WEAR,
    f"{WEAR}.tmp",
    f"{NAME}.tmp",
    f"{COPY}.tmp",
)


def files_of_store(directory: Path) -> list[Path]:
    """Files of a store in a device's or the state directory: data first, the manifest last."""
    try:
        entries = sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    data = [entry for entry in entries if _DATA.fullmatch(entry.name)]
    names = {entry.name for entry in entries}
    return data + [directory / name for name in (*_OTHERS, *_MANIFESTS) if name in names]


@dataclass(frozen=True, slots=True)
class Removal:
    """What is to be removed.

    Attributes:
        files: In the order in which they go. The manifest goes last: a removal that was
            interrupted can be started again.
        raw: Block devices whose superblocks are overwritten with zeros.
        missing: Devices of the store that are not there; nothing can be removed from them.
        nbytes: Space that the files occupy.
    """

    files: tuple[Path, ...]
    raw: tuple[Path, ...]
    missing: tuple[Path, ...]
    nbytes: int


def plan_removal(
    directories: Sequence[Path], state_dir: Path | None = None, *, left_over: bool = False
) -> Removal:
    """What belongs to the store on these devices. Blocks on I/O.

    Where no manifest can be read, it is what lies in the directories named.

    Args:
        directories: See :func:`vllm_ssdkv.store.stored.find_store`; likewise ``state_dir``.
        left_over: It is data files of ours there, whose manifest is gone: their store was removed
            while these devices were away.

    Raises:
        StoreError: there is no store; or, if it is ``left_over``, there is one.
    """
    named = [*directories, *([] if state_dir is None else [state_dir])]
    if left_over:
        return _left_over(list(dict.fromkeys(named)))
    try:
        store = find_store(directories, state_dir)
        places = dict.fromkeys((*store.paths, store.state))
    except FormatError:
        places = dict.fromkeys(named)
    raw = tuple(place for place in places if is_raw(place))
    missing = tuple(place for place in places if not place.exists())
    found = [file for place in places for file in files_of_store(place)]
    found.sort(key=lambda file: file.name in _MANIFESTS)
    return Removal(tuple(found), raw, missing, _stored_bytes(found))


def _left_over(places: Sequence[Path]) -> Removal:
    """What stores without a manifest have left there, and nothing that only has such a name."""
    for place in places:
        if has_manifest(place):
            raise StoreError(f"{place} has the manifest of a store: it is no left-over")
    raw = tuple(place for place in places if is_raw(place) and _is_ours(place))
    found = [file for place in places for file in files_of_store(place)]
    data = [file for file in found if _DATA.fullmatch(file.name) and _is_ours(file)]
    return Removal(tuple(data), raw, (), _stored_bytes(data))


def _stored_bytes(files: Sequence[Path]) -> int:
    return sum(file.stat().st_blocks * 512 for file in files)


def _is_ours(path: Path) -> bool:
    """Whether a data file or block device begins like one of a store."""
    with path.open("rb") as file:
        return any(os.pread(file.fileno(), len(MAGIC), at) == MAGIC for at in COPY_OFFSETS)


def remove(removal: Removal) -> None:
    """Remove it. Directories stay. Blocks on I/O.

    Raises:
        StoreLockedError: somebody uses it; nothing was removed.
        StoreError: a file cannot be removed.
    """
    with contextlib.ExitStack() as stack:
        for file in removal.files:
            if _DATA.fullmatch(file.name) or file.name == JOURNAL:
                stack.enter_context(_locked(file, os.O_RDONLY | os.O_NOFOLLOW))
        devices = [
            stack.enter_context(_locked(path, os.O_RDWR | os.O_EXCL)) for path in removal.raw
        ]
        for fd, path in zip(devices, removal.raw, strict=True):
            _wipe(fd, path)
        for file in removal.files:
            try:
                file.unlink(missing_ok=True)
                sync_directory(file.parent)
            except OSError as error:
                raise StoreError(f"cannot remove {file}: {error.strerror}") from error


@contextlib.contextmanager
def _locked(path: Path, flags: int) -> Iterator[int]:
    try:
        fd = os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise StoreError(f"cannot open {path}: {error.strerror}") from error
    try:
        lock_file(fd, path, "store", time.monotonic())
        yield fd
    finally:
        os.close(fd)


def _wipe(fd: int, path: Path) -> None:
    """Make a block device new: where a superblock of ours is, there are zeros afterwards."""
    try:
        for offset in COPY_OFFSETS:
            if os.pread(fd, len(MAGIC), offset) == MAGIC:
                with mmap.mmap(-1, BLOCK_BYTES) as zeros:
                    os.pwrite(fd, zeros, offset)
        os.fdatasync(fd)
    except OSError as error:
        raise DeviceError(f"cannot wipe {path}: {error.strerror}") from error
