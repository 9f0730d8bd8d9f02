"""Writes the golden store: a tiny store, the same bytes on every machine.

Run it with the folder to write into, only after raising a version in ``docs/format.md``:

    python tests/store/golden_store.py tests/store/golden
"""

from __future__ import annotations

import gzip
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.store.checksum import checksum_bytes
from vllm_ssdkv.store.fingerprint import Fingerprint
from vllm_ssdkv.store.header import SlotHeader
from vllm_ssdkv.store.journal import Journal
from vllm_ssdkv.store.layout import SlotGeometry
from vllm_ssdkv.store.manifest import NAME, Manifest, ManifestDevice
from vllm_ssdkv.store.placement import Extent, Placement, Segment
from vllm_ssdkv.store.records import Kind
from vllm_ssdkv.store.superblock import Superblock

STORE = UUID("5d5a2f0e-8c5b-4b1e-9a63-0d2f6a4c7b10")
DEVICES = (
    UUID("00000000-0000-4000-8000-00000000000a"),
    UUID("00000000-0000-4000-8000-00000000000b"),
)
WEIGHTS = (2.0, 1.0)
# 151 blocks of 4096 bytes: two units, the second with an unused end.
GEOMETRY = SlotGeometry("opaque", 3, 1, 1, 204_000)
FINGERPRINT = Fingerprint({"model": "golden", "layers": 3, "dtype": "bfloat16"})
# A row of three slots over both devices, then a slot on the second device alone.
SEGMENTS = (
    Segment(0, 3, 3, (0, 1, 0), (Extent(0, 0, 4), Extent(1, 0, 2))),
    Segment(3, 1, 1, (1,), (Extent(1, 2, 2),)),
)
SLOTS = 4
RANK = 0

CONTENT = {0: ("00" * 32, 1), 1: ("11" * 32, 4), 3: ("33" * 32, 3)}
"""Slot to key and epoch counter of what a reader finds."""


def epoch(counter: int) -> int:
    """Epochs of the store's second opening."""
    return 2 * 2**40 + counter


def page(slot: int, number: int) -> NDArray[np.uint8]:
    """Payload of one page."""
    at = np.arange(GEOMETRY.payload_bytes, dtype=np.int64)
    return ((at + 31 * slot + 7 * number) % 251).astype(np.uint8)


def slot_bytes(slot: int) -> NDArray[np.uint8]:
    """One slot: header, pages, and 0xEE where the format leaves bytes undefined."""
    key, counter = CONTENT[slot]
    data = np.full(GEOMETRY.slot_bytes, 0xEE, dtype=np.uint8)
    sums = np.zeros(GEOMETRY.pages, dtype=np.uint64)
    for number in range(GEOMETRY.pages):
        payload = page(slot, number)
        begin = GEOMETRY.page_offset(number)
        data[begin : begin + payload.size] = payload
        sums[number] = checksum_bytes(payload)
    header = SlotHeader(bytes.fromhex(key), slot, epoch(counter), RANK, sums)
    header.encode_into(data, GEOMETRY, FINGERPRINT.digest)
    return data


def data_files() -> list[bytes]:
    """The data file of each device."""
    placement = Placement(GEOMETRY, SEGMENTS, len(DEVICES))
    files = [np.zeros(placement.device_bytes(d), dtype=np.uint8) for d in range(len(DEVICES))]
    for device, file in enumerate(files):
        block = Superblock(
            store=STORE,
            device=DEVICES[device],
            rank=RANK,
            unit_bytes=GEOMETRY.unit_bytes,
            epoch=1,
            geometry=GEOMETRY,
            fingerprint=FINGERPRINT,
        )
        for copy in (block, replace(block, epoch=2)):
            data = np.frombuffer(copy.encode(), dtype=np.uint8)
            file[copy.copy_offset : copy.copy_offset + data.size] = data
    for slot in CONTENT:
        data = slot_bytes(slot)
        extents = placement.extents(np.array([slot]), 0, GEOMETRY.slot_bytes)
        for device, offset, length, at in zip(
            extents.device, extents.offset, extents.length, extents.buffer, strict=True
        ):
            begin, size, source = int(offset), int(length), int(at)
            files[device][begin : begin + size] = data[source : source + size]
    return [file.tobytes() for file in files]


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


def manifest(directory: Path) -> bytes:
    """What ``store.json`` holds."""
    placement = Placement(GEOMETRY, SEGMENTS, len(DEVICES))
    mine = Manifest(
        store=str(STORE),
        model="golden/model",
        fingerprint=dict(FINGERPRINT.fields),
        kind=GEOMETRY.kind,
        layers=GEOMETRY.layers,
        heads=GEOMETRY.heads,
        groups=GEOMETRY.groups,
        payload_bytes=GEOMETRY.payload_bytes,
        tp_size=1,
        devices=[
            ManifestDevice(
                path=f"/ssd{d}",
                capacity=placement.device_bytes(d),
                weight=WEIGHTS[d],
                files=[str(DEVICES[d])],
            )
            for d in range(len(WEIGHTS))
        ],
        segments=list(SEGMENTS),
        numbers=SLOTS,
        run="golden",
        opened=2,
        last_opened=1_700_000_000,
    )
    mine.save(directory)
    return (directory / NAME).read_bytes()


def golden_files() -> dict[str, bytes]:
    """Name to content of every file of the store."""
    with tempfile.TemporaryDirectory() as name:
        state = {"journal": journal(Path(name)), NAME: manifest(Path(name))}
    return state | {f"device{d}.data": data for d, data in enumerate(data_files())}


def write(directory: Path) -> None:
    """Write the store; data files compressed, since most of them repeats."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in golden_files().items():
        if name.endswith(".data"):
            (directory / f"{name}.gz").write_bytes(gzip.compress(data, mtime=0))
        else:
            (directory / name).write_bytes(data)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
