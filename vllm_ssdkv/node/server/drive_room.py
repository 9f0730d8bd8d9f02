"""Room of a node's drives: volumes and stores share the capacity of each drive."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.base.sizes import format_size
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.node import NodeConfig

DIRECTORY: Final = "volumes"
"""Of all volumes of a drive. Each other directory there is one of a store."""

_DATA_FILES: Final = "rank*.data"


class DriveRoom:
    """Room of all drives. Any thread may call; what looks at drives blocks on I/O.

    Where a drive has no ``capacity`` its file system decides alone: both kinds have their space
    from the start.

    Attributes:
        lock: Held from a check until what was checked has its space, or is promised it.

    Example:
        room = DriveRoom(config)
        with room.promise_store(options):
            open_store(options)
    """

    def __init__(self, config: NodeConfig):
        """``config``: options of the node."""
        self._config = config
        self.lock = threading.Lock()
        self._promised: dict[Path, int] = {}
        """Of stores that are being opened, by their directories."""

    def check_volume(self, number: int, directory: Path, nbytes: int) -> None:
        """Check that a volume of this size, in its directory, has room on a drive. The lock is
        held.

        Raises:
            ConfigError: it has not.
        """
        device = self._config.devices[number]
        if device.capacity is None or nbytes <= data_bytes(directory):
            return
        others = self._volumes(number, directory)
        stores = self._stores(number)
        if others + stores + nbytes > device.capacity:
            raise ConfigError(
                f"drive {device.path} has no room for a volume of {format_size(nbytes)}: of "
                f"{format_size(device.capacity)} other volumes have {format_size(others)}, and "
                f"stores {format_size(stores)}; raise its capacity, or remove volumes or stores "
                "that nobody uses (`ssdkv node volumes`, `ssdkv rm`)"
            )

    @contextlib.contextmanager
    def promise_store(self, options: SSDKVConfig) -> Iterator[None]:
        """Keep the room of a store, on all drives, while it is being opened.

        Raises:
            ConfigError: volumes have it.
        """
        promised = {Path(device.path): device.capacity or 0 for device in options.devices}
        with self.lock:
            self._check_store(list(promised.items()))
            self._promised.update(promised)
        try:
            yield
        finally:
            with self.lock:
                for directory in promised:
                    self._promised.pop(directory, None)

    def _check_store(self, shares: Sequence[tuple[Path, int]]) -> None:
        for number, (directory, nbytes) in enumerate(shares):
            device = self._config.devices[number]
            if device.capacity is None or nbytes <= data_bytes(directory):
                continue
            volumes = self._volumes(number)
            if volumes + nbytes > device.capacity:
                raise ConfigError(
                    f"drive {device.path} has no room for a store of {format_size(nbytes)}: of "
                    f"{format_size(device.capacity)} volumes have {format_size(volumes)}; raise "
                    "its capacity, remove volumes that nobody uses (`ssdkv node volumes`), or "
                    "give the store a smaller share (store_share, shares)"
                )

    def _volumes(self, number: int, but: Path | None = None) -> int:
        """Bytes of all volumes of a drive but one."""
        root = Path(self._config.devices[number].path) / DIRECTORY
        return sum(data_bytes(path) for path in directories(root) if path != but)

    def _stores(self, number: int) -> int:
        """Bytes of all stores of a drive, open or not, and of those that are being opened."""
        root = Path(self._config.devices[number].path)
        here = {path: data_bytes(path) for path in directories(root) if path.name != DIRECTORY}
        for path, nbytes in self._promised.items():
            if path.parent == root:
                here[path] = max(nbytes, here.get(path, 0))
        return sum(here.values())


def directories(root: Path) -> list[Path]:
    """Directories in a directory, in order; none where there is none."""
    try:
        return sorted(path for path in root.iterdir() if path.is_dir())
    except FileNotFoundError:
        return []


def data_bytes(directory: Path) -> int:
    """Bytes of the data files of a volume, or of a store on one drive."""
    total = 0
    for path in directory.glob(_DATA_FILES):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total
