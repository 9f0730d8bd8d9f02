"""Directories of ``ssdkv demo``'s stores, made and removed again: its own files only."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from vllm_ssdkv.base.errors import StoreError
from vllm_ssdkv.base.file_lock import lock_file
from vllm_ssdkv.base.host import default_root
from vllm_ssdkv.profiling.recall.recall import MODEL_DIR
from vllm_ssdkv.store.devices.owner import DATA_NAME, files_named_alike
from vllm_ssdkv.store.location import any_manifest

FOLDER: Final = "ssdkv-demo"
_DEFAULT_STORES: Final = 2
_LOCK_WAIT_S: Final = 5.0


def home() -> Path:
    """Folder of the logs, and of the stores when no directory was named; made if missing."""
    path = default_root().parent / FOLDER
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def places(directories: Sequence[Path]) -> tuple[Path, ...]:
    """The store's directory on each SSD, a folder of the demo's own, made if missing.

    Raises:
        OSError: a named directory does not exist, or cannot be written.
    """
    stores = [path.resolve(strict=True) / FOLDER for path in directories]
    stores = stores or [home() / f"ssd{i}" for i in range(_DEFAULT_STORES)]
    for store in stores:
        store.mkdir(mode=0o700, exist_ok=True)
    return tuple(stores)


def clean(stores: Sequence[Path]) -> None:
    """Remove what an earlier demo left. The directories stay.

    Raises:
        StoreLockedError: an engine uses one of them.
        StoreError: one holds something that is no part of a store, or a store of another model.
    """
    for store in stores:
        ours = files_named_alike(store)
        for entry in store.iterdir():
            if entry not in ours:
                raise StoreError(f"{entry} is no file of the demo: remove or rename {store}")
        found = any_manifest(store)
        if found is not None and Path(found.model).name not in ("", MODEL_DIR.name):
            raise StoreError(f"{store} holds a store of {found.model}: remove or rename it")
        for file in ours:
            if DATA_NAME.fullmatch(file.name):
                _check_unused(file)
    for store in stores:
        for file in files_named_alike(store):
            file.unlink()


def remove(stores: Sequence[Path]) -> None:
    """As :func:`clean`, and the directories too."""
    clean(stores)
    for store in stores:
        store.rmdir()


def disk_bytes(store: Path) -> int:
    """Bytes that a store's directory occupies, as ``du`` counts them: preallocated space too."""
    return sum(entry.stat().st_blocks * 512 for entry in store.iterdir())


def _check_unused(data: Path) -> None:
    try:
        fd = os.open(data, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        lock_file(fd, data, str(data.parent), time.monotonic() + _LOCK_WAIT_S)
    finally:
        os.close(fd)
