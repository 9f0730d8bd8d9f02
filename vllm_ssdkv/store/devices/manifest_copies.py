"""Copies of the manifest, one on every device, for the day on which the state directory is lost.

In a directory the copy is a file. On a raw block device it lies behind the superblocks, in two
areas that are written in turn, so that a torn write leaves the other one (``docs/format.md``).

A copy may be older than the manifest, after a crash or when its device could not be written. Then
it names places that slots have left: headers and checksums refuse what lies there now, so an old
copy costs hits and never serves wrong bytes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_ssdkv.base.durable_file import replace_file, write_all
from vllm_ssdkv.base.errors import DamagedError, FormatError, StoreError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store.devices.discovery import look
from vllm_ssdkv.store.format.manifest import COPY, Manifest
from vllm_ssdkv.store.format.slot_geometry import PAGE_ALIGN, round_up
from vllm_ssdkv.store.format.superblock import BLOCK_BYTES, COPY_OFFSETS

logger = logging.getLogger(__name__)

MAGIC = b"SSDKVMAN"
AREAS = tuple(offset + BLOCK_BYTES for offset in COPY_OFFSETS)
"""Offsets of the copies on a raw block device."""

AREA_BYTES = COPY_OFFSETS[1] - BLOCK_BYTES
_LENGTH_BYTES = 8
_HEAD_BYTES = len(MAGIC) + _LENGTH_BYTES
DEADLINE_S = 10.0
"""A device that has not taken its copy by then gets none until the next start."""


@dataclass(frozen=True, slots=True)
class FoundCopy:
    """A copy of a manifest, and the device that it lies on."""

    place: Path
    manifest: Manifest


def read_copy(place: Path) -> Manifest | None:
    """The copy on a device; None where there is none. Blocks on I/O.

    Args:
        place: Directory or block device; it may be missing.

    Raises:
        DamagedError: it is damaged.
        FormatError: it is of another version.
        StoreError: it cannot be read.
    """
    try:
        if not place.is_block_device():
            return Manifest.load_copy(place)
        texts = _texts(place)
    except OSError as error:
        raise StoreError(f"{place}: {error.strerror}") from error
    found: list[Manifest] = []
    problem: FormatError | None = None
    for text in texts.values():
        try:
            found.append(Manifest.decode(text, place))
        except FormatError as error:
            problem = error
    if not found and problem is not None:
        raise problem
    return max(found, key=lambda manifest: manifest.revision, default=None)


def _texts(device: Path) -> dict[int, bytes]:
    """Contents of the areas of a block device that have any, by where they begin; or OSError."""
    texts: dict[int, bytes] = {}
    fd = os.open(device, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        for area in AREAS:
            head = os.pread(fd, _HEAD_BYTES, area)
            length = int.from_bytes(head[len(MAGIC) :], "little")
            if head.startswith(MAGIC) and length <= AREA_BYTES - _HEAD_BYTES:
                texts[area] = os.pread(fd, length, area + _HEAD_BYTES)
    finally:
        os.close(fd)
    return texts


def _oldest_area(device: Path) -> int:
    """The area that does not hold the newest copy. Raises OSError."""
    revisions = dict.fromkeys(AREAS, -1)
    for area, text in _texts(device).items():
        with contextlib.suppress(FormatError):
            revisions[area] = Manifest.decode(text, device).revision
    return min(AREAS, key=lambda area: revisions[area])


def copies_on(places: Iterable[Path]) -> tuple[list[FoundCopy], list[FormatError]]:
    """The copies on devices, and what is wrong with those that are damaged. Blocks on I/O.

    Devices that cannot be read have none.
    """
    found: list[FoundCopy] = []
    damaged: list[FormatError] = []
    for place in places:
        try:
            manifest = read_copy(place)
        except FormatError as error:
            damaged.append(error)
        except StoreError:
            continue  # whoever looks at the devices says what is wrong with this one
        else:
            if manifest is not None:
                found.append(FoundCopy(place, manifest))
    return found, damaged


def newest(copies: Sequence[FoundCopy], store: str | None = None) -> FoundCopy | None:
    """The copy with the highest revision of those that count; the first one of equals.

    A copy counts where its device holds data of its store: what somebody left behind does not.
    Blocks on I/O.

    Args:
        copies: See :func:`copies_on`.
        store: UUID of the store; None: of any.
    """
    best: FoundCopy | None = None
    for copy in copies:
        manifest = copy.manifest
        if store is not None and manifest.store != store:
            continue
        if best is not None and manifest.revision <= best.manifest.revision:
            continue
        if holds_data(copy.place, manifest):
            best = copy
    return best


def holds_data(place: Path, manifest: Manifest) -> bool:
    """Check whether a superblock on the device names the manifest's store. Blocks on I/O."""
    return bool(look(str(place), manifest.tp_size, manifest.store).names)


def write_copy(place: Path, manifest: Manifest) -> None:
    """Write the copy on a device, atomically and durably. Blocks on I/O.

    Raises:
        StoreError: it cannot be written; or it is too large for a block device.
    """
    try:
        if place.is_block_device():
            _write_area(place, manifest)
        else:
            replace_file(place / COPY, manifest.text)
    except OSError as error:
        raise StoreError(f"{place / COPY}: {error.strerror}") from error


def _write_area(device: Path, manifest: Manifest) -> None:
    text = manifest.text
    data = MAGIC + len(text).to_bytes(_LENGTH_BYTES, "little") + text
    if len(data) > AREA_BYTES:
        raise StoreError(f"{device}: a copy of {len(text)} bytes does not fit {AREA_BYTES}")
    area = _oldest_area(device)
    fd = os.open(device, os.O_WRONLY | os.O_CLOEXEC)
    try:
        padded = data.ljust(round_up(len(data), PAGE_ALIGN), b"\0")
        write_all(fd, padded, area)
        os.fdatasync(fd)
    finally:
        os.close(fd)


def wipe_copies(fd: int, store: str) -> None:
    """Overwrite a store's copies on an open block device with zeros; others stay. Blocks on I/O.

    Raises:
        OSError: it cannot be read or written.
    """
    for area in AREAS:
        data = os.pread(fd, AREA_BYTES, area)
        length = int.from_bytes(data[len(MAGIC) : _HEAD_BYTES], "little")
        try:
            text = data[_HEAD_BYTES : _HEAD_BYTES + length] if data.startswith(MAGIC) else b""
            owner = Manifest.decode(text, Path()).store
        except DamagedError:
            owner = store  # the caller has checked the superblock
        except FormatError:
            continue
        if owner == store:
            write_all(fd, bytes(AREA_BYTES), area)


def _is_whole(place: Path, manifest: Manifest) -> bool:
    """Check whether the copy on a device is of this manifest, or a newer one; or StoreError."""
    try:
        found = read_copy(place)
    except DamagedError:
        return False
    if found is None or found.store != manifest.store:
        return False
    return found.revision >= manifest.revision


class CopySpreader:
    """Writes the manifest to all devices of a store. Any thread; one call waits for the other.

    A device that hangs holds up nobody for longer than the deadline, and once.
    """

    def __init__(self, counters: Counters, deadline_s: float = DEADLINE_S):
        """``counters``: for ``manifest_copy_errors`` and ``state_files_restored``."""
        self._lock = threading.Lock()
        self._counters = counters
        self._deadline_s = deadline_s
        self._out: set[str] = set()
        self._told: set[str] = set()

    def spread(self, manifest: Manifest) -> None:
        """Write the manifest, as it was saved last, to every device that is present. Blocks.

        What cannot be written is logged once per device, and counted: the store works without.
        """
        with self._lock:
            self._on_devices(manifest, self._write, self._out)

    def mend(self, manifest: Manifest) -> None:
        """Write it to devices whose copy is missing, damaged, older or another store's. Blocks.

        Each is logged and counted. Devices that could not be written before are left alone.
        """
        with self._lock:
            self._on_devices(manifest, self._mend, self._out | self._told)

    def _on_devices(
        self,
        manifest: Manifest,
        target: Callable[[str, Manifest], None],
        without: set[str],
    ) -> None:
        state = manifest.state
        jobs: dict[str, threading.Thread] = {}
        for path in [device.path for device in manifest.present()]:
            if path not in without and str(Path(path).resolve()) != state:
                jobs[path] = threading.Thread(
                    target=target, args=(path, manifest), name="ssdkv-copy", daemon=True
                )
                jobs[path].start()
        end = time.monotonic() + self._deadline_s
        for path, job in jobs.items():
            job.join(max(0.0, end - time.monotonic()))
            if job.is_alive():
                self._out.add(path)
                self.failed(path, f"it did not end within {self._deadline_s:g} s")

    def _write(self, path: str, manifest: Manifest) -> None:
        place = Path(path)
        try:
            if holds_data(place, manifest):
                write_copy(place, manifest)
        except Exception as error:  # noqa: BLE001 - whatever it is, the store goes on without
            self.failed(path, str(error))

    def _mend(self, path: str, manifest: Manifest) -> None:
        place = Path(path)
        try:
            if not _is_whole(place, manifest) and holds_data(place, manifest):
                write_copy(place, manifest)
                logger.error(
                    "ssdkv: %s was missing, replaced or damaged under a running engine: it is "
                    "written again",
                    place / COPY,
                )
                self._counters.add("state_files_restored", file=COPY)
        except Exception as error:  # noqa: BLE001 - whatever it is, the store goes on without
            self.failed(path, str(error))

    def failed(self, path: str, why: str) -> None:
        """A device has a copy that is out of date: count it, and say so once. Any thread."""
        self._counters.add("manifest_copy_errors")
        if path not in self._told:
            self._told.add(path)
            logger.warning(
                "ssdkv: device %s has no up-to-date copy of store.json (%s); the store goes on",
                path,
                why,
            )
