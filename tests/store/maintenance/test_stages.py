"""Stores of a pipeline whose stages have slots of several sizes: damage, repair, capacity."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import disk_directory
from tests.store.checked_store import SLOTS, check, copied, make, mended
from tests.store.filled_store import FilledStore, flip, loop_devices
from vllm_ssdkv.base.errors import StoreError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store.devices.data_file import peek_superblock
from vllm_ssdkv.store.format.manifest import COPY, NAME, Manifest
from vllm_ssdkv.store.format.slot_geometry import SUPERBLOCK_BYTES, SlotGeometry
from vllm_ssdkv.store.maintenance.fsck import examined
from vllm_ssdkv.store.open import open_rank

ROOM = 64 << 20
MORE: dict[str, Any] = {"capacity": ROOM, "options": {"dram_gib": "64MiB"}}
LAYERS = (9, 2, 3)
STAGES = tuple(SlotGeometry("opaque", layers, 1, 1, 66_000) for layers in LAYERS)
"""Slots of two units, of which the smaller ranks alone would have one."""


@pytest.fixture(scope="module", params=["one copy", "two copies", "encrypted"])
def original(request: pytest.FixtureRequest) -> Iterator[FilledStore]:
    """Stores with one copy of each block, with two, and with encrypted ones."""
    with tempfile.TemporaryDirectory(prefix="ssdkv-stages-", dir=disk_directory()) as root:
        kind = {
            "replicas": 1 + (request.param == "two copies"),
            "encrypted": request.param == "encrypted",
        }
        yield make(Path(root), stages=STAGES, ranks=len(STAGES), **kind, **MORE)


@pytest.fixture
def store(original: FilledStore) -> Iterator[FilledStore]:
    with copied(original) as copy:
        yield copy


def test_every_rank_has_slots_of_its_own_size(original: FilledStore) -> None:
    assert check(original).clean
    manifest = Manifest.load(original.state)
    assert manifest is not None
    assert [one.layers for one in manifest.geometries] == list(LAYERS)
    assert {one.units_per_slot for one in manifest.geometries} == {2}
    for rank, geometry in enumerate(manifest.geometries):
        block = peek_superblock(original.data(0, rank))
        assert block is not None
        assert (block.geometry, block.unit_bytes) == (geometry, geometry.unit_bytes)


def test_progress_counts_slots_of_any_size(original: FilledStore) -> None:
    heard: list[tuple[int, int]] = []
    with examined(original.devices, original.state, progress=lambda *step: heard.append(step)):
        pass
    total = len(STAGES) * len(SLOTS) * original.replicas
    assert heard[0] == (0, total)
    assert heard[-1] == (total, total)


def test_the_capacity_is_divided_by_bytes(original: FilledStore) -> None:
    """All ranks' files fill it, up to a slot, the journal, and space for what is beside them."""
    for device in range(len(original.devices)):
        sizes = [original.data(device, rank).stat().st_size for rank in range(len(STAGES))]
        slots = [size - SUPERBLOCK_BYTES for size in sizes]
        assert 0.97 * ROOM < sum(sizes) <= ROOM
        for one, other in zip(slots, original.place.geometries, strict=True):
            assert one / slots[0] == pytest.approx(
                other.unit_bytes / original.place.geometries[0].unit_bytes, rel=0.01
            )


def test_it_is_served_after_a_restart(store: FilledStore) -> None:
    assert store.served() == set(SLOTS)


@pytest.mark.parametrize("rank", range(len(STAGES)))
def test_a_flipped_byte_of_any_rank_is_found_and_repaired(store: FilledStore, rank: int) -> None:
    geometry = store.place.geometries[rank]
    device, at = store.at(5, geometry.page_offset(geometry.pages - 1) + 65_999, rank=rank)
    flip(store.data(device, rank), at)
    left = mended(store, **({"copy": 1} if store.replicas > 1 else {"page": 1}))
    assert left == set(SLOTS) - ({5} if store.replicas == 1 else set())


def test_a_lost_journal_is_made_anew_from_the_headers_of_all_ranks(store: FilledStore) -> None:
    (store.state / "journal").unlink()
    if store.replicas == 1:
        device, at = store.at(21, 40, rank=1)
        flip(store.data(device, 1), at)
    assert store.served() == set(SLOTS) - ({21} if store.replicas == 1 else set())


def test_without_a_manifest_the_superblocks_name_the_store(store: FilledStore) -> None:
    before = Manifest.load(store.state)
    assert before is not None
    for folder in (store.state, *store.devices):
        for name in (NAME, COPY):
            (folder / name).write_bytes(b"{}") if (folder / name).exists() else None
    assert store.served() == set()  # where slots lay is not known any more
    after = Manifest.load(store.state)
    assert after is not None
    assert after.store == before.store
    assert after.geometries == before.geometries


def test_a_raw_block_device_has_room_for_one_stage(tmp_path: Path) -> None:
    with loop_devices(tmp_path, 1) as devices:
        store = FilledStore(tuple(devices), tmp_path / "state", SLOTS, stages=STAGES)
        with pytest.raises(StoreError, match=r"serves one rank; for several workers make a file"):
            open_rank(store.place, 1, Counters())


def test_other_stages_are_refused(store: FilledStore) -> None:
    other = replace(store, stages=(STAGES[1], STAGES[0], STAGES[2]))
    with pytest.raises(StoreError, match=r"superblock: (unit_bytes|geometry) is"):
        other.served()
    assert store.served() == set(SLOTS)
