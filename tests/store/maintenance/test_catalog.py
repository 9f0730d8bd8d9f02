"""Summaries of stores that are only looked at."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.store.filled_store import GEOMETRY, MODEL, RANKS, FilledStore, flip
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store.format.manifest import COPY, NAME, Manifest
from vllm_ssdkv.store.format.superblock import COPY_OFFSETS
from vllm_ssdkv.store.maintenance.catalog import (
    StoreSummary,
    inspect_store,
    stores_below,
    summarize,
)
from vllm_ssdkv.store.maintenance.offline_store import find_store
from vllm_ssdkv.store.open import open_index, open_rank

SLOTS = (0, 3, 4)


@pytest.fixture
def store(tmp_devices: Callable[[int], list[Path]]) -> FilledStore:
    *devices, state = tmp_devices(3)
    store = FilledStore(tuple(devices), state, SLOTS)
    store.fill()
    return store


def summary(store: FilledStore) -> StoreSummary:
    return summarize(find_store(store.devices, store.state))


def test_a_store_in_one_line(store: FilledStore) -> None:
    found = summary(store)
    assert (found.model, found.mode, found.ranks) == ("some/model", "page", RANKS)
    assert (found.stored, found.block_bytes) == (len(SLOTS), GEOMETRY.slot_bytes)
    assert found.slots == store.placement.slots
    assert 0 <= time.time() - found.last_opened < 600
    files = [f for d in (*store.devices, store.state) for f in d.iterdir()]
    assert found.disk_bytes == sum(f.stat().st_blocks * 512 for f in files)
    assert not found.in_use


def test_a_store_without_a_name_is_called_by_its_weights(store: FilledStore) -> None:
    manifest = Manifest.load(store.state)
    assert manifest is not None
    manifest.model = ""
    manifest.save(store.state)
    assert summary(store).model == MODEL.fields["model"]


def test_a_running_engine_is_seen_and_not_disturbed(store: FilledStore) -> None:
    opened = open_rank(store.place, 0, Counters())
    index, _ = open_index(store.place)
    assert summary(store).in_use
    details = inspect_store(find_store(store.devices, store.state))
    assert details.summary.in_use
    index.close()
    opened.files.engine.close(1.0)
    opened.close()
    assert not summary(store).in_use


def test_all_of_a_store(store: FilledStore) -> None:
    details = inspect_store(find_store([], store.state))
    assert details.problem == ""
    assert details.geometry["slot_bytes"] == GEOMETRY.slot_bytes
    assert details.geometry["layers"] == GEOMETRY.layers
    assert details.stripe_unit_bytes == store.placement.geometry.unit_bytes
    assert details.fingerprint == dict(MODEL.fields)
    assert (details.opened, details.damaged_records, details.key_id) == (1, 0, "")
    assert details.doubled_slots == 0
    assert details.journal_bytes == (store.state / "journal").stat().st_size
    assert [device.path for device in details.devices] == [str(d) for d in store.devices]
    for number, device in enumerate(details.devices):
        assert (device.capacity, device.weight, device.problem) == (16 << 20, 1.0, "")
        assert [file.rank for file in device.files] == list(range(RANKS))
        for file in device.files:
            path = store.data(number, file.rank)
            assert (file.path, file.nbytes) == (str(path), path.stat().st_size)
            assert file.nbytes == file.expected_bytes
            assert file.superblocks == (2, 1)


def test_damage_is_shown_and_no_reason_to_stop(store: FilledStore) -> None:
    (store.state / COPY).unlink()
    flip(store.state / "journal", 30)
    flip(store.data(0, 1), COPY_OFFSETS[1] + 9)
    os.truncate(store.data(0, 0), 2 << 20)
    store.data(1, 0).unlink()
    moved = store.devices[1].with_name("moved")
    details = inspect_store(find_store([], store.state))
    assert COPY in details.problem
    assert "journal: checksum is" in details.problem
    assert details.summary.stored == len(SLOTS)
    first, second = details.devices
    assert first.files[0].nbytes < first.files[0].expected_bytes
    assert "version is" in str(first.files[1].superblocks[1])
    assert [file.rank for file in second.files] == [1]
    store.devices[1].rename(moved)
    (_, second) = inspect_store(find_store([], store.state)).devices
    assert "does not exist" in second.problem


def test_stores_are_found_two_folders_deep(store: FilledStore, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    places = [
        root / "model",
        root / "other" / "dp0",
        root / "other" / "dp1",
        root / "a" / "b" / "c",
    ]
    for place in places:
        place.mkdir(parents=True)
        (place / NAME).write_bytes((store.state / NAME).read_bytes())
    (root / "file").touch()
    assert list(stores_below(root)) == places[:3]
    assert list(stores_below(places[0])) == places[:1]
    assert list(stores_below(root / "absent")) == []


AS_NOBODY = """
import os, sys
from typer.testing import CliRunner
from vllm_ssdkv.cli.main import app

with open(os.devnull) as empty:  # what is imported late is then there, whoever may read it
    CliRunner().invoke(app, [sys.argv[1], empty.name])
if os.getuid() == 0:  # who reads everything
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
app()
"""
"""Runs a command of ``ssdkv`` as a user with no rights of its own."""


@pytest.mark.parametrize("command", ["ls", "quota"])
def test_what_is_another_users_is_passed_over(command: str) -> None:
    program = [sys.executable, "-P", "-c", AS_NOBODY, command]
    with tempfile.TemporaryDirectory(prefix="ssdkv-others-") as name:
        root, theirs = Path(name), Path(name, "theirs")
        root.chmod(0o755)
        theirs.mkdir(mode=0)
        above, there = (
            subprocess.run(
                [*program, str(path)], capture_output=True, text=True, timeout=60, check=False
            )
            for path in (root, theirs)
        )
        theirs.chmod(0o700)
    assert (above.returncode, above.stdout, above.stderr) == (0, "no stores\n", "")
    assert (there.returncode, there.stderr) == (1, f"{theirs}: Permission denied\n")
