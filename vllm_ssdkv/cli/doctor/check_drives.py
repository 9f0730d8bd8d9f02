"""``ssdkv doctor``: which drives a path lies on, as the kernel names them in sysfs."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vllm_ssdkv.base.host import existing_parent
from vllm_ssdkv.cli.doctor.check_result import Finding, ok, warn

BLOCK_DEVICES: Final = Path("/sys/dev/block")


@dataclass(frozen=True, slots=True)
class Drive:
    """A whole drive.

    Attributes:
        name: The kernel's, e.g. ``nvme0n1``.
        model: As the drive says; empty for most virtual ones.
        rotational: Whether the kernel takes it for a spinning disk.
    """

    name: str
    model: str
    rotational: bool


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def _below(node: Path) -> Iterator[Drive]:
    """The drives that a block device is made of: itself, or those below RAID, LVM and dm-crypt."""
    if (node / "partition").exists():
        node = node.parent
    slaves = sorted((node / "slaves").glob("*"))
    for slave in slaves:
        yield from _below(slave.resolve())
    if not slaves:
        rotational = _text(node / "queue" / "rotational") == "1"
        yield Drive(node.name, _text(node / "device" / "model"), rotational)


def drives_of(path: Path, source: str = "", block_devices: Path = BLOCK_DEVICES) -> list[Drive]:
    """The drives that hold a path, which need not exist; empty where there is none.

    Args:
        source: What its file system is mounted from: btrfs has no device number of its own.
        block_devices: Where sysfs lists them.
    """
    for place in (existing_parent(path), Path(source)):
        try:
            status = os.stat(place)
        except OSError:
            continue
        number = status.st_rdev if stat.S_ISBLK(status.st_mode) else status.st_dev
        node = block_devices / f"{os.major(number)}:{os.minor(number)}"
        if node.exists():
            return list(dict.fromkeys(_below(node.resolve())))
    return []


def drives(subject: str, found: list[Drive]) -> list[Finding]:
    """Their models; nothing where there is no drive, of which the file system's finding tells."""
    if not found:
        return []
    text = ", ".join(
        f"{d.model or 'without a model, as virtual ones are'} ({d.name})" for d in found
    )
    # Virtual drives often say so by mistake.
    spinning = [drive.name for drive in found if drive.rotational and drive.model]
    if spinning:
        cure = "name a directory on an SSD: reads of single pages would wait for the head"
        return [warn(subject, f"{text}: spinning", cure)]
    return [ok(subject, text)]
