"""Writes the golden stores: tiny ones, plain, encrypted, with two copies of each block, with
channel pages, with heads that go round the lanes, with records of mean and
variance, with codes, and of a pipeline with uneven stages, the same bytes on every machine.

Run it with the folder to write into, only after raising a version in ``docs/format.md``:

    .venv/bin/python tests/store/golden_store.py tests/store/golden
"""

from __future__ import annotations

import gzip
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch
from uuid import UUID

import msgspec
import numpy as np
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).parents[2]))  # behind the package that is installed

from tests.store.headers import encoded
from vllm_ssdkv.base.checksum import checksum_bytes
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.format.journal_record import Kind
from vllm_ssdkv.store.format.manifest import NAME, Manifest, ManifestDevice, RankShape
from vllm_ssdkv.store.format.segment import Extent, Segment
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry, with_equal_units
from vllm_ssdkv.store.format.slot_header import SlotHeader
from vllm_ssdkv.store.format.slot_header_batch import key_rows
from vllm_ssdkv.store.format.superblock import Superblock
from vllm_ssdkv.store.index.journal import Journal
from vllm_ssdkv.store.integrity.cipher import CipherCodec
from vllm_ssdkv.store.integrity.store_key import StoreKey
from vllm_ssdkv.store.memory.arena import Arena
from vllm_ssdkv.store.placement.placement import Placement

STORE = UUID("5d5a2f0e-8c5b-4b1e-9a63-0d2f6a4c7b10")
DEVICES = (
    UUID("00000000-0000-4000-8000-00000000000a"),
    UUID("00000000-0000-4000-8000-00000000000b"),
)
WEIGHTS = (2.0, 1.0)
FINGERPRINT = Fingerprint({"model": "golden", "layers": 3, "dtype": "bfloat16"})
KEY = StoreKey(bytes(range(32)))
SLOTS = 4

CONTENT = {0: ("00" * 32, 1), 1: ("11" * 32, 4), 3: ("33" * 32, 3)}
"""Slot to key and epoch counter of what a reader finds."""


def epoch(counter: int) -> int:
    """Epochs of the store's second opening."""
    return 2 * 2**40 + counter


def segments(units: int) -> tuple[Segment, ...]:
    """A row of three slots over both devices, then a slot on the second device alone.

    ``units`` are those of a slot.
    """
    return (
        Segment(0, 3, 3, (0, 1, 0), (Extent(0, 0, 2 * units), Extent(1, 0, units)), since=epoch(1)),
        Segment(3, 1, 1, (1,), (Extent(1, units, units),)),
    )


def doubled(units: int) -> tuple[Segment, ...]:
    """Three slots with two copies each, then one with one copy."""
    share = 3 * units
    return (
        Segment(0, 3, 3, (0, 1), (Extent(0, 0, share), Extent(1, 0, share)), copies=2),
        Segment(3, 1, 1, (1,), (Extent(1, share, units),)),
    )


def by_heads() -> tuple[Segment, ...]:
    """Three slots with two copies each, cut at heads, then one that is cut into equal units."""
    extents = (Extent(0, 0, 4), Extent(1, 1, 3))
    return (
        Segment(0, 3, 3, (0, 1), extents, copies=2, rule="heads"),
        Segment(3, 1, 1, (1,), (Extent(1, 0, 1),)),
    )


@dataclass(frozen=True)
class Golden:
    """One rank of a golden store; ``key_id`` is empty for the plain one.

    ``stages``: slots of each rank, where some are larger than others.
    """

    geometry: SlotGeometry
    segments: tuple[Segment, ...]
    key_id: bytes = b""
    rank: int = 0
    stages: tuple[SlotGeometry, ...] = ()

    @property
    def ranks(self) -> list[Golden]:
        """Every rank of the store."""
        shapes = self.stages or (self.geometry,)
        return [replace(self, geometry=one, rank=rank) for rank, one in enumerate(shapes)]

    def data_name(self, device: int) -> str:
        """Name of this rank's data file on a device."""
        return f"device{device}" + f".rank{self.rank}" * bool(self.rank) + ".data"

    def data_uuid(self, device: int) -> UUID:
        """Identity of this rank's data file on a device."""
        return UUID(int=DEVICES[device].int + 16 * self.rank)

    def page(self, slot: int, number: int) -> NDArray[np.uint8]:
        """Payload of one page."""
        at = np.arange(self.geometry.payload_bytes, dtype=np.int64)
        return ((at + 31 * slot + 7 * number + 13 * self.rank) % 251).astype(np.uint8)

    def frame(self, slot: int) -> NDArray[np.uint8]:
        """One slot before it is sealed: pages, and 0xEE where the format leaves bytes undefined."""
        data = np.full(self.geometry.slot_bytes, 0xEE, dtype=np.uint8)
        for number in range(self.geometry.pages):
            begin = self.geometry.page_offset(number)
            data[begin : begin + self.geometry.payload_bytes] = self.page(slot, number)
        return data

    def slot_bytes(self, slot: int) -> NDArray[np.uint8]:
        """One slot as it lies on the devices."""
        key, counter = CONTENT[slot]
        if self.key_id:
            return self._encrypted(slot, bytes.fromhex(key), epoch(counter))
        data = self.frame(slot)
        pages = [self.page(slot, number) for number in range(self.geometry.pages)]
        sums = np.array([checksum_bytes(page) for page in pages], dtype=np.uint64)
        header = SlotHeader(bytes.fromhex(key), slot, epoch(counter), self.rank, sums)
        data[: self.geometry.header_bytes] = encoded(header, self.geometry, FINGERPRINT.digest)
        return data

    def _encrypted(self, slot: int, key: bytes, of: int) -> NDArray[np.uint8]:
        size = self.geometry.slot_bytes
        arena = Arena(2 * size)
        arena.view(0, size)[:] = arena.view(size, size)[:] = self.frame(slot)
        begin = self.geometry.frame_bytes
        arena.view(size, begin)[:] = 0xEE
        keys = KEY.slots(STORE, self.rank)
        codec = CipherCodec(self.geometry, FINGERPRINT.digest, self.rank, arena, keys)
        with patch("os.urandom", lambda count: bytes([slot + 1]) * count):
            codec.seal(
                np.array([slot]),
                np.array([of]),
                key_rows([key]),
                np.array([0], dtype=np.uint64),
                np.array([size], dtype=np.uint64),
                np.array([size + begin], dtype=np.uint64),
            )
        return arena.view(size, size).copy()

    def data_files(self) -> list[bytes]:
        """This rank's data file on each device."""
        placement = Placement(self.geometry, self.segments, len(DEVICES))
        files = [np.zeros(placement.device_bytes(d), dtype=np.uint8) for d in range(len(DEVICES))]
        for device, file in enumerate(files):
            block = Superblock(
                store=STORE,
                device=self.data_uuid(device),
                rank=self.rank,
                unit_bytes=self.geometry.unit_bytes,
                epoch=1,
                geometry=self.geometry,
                fingerprint=FINGERPRINT,
                key_id=self.key_id or bytes(16),
            )
            for copy in (block, replace(block, epoch=2)):
                data = np.frombuffer(copy.encode(), dtype=np.uint8)
                file[copy.copy_offset : copy.copy_offset + data.size] = data
        for slot in CONTENT:
            data = self.slot_bytes(slot)
            for extents in placement.copies(np.array([slot]), 0, self.geometry.slot_bytes):
                for piece in range(0 if extents is None else len(extents.device)):
                    assert extents is not None
                    begin, size = int(extents.offset[piece]), int(extents.length[piece])
                    source = int(extents.buffer[piece])
                    file = files[int(extents.device[piece])]
                    file[begin : begin + size] = data[source : source + size]
        return [file.tobytes() for file in files]

    def manifest(self, directory: Path) -> bytes:
        """What ``store.json`` holds."""
        ranks, shape = self.ranks, self.geometry
        places = [Placement(one.geometry, self.segments, len(DEVICES)) for one in ranks]
        shapes = [
            RankShape(layers=one.layers, payload_bytes=one.payload_bytes) for one in self.stages
        ]
        mine = Manifest(
            store=str(STORE),
            fingerprint=dict(FINGERPRINT.fields),
            model="golden/model",
            kind=self.geometry.kind,
            layers=self.geometry.layers,
            heads=self.geometry.heads,
            groups=self.geometry.groups,
            payload_bytes=self.geometry.payload_bytes,
            summary_pages=self.geometry.summary_pages,
            channel_pages=shape.channel_pages or msgspec.UNSET,
            scaled_from=shape.scaled_from or msgspec.UNSET,
            record=msgspec.UNSET if shape.record == "bounds" else shape.record,
            shapes=shapes or msgspec.UNSET,
            tp_size=len(ranks),
            devices=[
                ManifestDevice(
                    path=f"/ssd{d}",
                    capacity=sum(place.device_bytes(d) for place in places),
                    weight=WEIGHTS[d],
                    files=[str(one.data_uuid(d)) for one in ranks],
                )
                for d in range(len(WEIGHTS))
            ],
            key_id=self.key_id.hex(),
            segments=list(self.segments),
            numbers=SLOTS,
            run="golden",
            opened=2,
            last_opened=1_700_000_000,
            revision=1_700_000_001,
            state="/state",
            inode=7,
        )
        ruled = any(segment.rule is not msgspec.UNSET for segment in self.segments)
        if ruled or shape.record != "bounds":
            mine.version = 6
        if shapes:
            mine.version = 7
        (directory / NAME).write_bytes(mine.text)
        return mine.text

    def files(self) -> dict[str, bytes]:
        """Name to content of every file of the store."""
        with tempfile.TemporaryDirectory() as name:
            state = {"journal": journal(Path(name)), NAME: self.manifest(Path(name))}
        return state | {
            one.data_name(d): data for one in self.ranks for d, data in enumerate(one.data_files())
        }

    def write(self, directory: Path) -> None:
        """Write the store; data files compressed, since most of them repeats."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, data in self.files().items():
            if name.endswith(".data"):
                (directory / f"{name}.gz").write_bytes(gzip.compress(data, mtime=0))
            else:
                (directory / name).write_bytes(data)


UNEVEN = with_equal_units([SlotGeometry("opaque", n, 1, 1, 204_000) for n in (3, 1)])
"""Slots of two stages: the smaller ones would have one unit each, if they were alone."""

STORES = {
    # 151 blocks of 4096 bytes: two units, the second with an unused end.
    "plain": Golden(SlotGeometry("opaque", 3, 1, 1, 204_000), segments(2)),
    # Small, because it does not compress.
    "encrypted": Golden(
        SlotGeometry("paged", 2, 1, 1, 1000, encrypted=True, summary_pages=1),
        segments(1),
        KEY.key_id,
    ),
    "twice": Golden(SlotGeometry("opaque", 3, 1, 1, 204_000), doubled(2)),
    "channels": Golden(
        SlotGeometry("paged", 2, 1, 3, 1000, summary_pages=1, channel_pages=2), segments(1)
    ),
    "heads": Golden(
        SlotGeometry("paged", 2, 3, 2, 1000, summary_pages=2, channel_pages=4), by_heads()
    ),
    "spread": Golden(
        SlotGeometry("paged", 2, 1, 3, 1000, summary_pages=1, record="spread_with_values"),
        segments(1),
    ),
    # Heads of 16 channels.
    "codes": Golden(
        SlotGeometry("paged", 2, 1, 3, 1024, summary_pages=1, scaled_from=2, record="codes_2"),
        segments(1),
    ),
    "stages": Golden(UNEVEN[0], segments(2), stages=UNEVEN),
}


def journal(directory: Path) -> bytes:
    """Slot 1 is stored, given up and stored anew; slot 2 is given up."""
    path = directory / "journal"
    mine = Journal(
        path,
        store=STORE,
        fingerprint=FINGERPRINT.digest,
        num_slots=SLOTS,
        sync_interval_s=None,
    )
    for kind, slot, counter, key in (
        (Kind.PUT, 0, 1, "00"),
        (Kind.PUT, 1, 2, "22"),
        (Kind.PUT, 3, 3, "33"),
        (Kind.DEL, 1, 2, None),
        (Kind.PUT, 1, 4, "11"),
        (Kind.PUT, 2, 5, "44"),
        (Kind.DEL, 2, 5, None),
    ):
        keys = None if key is None else [bytes.fromhex(key * 32)]
        mine.append(kind, np.array([slot]), np.array([epoch(counter)]), keys)
    mine.close()
    return path.read_bytes()


if __name__ == "__main__":
    for folder, store in STORES.items():
        store.write(Path(sys.argv[1]) / folder)
