"""Discovery of devices, by the names in their data files.

A device is recognised by the UUID in a superblock, wherever it is mounted and whatever its place in
the list of devices. Its path decides only where no data file says who it is.
"""

from __future__ import annotations

import errno
import logging
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from vllm_ssdkv.base.errors import DeviceError, FormatError
from vllm_ssdkv.store.devices.data_file import peek_superblock
from vllm_ssdkv.store.format.manifest import ManifestDevice
from vllm_ssdkv.store.format.segment import Extent, Segment
from vllm_ssdkv.store.format.superblock import data_file_path

logger = logging.getLogger(__name__)

_GONE = {errno.EIO, errno.ENXIO, errno.ENODEV, errno.ENOTCONN, errno.ESHUTDOWN, errno.EUCLEAN}
"""Errors of a drive that is dead, or was pulled out. People have to repair other errors."""


@dataclass(frozen=True, slots=True)
class Sight:
    """Findings at one path."""

    path: str
    names: frozenset[str]
    """UUIDs of this store's data files there."""
    missing: str = ""
    """Reason why there is no device, empty if there is one."""


def look(path: str, tp_size: int, store: str) -> Sight:
    """Look at a path, reading superblocks. Blocks on I/O; raises nothing.

    Args:
        path: Directory or block device.
        tp_size: Ranks that have a data file there.
        store: UUID of the store.
    """
    place = Path(path)
    try:
        mode = place.stat().st_mode
    except FileNotFoundError:
        if place.parent.exists():
            return Sight(path, frozenset())
        return Sight(
            path,
            frozenset(),
            f"does not exist, nor does {place.parent}: mount the file system there, or create the "
            f"directory with `mkdir -p {place}`",
        )
    except OSError as error:
        return Sight(path, frozenset(), _reason(error))
    names: set[str] = set()
    ranks = [data_file_path(place, rank) for rank in range(tp_size)]
    for file in [place] if stat.S_ISBLK(mode) else ranks:
        try:
            block = peek_superblock(file)
        except FormatError:
            continue  # whoever claims the file says what is wrong
        except OSError as error:
            why = _reason(error)
            if why:
                return Sight(path, frozenset(names), why)
            continue
        if block is not None and str(block.store) == store:
            names.add(str(block.device))
    return Sight(path, frozenset(names))


def _reason(error: OSError) -> str:
    return f"does not answer ({error.strerror})" if error.errno in _GONE else ""


def matched(devices: Sequence[ManifestDevice], sights: Sequence[Sight]) -> list[int | None]:
    """Number of the device seen at each path; None for a new one.

    Names go before paths: a drive may be mounted where another one was.

    Raises:
        DeviceError: two paths show the same device.
    """
    found: list[int | None] = []
    for sight in sights:
        known = (i for i, d in enumerate(devices) if sight.names & set(d.files))
        found.append(next(known, None))
    for i, number in enumerate(found):
        if number is not None and number in found[:i]:
            other = sights[found.index(number)].path
            raise DeviceError(
                f"{other} and {sights[i].path} hold copies of the same data file: name only one of "
                "them in devices"
            )
    for i, sight in enumerate(sights):
        if found[i] is None:  # nothing of ours, or data files of which the manifest knows nothing
            known = (k for k, d in enumerate(devices) if d.path == sight.path and k not in found)
            found[i] = next(known, None)
    return found


def renumbered(segments: Sequence[Segment], number: dict[int, int]) -> list[Segment]:
    """The segments with other device numbers (old to new); other devices lose their extents."""
    return [
        replace(
            s,
            lanes=tuple(number[device] for device in s.lanes),
            extents=tuple(
                Extent(number[e.device], e.begin, e.units) for e in s.extents if e.device in number
            ),
        )
        for s in segments
    ]
