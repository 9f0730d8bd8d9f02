"""``store.json``: identity and size of a store, shared by the scheduler and all workers.

A small JSON file, written whole and renamed into place, mode 0600. What it says is checked when it
is read: a checksum of the file, types, names and ranges (``docs/format.md``). There is a copy
beside it, and one on every device (:mod:`vllm_ssdkv.store.devices.manifest_copies`).
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Literal

import msgspec

from vllm_ssdkv.base.checksum import NO_DIGITS, check_seal, has_checksum, sealed
from vllm_ssdkv.base.durable_file import read_regular, replace_file
from vllm_ssdkv.base.errors import (
    DamagedError,
    FingerprintMismatchError,
    FormatError,
    KeyMismatchError,
    StoreError,
)
from vllm_ssdkv.base.file_access import why_refused
from vllm_ssdkv.base.file_lock import lock_file
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.format.segment import Segment
from vllm_ssdkv.store.format.slot_geometry import (
    PageRecord,
    SlotGeometry,
    of_another_version,
    with_equal_units,
)
from vllm_ssdkv.store.format.superblock import KEY_ID_BYTES, data_file_path

NAME = "store.json"
COPY = "store.json.copy"
VERSIONS = (1, 4, 5, 6, 7)
"""Versions that can be read. The last three are written: 7 if ranks have slots of several sizes,
else 6 if segments have a rule or the geometry has a record. The first two are
:attr:`SlotGeometry.version`, and know no :attr:`Manifest.revision`."""

RULED = 6
"""Version since which segments may have a rule, and the geometry a record."""

_OF_SAMPLED_WEIGHTS = frozenset({"model", "hf_config"})
"""Fields of fingerprints before keys were bound to the weights in memory."""


class ManifestDevice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One device: where it was last seen, its size, and the data file of each rank."""

    path: str
    capacity: int
    weight: float
    rate: float = 0.0
    """Bytes per second that it was measured to read at; 0: it never was."""
    files: list[str]
    """UUID of each rank's data file; empty until the rank has made it."""
    present: bool = True
    """True if the store was last opened with it."""
    fresh: list[int] = []
    """Ranks whose data file was made anew since the scheduler last opened the store."""
    gap: tuple[int, int] = (0, 0)
    """Openings of the store [begin, end) in which the device was away, out of use, or had a data
    file that is lost: second copies of what was stored then are not on it."""

    def missed(self, begin: int, end: int) -> None:
        """These openings are to be in the gap, too."""
        if self.gap[0] < self.gap[1]:
            begin, end = min(begin, self.gap[0]), max(end, self.gap[1])
        self.gap = (begin, end)


class RankShape(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Slots of one rank, where those of another one are larger or smaller."""

    layers: int
    payload_bytes: int


class _Versioned(msgspec.Struct):
    """The part of ``store.json`` that every version has."""

    version: int
    store: str = ""


class Manifest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Contents of ``store.json``. Change it only between :func:`locked` and :meth:`save`."""

    version: int = VERSIONS[2]
    store: str
    model: str
    """The model's name as it was last given; for people, nothing depends on it."""
    fingerprint: dict[str, str | int]
    kind: str
    layers: int
    heads: int
    groups: int
    payload_bytes: int
    summary_pages: int
    channel_pages: int | msgspec.UnsetType = msgspec.UNSET
    """Channel pages, left out if there are none."""
    scaled_from: int | msgspec.UnsetType = msgspec.UNSET
    """Bytes of a number of K, left out if there are no codes."""
    record: PageRecord | msgspec.UnsetType = msgspec.UNSET
    """Record of a page's summary, left out if summaries are bounds."""
    shapes: list[RankShape] | msgspec.UnsetType = msgspec.UNSET
    """Slots of each rank, left out if all are as those of rank 0, which the fields above describe.
    """
    tp_size: int
    """Number of ranks: tensor-parallel ones of each pipeline stage, the first stage's first."""
    devices: list[ManifestDevice]
    """Devices present, in the order of the options, then absent ones that hold slots."""
    key_id: str
    """Names the key that the store is encrypted with (:attr:`StoreKey.key_id`), in hexadecimal
    digits; empty for a store that is not encrypted."""
    segments: list[Segment]
    numbers: int
    """Slot numbers are below this."""
    fresh: list[int] = []
    """First slots of segments that were made since the scheduler last opened the store."""
    grows: bool = False
    """True if the store is smaller than its capacities, and grows as blocks are stored."""
    run: str = ""
    """The engine that has arranged devices and segments: its other processes take them as they are.
    """
    opened: int = 0
    """Number of times that a scheduler has opened the store."""
    last_opened: int = 0
    """Time of the last opening, in seconds since 1970 (UTC)."""
    model_digests: list[str] = []
    """Digest of the weights of each rank of that engine, in hexadecimal digits: none until it has
    opened the store, an empty one until its rank has told."""
    bound_to: dict[str, str | int] = {}
    """Settings that change KV, and weights, that keys of the last engine are bound to."""
    suspended: str = ""
    """Reason why nothing is found or stored until somebody resumes the store; empty: it is in
    use."""
    revision: int = 0
    """Grows with every save, and is not behind the seconds since 1970 (UTC): of several copies the
    highest one counts."""
    state: str = ""
    """The state directory at the last save, without symbolic links; empty before version 5. A
    manifest that lies elsewhere is a copy."""
    inode: int = 0
    """Inode of that directory: one with another number is a copy, too, wherever it is mounted."""
    checksum: str = NO_DIGITS
    """Digits only in the file, see :func:`sealed`."""

    @classmethod
    def create(
        cls,
        fingerprint: Fingerprint,
        geometries: Sequence[SlotGeometry],
        model: str = "",
        key_id: bytes = b"",
    ) -> Manifest:
        """A new store's manifest, without devices. ``geometries``: of each rank's slots."""
        geometry = geometries[0]
        shapes: list[RankShape] | msgspec.UnsetType = msgspec.UNSET
        if len(set(geometries)) > 1:
            shapes = [
                RankShape(layers=one.layers, payload_bytes=one.payload_bytes) for one in geometries
            ]
        return cls(
            store=str(uuid.uuid4()),
            model=model,
            fingerprint=dict(fingerprint.fields),
            kind=geometry.kind,
            layers=geometry.layers,
            heads=geometry.heads,
            groups=geometry.groups,
            payload_bytes=geometry.payload_bytes,
            summary_pages=geometry.summary_pages,
            channel_pages=geometry.channel_pages or msgspec.UNSET,
            scaled_from=geometry.scaled_from or msgspec.UNSET,
            record=msgspec.UNSET if geometry.record == "bounds" else geometry.record,
            shapes=shapes,
            tp_size=len(geometries),
            key_id=key_id.hex(),
            devices=[],
            segments=[],
            numbers=0,
        )

    @property
    def geometry(self) -> SlotGeometry:
        """Shape of the slots of rank 0, which have as many units as those of any other."""
        return self.geometries[0]

    @property
    def geometries(self) -> tuple[SlotGeometry, ...]:
        """Shape of each rank's slots."""
        first = self._geometry
        if self.shapes is msgspec.UNSET:
            return (first,) * self.tp_size
        return with_equal_units(
            [
                replace(first, layers=one.layers, payload_bytes=one.payload_bytes)
                for one in self.shapes
            ]
        )

    @property
    def _geometry(self) -> SlotGeometry:
        """Shape that the fields describe."""
        kind: Literal["opaque", "paged"] = "paged" if self.kind == "paged" else "opaque"
        return SlotGeometry(
            kind,
            self.layers,
            self.heads,
            self.groups,
            self.payload_bytes,
            encrypted=bool(self.key_id),
            summary_pages=self.summary_pages,
            channel_pages=self.channel_pages or 0,
            scaled_from=self.scaled_from or 0,
            record=self.record or "bounds",
        )

    @classmethod
    def load(cls, state: Path) -> Manifest | None:
        """The manifest in a state directory; None when there is none. Blocks on I/O.

        Raises:
            DamagedError: it is damaged, or missing while its copy is there; says how to go on.
            FormatError: it is of another version.
            StoreError: the file cannot be read.
        """
        found = cls.read(state / NAME)
        if found is None and (state / COPY).exists():
            raise DamagedError(
                f"{state / NAME} is missing, but its copy is there: {way_out(state)}"
            )
        return found

    @classmethod
    def load_copy(cls, state: Path) -> Manifest | None:
        """As :meth:`load`, the copy. It may be one save older, after a crash."""
        return cls.read(state / COPY)

    @classmethod
    def read(cls, path: Path) -> Manifest | None:
        """The manifest in a file; None when there is none. Blocks on I/O.

        Raises:
            DamagedError, FormatError, StoreError: as :meth:`load`.
        """
        try:
            data = read_regular(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"{path}: {why_refused(path, error)}") from error
        return cls.decode(data, path)

    @classmethod
    def decode(cls, data: bytes, path: Path) -> Manifest:
        """The manifest from its text; ``path`` names it in errors.

        Raises:
            DamagedError, FormatError: as :meth:`load`.
        """
        try:
            version = msgspec.json.decode(data, type=_Versioned).version
            if version in VERSIONS or has_checksum(data):
                check_seal(data)  # a damaged version is no other release's
            if version not in VERSIONS:
                raise _of_another(path, str(version))
            found = msgspec.json.decode(data, type=cls)
            if found.version == 1 and found.summary_pages:  # they came first then
                raise _of_another(path, "1, with summary pages")
            if found.channel_pages and found.scaled_from:
                raise _of_another(path, f"{found.version}, with channels in int8")
            found._check_values()
            found.checksum = NO_DIGITS
        except (msgspec.MsgspecError, ValueError) as error:
            raise DamagedError(f"{path} is damaged ({error}): {way_out(path.parent)}") from error
        return found

    def _check_values(self) -> None:
        """Raise ValueError, naming the field, for what no release writes."""
        uuid.UUID(self.store)
        positive = {"tp_size": self.tp_size, "numbers": self.numbers}
        for i, device in enumerate(self.devices):
            where = f"devices[{i}]"
            positive |= {f"{where}.capacity": device.capacity}
            if not (isfinite(device.weight) and device.weight > 0):
                raise ValueError(f"{where}.weight is {device.weight}")
            if not (isfinite(device.rate) and device.rate >= 0):
                raise ValueError(f"{where}.rate is {device.rate}")
            if len(device.files) != self.tp_size:
                raise ValueError(f"{where}.files has {len(device.files)} entries")
            for file in device.files:
                if file:
                    uuid.UUID(file)
            if not set(device.fresh) <= set(range(self.tp_size)):
                raise ValueError(f"{where}.fresh is {device.fresh}")
            if not 0 <= device.gap[0] <= device.gap[1] < 1 << 22:
                raise ValueError(f"{where}.gap is {device.gap}")
        for name, value in positive.items():
            if value <= 0:
                raise ValueError(f"{name} is {value}")
        if self.shapes is not msgspec.UNSET:
            mine = RankShape(layers=self.layers, payload_bytes=self.payload_bytes)
            alike = all(one == mine for one in self.shapes)
            if len(self.shapes) != self.tp_size or self.shapes[0] != mine or alike:
                raise ValueError(f"shapes is {self.shapes}")
            if self.version < VERSIONS[-1] or self.kind != "opaque":
                raise ValueError(f"version {self.version}, and {self.kind} slots have shapes")
        digests = self.model_digests or [""] * self.tp_size
        if len(digests) != self.tp_size:
            raise ValueError(f"model_digests has {len(digests)} entries")
        for digest in digests:
            bytes.fromhex(digest)
        if self.kind not in ("opaque", "paged"):
            raise ValueError(f"kind is {self.kind!r}")
        if not self.devices:
            raise ValueError("devices is empty")
        if len(bytes.fromhex(self.key_id)) not in (0, KEY_ID_BYTES):
            raise ValueError(f"key_id is {self.key_id!r}")
        if not any(device.present for device in self.devices):
            raise ValueError("no device is present")
        for i, segment in enumerate(self.segments):
            numbers = (segment.first, segment.numbers, segment.slots)
            named = {*segment.lanes, *(extent.device for extent in segment.extents)}
            low = min(*numbers, *(min(e.begin, e.units - 1) for e in segment.extents))
            if low < 0 or not named <= set(range(len(self.devices))):
                raise ValueError(f"segments[{i}] is {segment}")
            if segment.rule is not msgspec.UNSET and self.version < RULED:
                raise ValueError(f"version {self.version}, and segments[{i}] has a rule")
            if segment.copies not in (1, 2) or segment.since < 0:
                raise ValueError(
                    f"segments[{i}].copies is {segment.copies}, since is {segment.since}"
                )
            if segment.first + segment.numbers > self.numbers:
                raise ValueError(f"numbers is {self.numbers}, segments[{i}] is {segment}")
        if min(self.fresh, default=0) < 0:
            raise ValueError(f"fresh is {self.fresh}")
        if min(self.opened, self.last_opened, self.revision) < 0:
            raise ValueError(
                f"opened is {self.opened}, last_opened is {self.last_opened}, "
                f"revision is {self.revision}"
            )
        # Geometries check their numbers.
        if not self.geometries or self._geometry.version != self.version < 5:
            raise ValueError(f"version {self.version}, and summary_pages is {self.summary_pages}")

    @property
    def _version(self) -> int:
        """Version to write: older releases refuse later ones. Segments by a rule and ranks with
        slots of several sizes they would misread, and a record they would take for damage."""
        if self.shapes is not msgspec.UNSET:
            return VERSIONS[-1]
        ruled = any(segment.rule is not msgspec.UNSET for segment in self.segments)
        return RULED if ruled or self.record is not msgspec.UNSET else VERSIONS[2]

    @property
    def text(self) -> bytes:
        """Content of the file."""
        return sealed(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    def save(self, state: Path) -> None:
        """Replace the file, then its copy beside it, each atomically and durably. Blocks.

        Raises:
            StoreError: the directory cannot be written.
        """
        self.version = self._version
        # By the clock, so that a manifest made anew is newer than a copy that was away meanwhile.
        self.revision = max(self.revision + 1, int(time.time()))
        try:
            self.state, self.inode = str(state.resolve()), state.stat().st_ino
        except OSError as error:
            raise StoreError(f"{state}: {error.strerror}") from error
        data = self.text
        for name in (NAME, COPY):
            try:
                replace_file(state / name, data)
            except OSError as error:
                raise StoreError(f"{state / name}: {why_refused(state, error)}") from error

    def check_key(self, key_id: bytes) -> None:
        """Refuse another key than that of the store; empty is no encryption.

        Raises:
            KeyMismatchError: says which keys, by their ids, and the way out.
        """
        given = key_id.hex()
        if given == self.key_id:
            return
        holds = f"is encrypted with the key {self.key_id}" if self.key_id else "is not encrypted"
        wants = f"the options give the key {given}" if given else "the options give no key"
        first = "Give that key (encryption)" if self.key_id else "Leave encryption out"
        raise KeyMismatchError(
            f"the store on {', '.join(d.path for d in self.devices)} {holds}, {wants}. {first}, "
            "name other directories in devices, or delete the content of these"
        )

    def check(self, fingerprint: Fingerprint) -> None:
        """Refuse a store of something else.

        Raises:
            FingerprintMismatchError: it holds KV of another model or layout.
        """
        differences = Fingerprint(self.fingerprint).differences(fingerprint)
        if not differences:
            return
        where = ", ".join(d.path for d in self.devices)
        way_out = f"Name other directories in devices, or `ssdkv rm {where.replace(', ', ' ')}`"
        if self.fingerprint.keys() >= _OF_SAMPLED_WEIGHTS:
            raise FingerprintMismatchError(
                f"the store on {where} was made by a version that knew weights by samples of their "
                f"files only: nothing tells whether its KV is that of these weights. {way_out}"
            )
        raise FingerprintMismatchError(
            f"the store on {where} holds KV of another shape (stored != configured): "
            f"{'; '.join(differences)}. {way_out}"
        )

    def weights(self) -> list[float]:
        """Weight of each device; 0 for one that is not present."""
        return [device.weight if device.present else 0.0 for device in self.devices]

    def files_besides(self, device: int) -> dict[str, str]:
        """UUIDs of the data files of all other devices, and their paths."""
        others = (d for i, d in enumerate(self.devices) if i != device)
        return {name: d.path for d in others for name in d.files if name}

    def data_files(self) -> list[Path]:
        """Data files of the devices that the store was last opened with, and block devices."""
        places = [Path(device.path) for device in self.present()]
        return [
            place if place.is_block_device() else data_file_path(place, rank)
            for place in places
            for rank in range(self.tp_size)
        ]

    def present(self) -> list[ManifestDevice]:
        """Devices that the store was last opened with."""
        return [device for device in self.devices if device.present]

    @property
    def slots(self) -> int:
        """Slots of the store."""
        return sum(segment.slots for segment in self.segments)


def has_manifest(directory: Path) -> bool:
    """Check whether a store's manifest, or a copy of it, lies in this directory."""
    return any((directory / name).exists() for name in (NAME, COPY))


def store_named(data: bytes) -> str | None:
    """UUID of the store that the text of a manifest, of whatever version, names; None: it is
    damaged, or no manifest."""
    try:
        check_seal(data)
        return msgspec.json.decode(data, type=_Versioned).store or None
    except (msgspec.MsgspecError, ValueError):
        return None


def _of_another(path: Path, version: str) -> FormatError:
    return of_another_version(path, version, ", ".join(map(str, VERSIONS)))


def way_out(state: Path) -> str:
    """Way to go on without a whole ``store.json``."""
    return f"`ssdkv fsck --repair {state}` restores it, `ssdkv rm {state}` gives the store up"


@contextlib.contextmanager
def locked(state: Path, timeout_s: float | None = 30.0) -> Iterator[None]:
    """Exclude other processes while the manifest is read and changed. Blocks, briefly.

    The lock is on the directory: workers of one engine change the manifest one after the other.

    Args:
        state: The state directory.
        timeout_s: How long to wait for them; None: as :func:`lock_file` without a deadline.

    Raises:
        StoreLockedError: another process held it for all that time.
        StoreError: the directory cannot be opened or locked.
    """
    try:
        fd = os.open(state, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise StoreError(f"state directory {state}: {why_refused(state, error)}") from error
    try:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        lock_file(fd, state, "state directory", deadline)
        yield
    finally:
        os.close(fd)
