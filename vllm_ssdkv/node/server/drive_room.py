"""Room of a node's drives: volumes and stores share the capacity of each drive.

A store that is closed keeps what it has until another store needs the room: then the one that was
not used for longest is removed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.base.sizes import format_size
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.node import NodeConfig
from vllm_ssdkv.node.server.store_options import is_directory_of_store
from vllm_ssdkv.store.maintenance.remove import plan_removal, remove

logger = logging.getLogger(__name__)

DIRECTORY: Final = "volumes"
"""Directory of all volumes of a drive. Each other directory there is one of a store."""

_DATA_FILES: Final = "rank*.data"


class DriveRoom:
    """Room of all drives. Any thread may call; what looks at drives blocks on I/O.

    Where a drive has no ``capacity`` its file system decides alone: both kinds have their space
    from the start.

    Attributes:
        lock: Held from a check until what was checked has its space, or is promised it.

    Example:
        room = DriveRoom(config, registry.names, counters)
        with room.promise_store(options):
            open_store(options)
    """

    def __init__(
        self, config: NodeConfig, names: Callable[[], Collection[str]], counters: Counters
    ):
        """
        Args:
            config: Options of the node.
            names: Directories of stores that are open, or being opened or closed.
            counters: For ``node_stores_removed``.
        """
        self._config, self._names, self._counters = config, names, counters
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
        stores = sum(self._stores(number).values())
        if others + stores + nbytes > device.capacity:
            raise ConfigError(
                f"drive {device.path} has no room for a volume of {format_size(nbytes)}: of "
                f"{format_size(device.capacity)} other volumes have {format_size(others)}, and "
                f"stores {format_size(stores)}; raise its capacity, or remove volumes or stores "
                "that nobody uses (`ssdkv node volumes`, `ssdkv rm`)"
            )

    @contextlib.contextmanager
    def promise_store(self, options: SSDKVConfig) -> Iterator[None]:
        """Keep the room of a store, on all drives, while it is being opened. Closed stores make
        room for it.

        Raises:
            ConfigError: volumes and stores in use have it.
        """
        promised = {Path(device.path): device.capacity or 0 for device in options.devices}
        with self.lock:
            self._make_room(promised)
            self._promised.update(promised)
        try:
            yield
        finally:
            with self.lock:
                for directory in promised:
                    self._promised.pop(directory, None)

    def _make_room(self, shares: Mapping[Path, int]) -> None:
        """Remove closed stores, if that is enough for a store's shares of all drives."""
        if self._too_small(shares) is None:
            return
        closed = self._closed()
        number = self._too_small(shares, closed)
        while number is None and closed and self._too_small(shares) is not None:
            self._remove(closed.pop(0))
        if number is None:
            number = self._too_small(shares)
        if number is not None:
            raise self._no_room(number, list(shares.items())[number])

    def _too_small(self, shares: Mapping[Path, int], without: Collection[str] = ()) -> int | None:
        """A drive that has no room for its share, were these stores removed."""
        for number, (directory, nbytes) in enumerate(shares.items()):
            capacity = self._config.devices[number].capacity
            if capacity is None or nbytes <= data_bytes(directory):
                continue
            stores = self._stores(number)
            taken = sum(n for path, n in stores.items() if path.name not in without)
            others = taken - stores.get(directory, 0)
            if self._volumes(number) + others + nbytes > capacity:
                return number
        return None

    def _closed(self) -> list[str]:
        """Directories of the stores that nobody uses, the one first that was unused for longest."""
        used: dict[str, float] = {}
        for device in self._config.devices:
            for path in directories(Path(device.path)):
                if is_directory_of_store(path.name) and data_bytes(path):
                    times = (file.stat().st_mtime for file in path.iterdir())
                    used[path.name] = max(used.get(path.name, 0.0), *times)
        return sorted(used.keys() - set(self._names()), key=used.__getitem__)

    def _remove(self, name: str) -> None:
        places = [Path(device.path) / name for device in self._config.devices]
        places = [place for place in places if place.exists()]
        plan = plan_removal(places)
        remove(plan)
        for place in places:
            with contextlib.suppress(OSError):  # a stranger's file is in it
                place.rmdir()
        self._counters.add("node_stores_removed", 1)
        logger.warning(
            "ssdkv node: the closed store %s of %s, %s, is removed: another store needs its room",
            name,
            plan.model or "an unknown model",
            format_size(plan.nbytes),
        )

    def _no_room(self, number: int, share: tuple[Path, int]) -> ConfigError:
        device, (directory, nbytes) = self._config.devices[number], share
        stores = {path.name: n for path, n in self._stores(number).items() if path != directory}
        others = f", and other stores {format_size(sum(stores.values()))} ({', '.join(stores)})"
        return ConfigError(
            f"drive {device.path} has no room for a store of {format_size(nbytes)}: of "
            f"{format_size(device.capacity or 0)} volumes have {format_size(self._volumes(number))}"
            f"{others if stores else ''}; raise its capacity, remove volumes that nobody uses "
            "(`ssdkv node volumes`), or give stores smaller shares (store_share, shares)"
        )

    def _volumes(self, number: int, but: Path | None = None) -> int:
        """Bytes of all volumes of a drive but one."""
        root = Path(self._config.devices[number].path) / DIRECTORY
        return sum(data_bytes(path) for path in directories(root) if path != but)

    def _stores(self, number: int) -> dict[Path, int]:
        """Bytes of all stores of a drive, open or not, and of those that are being opened."""
        root = Path(self._config.devices[number].path)
        here = {path: data_bytes(path) for path in directories(root) if path.name != DIRECTORY}
        for path, nbytes in self._promised.items():
            if path.parent == root:
                here[path] = max(nbytes, here.get(path, 0))
        return here


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
