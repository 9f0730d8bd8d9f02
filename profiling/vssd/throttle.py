"""Block-layer limits on loop devices, for the processes in one cgroup (version 1 or 2)."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from vllm_ssdkv.base.errors import BenchError

_V1 = Path("/sys/fs/cgroup/blkio")
_V2 = Path("/sys/fs/cgroup")


class ThrottleGroup:
    """The cgroup of one folder of devices; limits bind those who join.

    Args:
        root: Folder that the group is named after.

    Raises:
        BenchError: this kernel or container has no block-layer limits.
    """

    def __init__(self, root: Path) -> None:
        name = "ssdkv-" + hashlib.sha256(os.fsencode(root)).hexdigest()[:12]
        if (_V1 / "blkio.throttle.read_bps_device").exists():
            self._parent = _V1
        elif "io" in _read(_V2 / "cgroup.controllers").split():
            self._parent = _V2
        else:
            raise BenchError("this kernel has no block-layer limits (cgroup blkio or io)")
        self._path = self._parent / name

    @property
    def _legacy(self) -> bool:
        return self._parent == _V1

    def make(self) -> None:
        """Create the group; it may exist.

        Raises:
            BenchError: it cannot be created.
        """
        try:
            if not self._legacy:
                (self._parent / "cgroup.subtree_control").write_text("+io")
            self._path.mkdir(exist_ok=True)
        except OSError as error:
            raise BenchError(f"{self._path}: {error.strerror}") from error

    def limit(self, number: str, bandwidth: float, iops: float) -> None:
        """Limit reads and writes, each, of the block device ``major:minor``.

        Args:
            number: The device.
            bandwidth: Bytes per second.
            iops: Requests per second.

        Raises:
            BenchError: the kernel refuses.
        """
        rate, requests = round(bandwidth), round(iops)
        try:
            if self._legacy:
                for op in ("read", "write"):
                    file = self._path / f"blkio.throttle.{op}_bps_device"
                    file.write_text(f"{number} {rate}")
                    file = self._path / f"blkio.throttle.{op}_iops_device"
                    file.write_text(f"{number} {requests}")
            else:
                limits = f"rbps={rate} wbps={rate} riops={requests} wiops={requests}"
                (self._path / "io.max").write_text(f"{number} {limits}")
        except OSError as error:
            raise BenchError(f"{self._path}: limits of {number}: {error.strerror}") from error

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """This process, and what it starts, is bound by the limits inside the context."""
        self._move(self._path)
        try:
            yield
        finally:
            self._move(self._parent)

    def _move(self, group: Path) -> None:
        try:
            (group / "cgroup.procs").write_text(str(os.getpid()))
        except OSError as error:
            raise BenchError(f"{group}: cannot join: {error.strerror}") from error

    def remove(self) -> None:
        """Let go of everybody and delete the group; it need not exist.

        Raises:
            BenchError: the kernel refuses.
        """
        try:
            for process in _read(self._path / "cgroup.procs").split():
                with contextlib.suppress(ProcessLookupError):
                    (self._parent / "cgroup.procs").write_text(process)
            self._path.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            raise BenchError(f"{self._path}: {error.strerror}") from error


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
