"""A small store on disk, filled and closed, for what looks at stores without their options."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit.waiting import until
from tests.store.conftest import (
    BLOCK_TOKENS,
    PATIENCE_S,
    Bytes,
    Slots,
    array,
    content,
    key_of,
)
from vllm_ssdkv.base.errors import FormatError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.store.context_store import ContextStore
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.format.manifest import Manifest
from vllm_ssdkv.store.format.slot_geometry import PAGE_ALIGN, SlotGeometry
from vllm_ssdkv.store.index.slot_index import SlotIndex
from vllm_ssdkv.store.open import StorePlace, open_index, open_rank
from vllm_ssdkv.store.placement.placement import Placement, placement_of
from vllm_ssdkv.store.placement.rebalancer import Rebalancer
from vllm_ssdkv.store.read.load_job import LoadJob
from vllm_ssdkv.store.tiered_store import TieredStore

GEOMETRY = SlotGeometry("paged", layers=2, heads=2, groups=1, payload_bytes=8000)
"""Pages with padding, a header with unused bytes."""

KEY = "07" * 32
"""Of an encrypted store."""

MODEL = Fingerprint({"model": "tiny", "dtype": "bfloat16"})
RANKS = 2


def name_of(slot: int, rank: int) -> int:
    """Names the content of a slot on a rank."""
    return 1000 * (rank + 1) + slot


@dataclass(frozen=True)
class FilledStore:
    """Where it is. ``slots`` hold what :func:`name_of` says, under ``key_of(slot)``."""

    devices: tuple[Path, ...]
    state: Path
    slots: tuple[int, ...]
    ranks: int = RANKS
    encrypted: bool = False
    replicas: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    """That go before those here. ``state_dir`` None: it is on the first device."""
    capacity: int = 16 << 20
    stages: tuple[SlotGeometry, ...] = ()
    """Slots of each rank in mode ``reuse``, where some are larger than others."""

    @property
    def geometry(self) -> SlotGeometry:
        return replace(GEOMETRY, encrypted=self.encrypted)

    @property
    def place(self) -> StorePlace:
        config = SSDKVConfig.from_extra_config(
            {
                "mode": "reuse" if self.stages else "page",
                "devices": [
                    {"path": d, "capacity": self.capacity, "weight": 1} for d in self.devices
                ],
                "replicas": self.replicas,
                "state_dir": self.state,
                "dram_gib": "16MiB",
                "io": {"staging": "4MiB"},
                "encryption": {"key_command": ["echo", KEY]} if self.encrypted else None,
            }
            | self.options
        )
        geometries = self.stages or (self.geometry,) * self.ranks
        geometries = tuple(replace(one, encrypted=self.encrypted) for one in geometries)
        return StorePlace(config, geometries, MODEL, model="some/model")

    @property
    def placement(self) -> Placement:
        return self.placement_of(0)

    def placement_of(self, rank: int) -> Placement:
        try:
            manifest = Manifest.load(self.state)
        except FormatError:
            manifest = Manifest.load_copy(self.state)
        assert manifest is not None
        return placement_of(manifest, rank)

    def data(self, device: int, rank: int) -> Path:
        path = self.devices[device]
        return path if path.is_block_device() else path / f"rank{rank}.data"

    def at(self, slot: int, offset: int, copy: int = 0, rank: int = 0) -> tuple[int, int]:
        """Device and offset in its data files of one byte of a slot."""
        start = offset // PAGE_ALIGN * PAGE_ALIGN
        extents = self.placement_of(rank).copies(array([slot]), start, PAGE_ALIGN)[copy]
        assert extents is not None
        return int(extents.device[0]), int(extents.offset[0]) + offset - start

    def moved(self, devices: Sequence[Path], state: Path) -> FilledStore:
        return replace(self, devices=tuple(devices), state=state)

    def fill(self) -> None:
        """Make the store and write its slots, as an engine does."""
        place = self.place
        ranks = [_Rank(place, rank) for rank in range(self.ranks)]
        index, rebalancer = open_index(place)
        slots = index.allocate(max(self.slots) + 1)
        chosen = array(self.slots)
        assert set(self.slots) <= set(slots.tolist())
        keys = [key_of(slot) for slot in self.slots]
        for rank in ranks:
            rank.write(chosen, index.epochs(chosen), keys)
        for slot, key in zip(self.slots, keys, strict=True):
            assert index.publish(slot, key)
        index.durable(chosen)
        index.unpin(slots)
        self._close(ranks, index, rebalancer)

    def served(self) -> set[int]:
        """Open the store: the slots that are found, each read on every rank and right."""
        place = self.place
        ranks = [_Rank(place, rank) for rank in range(self.ranks)]
        try:
            index, rebalancer = open_index(place)
        except BaseException:
            for rank in ranks:
                rank.close()
            raise
        found = [slot for slot in self.slots if len(index.lookup([key_of(slot)]))]
        chosen = array(found)
        for rank in ranks:
            if found:
                rank.read(chosen, index.epochs(chosen))
        assert index.gauges()["ready"] == len(found)
        self._close(ranks, index, rebalancer)
        return set(found)

    def _close(self, ranks: list[_Rank], index: SlotIndex, rebalancer: Rebalancer) -> None:
        for rank in ranks:
            rank.close()
        assert rebalancer.close()
        assert index.close()


class _Rank:
    def __init__(self, place: StorePlace, rank: int):
        self.rank = rank
        self.geometry = place.geometries[rank]
        self.opened = open_rank(place, rank, Counters())
        opened = self.opened
        kind = ContextStore if self.geometry.kind == "paged" else TieredStore
        self.store = kind(
            opened.files, opened.arena, opened.plan, opened.num_slots, BLOCK_TOKENS, self._copy_in
        )
        self.hbm: dict[int, Bytes] = {}

    def _pages(self, frame: int) -> Bytes:
        pages = self.store.frames.view(frame)[self.geometry.header_bytes :]
        return pages.reshape(self.geometry.pages, -1)

    def _copy_in(self, frames: np.ndarray, block_ids: Slots) -> None:
        for frame, block in zip(frames.tolist(), block_ids.tolist(), strict=True):
            self.hbm[block] = self._pages(frame)[:, : self.geometry.payload_bytes].copy()

    def write(self, slots: Slots, epochs: Slots, keys: list[bytes]) -> None:
        for frame, slot in zip(
            self.store.reserve_frames(slots, wait=True), slots.tolist(), strict=True
        ):
            pages = self._pages(int(frame))
            pages[:] = 0xEE
            pages[:, : self.geometry.payload_bytes] = content(
                self.geometry, name_of(slot, self.rank)
            )
        self.store.flush(slots, epochs, keys)
        assert self.store.drain(PATIENCE_S)
        durable, failed = self.store.take_write_results()
        assert (len(durable), failed) == (len(slots), [])

    def read(self, slots: Slots, epochs: Slots) -> None:
        keys = tuple(key_of(slot) for slot in slots.tolist())
        self.store.load(LoadJob("all", slots, epochs, keys, slots + 1))
        outcomes: list[bool] = []
        until(
            lambda: bool(
                outcomes.extend(o.complete for o in self.store.take_load_outcomes()) or outcomes
            )
        )
        assert outcomes == [True]
        for slot in slots.tolist():
            expected = content(self.geometry, name_of(slot, self.rank))
            np.testing.assert_array_equal(self.hbm[slot + 1], expected)

    def close(self) -> None:
        self.store.close()
        self.opened.close()


def flip(path: Path, offset: int, bits: int = 1) -> None:
    """Change one byte of a file."""
    fd = os.open(path, os.O_RDWR)
    try:
        (byte,) = os.pread(fd, 1, offset)
        os.pwrite(fd, bytes([byte ^ bits]), offset)
    finally:
        os.close(fd)


@contextmanager
def loop_devices(folder: Path, count: int) -> Iterator[list[Path]]:
    """Block devices of 16 MiB; skips the test where there are none."""
    made: list[str] = []
    try:
        for number in range(count):
            image = folder / f"image{number}"
            with image.open("wb") as file:
                file.truncate(16 << 20)
            made.append(_losetup("--find", "--show", str(image)))
    except (OSError, subprocess.SubprocessError) as error:
        for path in made:
            _losetup("--detach", path)
        pytest.skip(f"loop devices need root: {error}")
    try:
        yield [Path(path) for path in made]
    finally:
        for path in made:
            _losetup("--detach", path)


def _losetup(*arguments: str) -> str:
    command = ["losetup", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    return ended.stdout.strip()
