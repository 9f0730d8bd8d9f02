"""A twin of a drive that loses its power: what was not synced may be gone, block by block.

Between ``start`` and ``stop`` the calls by which this process writes files of one directory also
reach the twin. At the instant chosen it takes an image: of every file the content that the last
sync made safe, and of every block of 4 KiB written since any of its versions or none; of the
changes of names since the directory was synced the first few. That is what an ordering file system
on a drive with a volatile cache may leave, and more.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK = 4096


@dataclass(eq=False)
class File:
    """One file: its bytes now, those that are safe, and what happened to its blocks since."""

    now: bytearray = field(default_factory=bytearray)
    safe: bytes = b""
    versions: dict[int, list[bytes]] = field(default_factory=dict)

    def write(self, offset: int, data: bytes) -> None:
        end = offset + len(data)
        self.now.extend(bytes(max(0, end - len(self.now))))
        self.now[offset:end] = data
        for block in range(offset // BLOCK, -(-end // BLOCK)):
            content = bytes(self.now[block * BLOCK : (block + 1) * BLOCK])
            self.versions.setdefault(block, []).append(content)

    def sync(self) -> None:
        self.safe = bytes(self.now)
        self.versions.clear()

    def after_loss(self, source: random.Random) -> bytes:
        shortest, longest = len(self.safe), len(self.now)
        size = source.choice([shortest, longest, source.randint(shortest, longest)])
        left = bytearray(self.safe[:size].ljust(size, b"\0"))
        for block, versions in self.versions.items():
            version = source.choice([None, versions[-1], *versions])
            if version is not None:
                begin = block * BLOCK
                left[begin : begin + len(version)] = version
        return bytes(left[:size])


Names = dict[str, File | None]
"""Name to file, or to None when there is none."""


class PowerTwin:
    """Follows the files of one directory, and takes one image of what a power loss leaves.

    Any thread may write. The image is taken before the call whose number is ``instant``; with
    ``rare`` only calls count that are no plain writes: there is more to go wrong around them.
    """

    def __init__(self, directory: Path, source: random.Random, instant: int, *, rare: bool):
        self._directory = directory
        self._source = source
        self._instant = instant
        self._rare = rare
        self._lock = threading.RLock()
        self._files: dict[int, File] = {}
        self._safe_names: Names = {}
        self._names: Names = {}
        self._changes: list[Names] = []
        self._real: dict[str, Callable[..., Any]] = {}
        self.at_loss: Callable[[], None] = lambda: None
        """Called at the instant, while no call is under way."""
        self.image: dict[str, bytes] | None = None
        """Name to content of every file that is left; None before the instant."""
        for path in directory.iterdir():
            content = path.read_bytes()
            file = File(bytearray(content), content)
            self._files[path.stat().st_ino] = file
            self._names[path.name] = self._safe_names[path.name] = file

    def start(self) -> None:
        """Have the calls of module ``os`` reach the twin."""
        for name in ("open", "pwrite", "fsync", "fdatasync", "rename", "unlink"):
            self._real[name] = getattr(os, name)
            setattr(os, name, getattr(self, f"_{name}"))

    def stop(self) -> None:
        """Undo :meth:`start`."""
        for name, call in self._real.items():
            setattr(os, name, call)

    def _tick(self, *, is_write: bool = False) -> None:
        self._instant -= not (self._rare and is_write)
        if self._instant == 0 and self.image is None:
            self.image = self._after_loss()
            self.at_loss()

    def _after_loss(self) -> dict[str, bytes]:
        names = dict(self._safe_names)
        count = len(self._changes)
        for change in self._changes[: self._source.choice([count, self._source.randint(0, count)])]:
            names |= change
        return {
            name: file.after_loss(self._source) for name, file in names.items() if file is not None
        }

    def _change_names(self, change: Names) -> None:
        self._names |= change
        self._changes.append(change)

    def _is_ours(self, path: object) -> bool:
        return isinstance(path, str | Path) and Path(path).parent == self._directory

    # ---- the calls ----

    def _open(self, path: Any, flags: int, *others: Any, **named: Any) -> int:  # noqa: ANN401 - os.open
        with self._lock:
            fd: int = self._real["open"](path, flags, *others, **named)
            if self._is_ours(path) and flags & os.O_CREAT:
                name = Path(path).name
                if self._names.get(name) is None:
                    file = self._files[os.fstat(fd).st_ino] = File()
                    self._change_names({name: file})
            return fd

    def _pwrite(self, fd: int, data: bytes, offset: int) -> int:
        with self._lock:
            self._tick(is_write=True)
            written: int = self._real["pwrite"](fd, data, offset)
            file = self._files.get(os.fstat(fd).st_ino)
            if file is not None:
                file.write(offset, bytes(data[:written]))
            return written

    def _sync(self, fd: int) -> None:
        with self._lock:
            self._tick()
            inode = os.fstat(fd).st_ino
            file = self._files.get(inode)
            if file is not None:
                file.sync()
            elif inode == self._directory.stat().st_ino:
                for change in self._changes:
                    self._safe_names |= change
                self._changes.clear()

    _fsync = _fdatasync = _sync

    def _rename(self, source: Any, target: Any) -> None:  # noqa: ANN401 - os.rename
        with self._lock:
            self._tick()
            self._real["rename"](source, target)
            if self._is_ours(target):
                moved = self._names[Path(source).name]
                self._change_names({Path(source).name: None, Path(target).name: moved})

    def _unlink(self, path: Any, **named: Any) -> None:  # noqa: ANN401 - os.unlink
        with self._lock:
            self._tick()
            self._real["unlink"](path, **named)
            if self._is_ours(path):
                self._change_names({Path(path).name: None})
