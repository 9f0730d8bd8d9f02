"""Traces of ours in the kernel: mounts, loop devices and processes, all below one folder."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.base.host import mounts

_TIMEOUT_S = 60.0
_BLOCK = Path("/sys/block")


def call(*command: str) -> str:
    """Standard output of a program of the system.

    Raises:
        BenchError: it is missing, failed, or did not end in a minute.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except FileNotFoundError as error:
        raise BenchError(f"{command[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"{' '.join(command)} did not end in {_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        raise BenchError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def require_root(what: str) -> None:
    """Check that this process may mount.

    Raises:
        BenchError: it may not.
    """
    if os.geteuid() != 0:
        raise BenchError(
            f"{what} need root; without it: ssdkv lab bench io DIR --emulate N, which slows "
            "devices down inside our own engines"
        )


@dataclass(frozen=True, slots=True)
class LoopDevice:
    """A loop device and the file behind it."""

    path: Path
    backing: Path


def loop_devices(root: Path) -> list[LoopDevice]:
    """Loop devices whose file lies, or lay, below ``root``."""
    found = []
    for entry in sorted(_BLOCK.glob("loop*/loop/backing_file")):
        try:
            text = entry.read_text().removesuffix("\n").removesuffix(" (deleted)")
        except OSError:
            continue  # detached in the meantime
        if Path(text).is_relative_to(root):
            found.append(LoopDevice(Path("/dev") / entry.parent.parent.name, Path(text)))
    return found


def mount_points(root: Path) -> list[Path]:
    """Mounts below ``root``, the last mounted first."""
    points = [Path(mount.point) for mount in mounts()]
    return [point for point in reversed(points) if point.is_relative_to(root)]


def attach_loop(file: Path, *, direct: bool) -> Path:
    """Loop device over a file, without an I/O scheduler.

    Raises:
        BenchError: there is none free, or losetup is missing.
    """
    mode = "on" if direct else "off"
    device = Path(call("losetup", "--find", "--show", f"--direct-io={mode}", str(file)).strip())
    with contextlib.suppress(OSError):  # a kernel without schedulers has none to turn off
        (_BLOCK / device.name / "queue/scheduler").write_text("none")
    return device


def device_number(device: Path) -> str:
    """``major:minor`` of a block device."""
    number = os.stat(device).st_rdev
    return f"{os.major(number)}:{os.minor(number)}"


def processes_of(mount: Path) -> list[int]:
    """Ids of the file systems that serve, or served, this mount point."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # ended in the meantime
        if (
            len(arguments) > 1
            and re.fullmatch(rb"(.*/)?vssd-[0-9a-f]{16}", arguments[0])
            and arguments[1] == os.fsencode(mount)
        ):
            found.append(int(entry.name))
    return found
