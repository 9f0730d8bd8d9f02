"""Set several SSDs up, change them while they run, and take them down again."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.profiling.bench_io.model import DeviceModel
from vllm_ssdkv.profiling.vssd import system
from vllm_ssdkv.profiling.vssd.build import build
from vllm_ssdkv.profiling.vssd.throttle import ThrottleGroup

Kind: TypeAlias = Literal["fuse", "loop"]

DEFAULT_FOLDER = Path("/run/ssdkv-vssd")
_START_S = 20.0
_END_S = 5.0
_RAID_SHARE = 0.35
"""Part of the free space of each device that RAID-0 takes, where there is one."""


def require_fuse() -> Path:
    """The program of the virtual SSDs, built if need be.

    Raises:
        BenchError: the kernel, the compiler or libfuse is missing.
    """
    if not Path("/dev/fuse").exists():
        raise BenchError("there is no /dev/fuse: load the kernel module fuse")
    return build()


class Ssds:
    """Several devices below one folder. Root only; not thread-safe.

    Args:
        folder: Everything of these devices lies below it, so that it can be found after a crash.
    """

    def __init__(self, folder: Path = DEFAULT_FOLDER) -> None:
        self.folder = folder.absolute()
        self._fuse = self.folder / "devices"
        self._ram = self.folder / "ram"

    @property
    def control(self) -> Path:
        """File that takes commands and tells counters; virtual SSDs only."""
        return self._fuse / "control"

    # --- up

    def up(self, kind: Kind, count: int, nbytes: int, model: DeviceModel) -> list[Path]:
        """Make ``count`` devices and return a directory on each. What was there before goes down.

        Args:
            kind: ``fuse``: virtual SSDs. ``loop``: throttled RAM disks, without latency.
            count: Number of devices, 1 to 64.
            nbytes: Capacity of each in bytes, at least 32 MiB; all of it may become used memory.
            model: How fast each is.

        Raises:
            BenchError: it cannot be done here; nothing is left behind.
        """
        if not 1 <= count <= 64 or nbytes < 32 * MIB:
            raise BenchError(f"{count} devices of {nbytes} bytes: at most 64, 32 MiB at least")
        system.require_root("virtual SSDs")
        self.down()
        self.folder.mkdir(mode=0o700, parents=True)
        try:
            if kind == "fuse":
                return self._up_fuse(count, nbytes, model)
            return self._up_loop(count, nbytes, model)
        except BaseException:
            self.down()
            raise

    def _up_fuse(self, count: int, nbytes: int, model: DeviceModel) -> list[Path]:
        program = require_fuse()
        self._fuse.mkdir()
        slow = model.dilation
        numbers = (model.bandwidth / slow, model.latency_s * slow, model.iops / slow)
        command = [str(program), str(self._fuse), str(count), str(nbytes), *map(repr, numbers)]
        log = self.folder / "log"
        with log.open("wb") as output:
            # A session of its own: an interrupt of the bench must not take the devices away.
            child = subprocess.Popen(
                command, stdout=output, stderr=output, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + _START_S
        while not log.read_bytes().startswith(b"up"):
            if child.poll() is not None or time.monotonic() > deadline:
                raise BenchError(f"the virtual SSDs did not start: {log.read_text()}")
            time.sleep(0.01)
        return [self._fuse / str(device) for device in range(count)]

    def _up_loop(self, count: int, nbytes: int, model: DeviceModel) -> list[Path]:
        group = ThrottleGroup(self.folder)
        group.make()
        self._ram.mkdir()
        size = count * nbytes + MIB
        system.call("mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "ssdkv", str(self._ram))
        directories = []
        for device in range(count):
            image = self._ram / f"{device}.img"
            image.touch()
            os.truncate(image, nbytes)
            loop = system.attach_loop(image, direct=False)
            options = ["-q", "-m", "0", "-O", "^has_journal", "-E", "lazy_itable_init=0"]
            system.call("mkfs.ext4", *options, str(loop))
            directory = self.folder / f"loop{device}"
            directory.mkdir()
            system.call("mount", "-o", "noatime", str(loop), str(directory))
            self._limit(group, loop, model)
            directories.append(directory)
        return directories

    def _limit(self, group: ThrottleGroup, loop: Path, model: DeviceModel) -> None:
        slow = model.dilation
        group.limit(system.device_number(loop), model.bandwidth / slow, model.iops / slow)

    def raid0(self, directories: list[Path]) -> Path:
        """One file system, btrfs RAID-0, over part of each device; returns where it is mounted.

        It has neither checksums nor copy on write, so that nothing but striping is measured.

        Raises:
            BenchError: it cannot be made here.
        """
        loops = []
        for directory in directories:
            image = directory / "raid.img"
            status = os.statvfs(directory)
            free = status.f_bavail * status.f_frsize
            with image.open("xb") as file:
                os.posix_fallocate(file.fileno(), 0, int(free * _RAID_SHARE) // MIB * MIB)
            loops.append(system.attach_loop(image, direct=True))
        system.call("mkfs.btrfs", "-q", "-f", "-K", "-d", "raid0", "-m", "raid0", *map(str, loops))
        place = self.folder / "raid"
        place.mkdir()
        names = ",".join(f"device={loop}" for loop in loops)
        system.call("mount", "-o", f"nodatasum,nodatacow,{names}", str(loops[0]), str(place))
        return place

    @contextlib.contextmanager
    def limited(self) -> Iterator[None]:
        """Throttled RAM disks slow down only those inside this context; others need none."""
        if self._ram.exists():
            with ThrottleGroup(self.folder).joined():
                yield
        else:
            yield

    # --- while they run

    def command(self, *lines: str) -> None:
        """Change virtual SSDs or inject faults, e.g. ``3 bandwidth 30`` or ``0 stall 500``.

        A line is a device and one of: ``bandwidth`` MB/s, ``latency`` microseconds, ``iops`` N,
        ``eio`` FILE OFFSET BYTES, ``corrupt`` FILE OFFSET BYTES, ``stall`` milliseconds, ``hang``,
        ``dead``, ``full``, ``heal``. FILE is a path below the device's directory.

        Raises:
            BenchError: there are none, or a line is not understood.
        """
        try:
            with self.control.open("wb", buffering=0) as control:
                for line in lines:
                    control.write(line.encode() + b"\n")
        except OSError as error:
            raise BenchError(f"{self.control}: {error.strerror}: {'; '.join(lines)}") from error

    def slow_down(self, device: int, model: DeviceModel) -> None:
        """Give one device another model.

        Raises:
            BenchError: there is no such device.
        """
        if self._ram.exists():
            image = self._ram / f"{device}.img"
            loops = [loop for loop in system.loop_devices(self.folder) if loop.backing == image]
            if not loops:
                raise BenchError(f"there is no device {device}")
            self._limit(ThrottleGroup(self.folder), loops[0].path, model)
            return
        slow = model.dilation
        self.command(
            f"{device} bandwidth {model.bandwidth / slow / 1e6}",
            f"{device} latency {model.latency_s * slow * 1e6}",
            f"{device} iops {model.iops / slow}",
        )

    def counters(self) -> list[dict[str, Any]]:
        """Per virtual SSD: I/Os, bytes moved, bytes used.

        Raises:
            BenchError: there are none.
        """
        try:
            text = self.control.read_text()
        except OSError as error:
            raise BenchError(f"{self.control}: {error.strerror}") from error
        found: list[dict[str, Any]] = json.loads(text)
        return found

    # --- down

    def down(self) -> None:
        """Remove everything, also what a killed process left; there may be nothing.

        Raises:
            BenchError: something could not be removed; the text says what.
        """
        system.require_root("virtual SSDs")
        self._heal()
        problems: list[str] = []
        # File systems on loop devices, then the devices, then what their files lie on.
        base = {self._fuse, self._ram}
        for point in system.mount_points(self.folder):
            if point not in base:
                self._unmount(point, problems)
        for loop in system.loop_devices(self.folder):
            self._attempt(problems, "losetup", "--detach", str(loop.path))
        for point in system.mount_points(self.folder):
            self._unmount(point, problems)
        self._end_processes(problems)
        with contextlib.suppress(BenchError):  # a kernel without limits has no group to remove
            ThrottleGroup(self.folder).remove()
        if not system.mount_points(self.folder):
            shutil.rmtree(self.folder, ignore_errors=True)
        if self.folder.exists():
            problems.append(f"{self.folder} is still there")
        if problems:
            raise BenchError("; ".join(problems))

    def _heal(self) -> None:
        """End hangs, or unmounting would wait for them. A dead file system may not answer."""

        def heal() -> None:
            with contextlib.suppress(BenchError):
                self.command(*(f"{entry['device']} heal" for entry in self.counters()))

        thread = threading.Thread(target=heal, daemon=True)
        thread.start()
        thread.join(_END_S)

    def _attempt(self, problems: list[str], *command: str) -> None:
        try:
            system.call(*command)
        except BenchError as error:
            problems.append(str(error))

    def _unmount(self, point: Path, problems: list[str]) -> None:
        try:
            system.call("umount", str(point))
        except BenchError:
            self._attempt(problems, "umount", "--lazy", str(point))

    def _end_processes(self, problems: list[str]) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in system.processes_of(self._fuse):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)
            deadline = time.monotonic() + _END_S
            while system.processes_of(self._fuse):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.02)
            else:
                return
        problems.append(f"processes do not end: {system.processes_of(self._fuse)}")


@contextlib.contextmanager
def ssds(
    kind: Kind, count: int, nbytes: int, model: DeviceModel, folder: Path = DEFAULT_FOLDER
) -> Iterator[tuple[Ssds, list[Path]]]:
    """Devices that go down at the end, however it comes; see :meth:`Ssds.up`.

    After a SIGKILL they stay; the next use of the folder, or ``down``, removes them.
    """
    devices = Ssds(folder)
    directories = devices.up(kind, count, nbytes, model)
    try:
        with devices.limited():
            yield devices, directories
    finally:
        devices.down()
