"""``ssdkv fsck`` on the command line: what it prints, writes and ends with."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.store.conftest import array
from tests.store.filled_store import GEOMETRY, RANKS, FilledStore, flip
from vllm_ssdkv.cli.main import app
from vllm_ssdkv.store.maintenance.fsck_report import MAX_LISTED, Report
from vllm_ssdkv.store.open import open_index

SLOTS = (0, 1, 2, 3)


def fsck(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "300"}).invoke(app, ["fsck", *map(str, arguments)])


@pytest.fixture
def store(tmp_devices: Callable[[int], list[Path]]) -> FilledStore:
    *devices, state = tmp_devices(3)
    store = FilledStore(tuple(devices), state, SLOTS)
    store.fill()
    return store


def spoil(store: FilledStore) -> None:
    device, at = store.at(2, GEOMETRY.header_bytes)
    flip(store.data(device, 1), at)


def test_a_clean_store_ends_with_0(store: FilledStore) -> None:
    result = fsck(*store.devices, "--state-dir", store.state)
    assert result.exit_code == 0, result.output
    assert f"{len(SLOTS)} of " in result.stdout
    assert f"{len(SLOTS) * RANKS} slots read and verified" in result.stdout
    assert "clean" in result.stdout


def test_problems_end_with_1_and_are_named(store: FilledStore) -> None:
    spoil(store)
    for _ in range(2):  # without --repair nothing changes
        result = fsck("--state-dir", store.state)
        assert result.exit_code == 1
        assert "slot 2, rank 1" in result.stdout
        assert "page 0 does not match its checksum" in result.stdout
        assert "1 problem(s); 1 block(s) cannot be served" in result.stdout
    named = shlex.split(result.stdout.splitlines()[-1].split("to repair: ssdkv fsck ")[1])
    assert named == ["--repair", *map(str, store.devices), "--state-dir", str(store.state)]
    result = fsck(*named)
    assert result.exit_code == 1
    assert "1 repaired, 0 left" in result.stdout
    assert fsck("--state-dir", store.state).exit_code == 0
    assert store.served() == set(SLOTS) - {2}


def test_json_says_it_all(store: FilledStore) -> None:
    spoil(store)
    result = fsck(*store.devices, "--state-dir", store.state, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {
        "clean": False,
        "repair": False,
        "store": json.loads((store.state / "store.json").read_text())["store"],
        "state_dir": str(store.state),
        "devices": [str(path) for path in store.devices],
        "ranks": RANKS,
        "slots": store.placement.slots,
        "slots_to_come": 0,
        "stored": len(SLOTS),
        "found": 0,
        "lost": 0,
        "bad": 1,
        "out_of_reach": 0,
        "checked_slots": len(SLOTS) * RANKS,
        "checked_bytes": len(SLOTS) * RANKS * GEOMETRY.slot_bytes,
        "unrepaired": 1,
        "counts": {"page": 1},
        "problems": [
            {
                "kind": "page",
                "subject": "slot 2, rank 1",
                "text": "page 0 does not match its checksum",
                "repaired": False,
                "cure": "ssdkv fsck --repair drops the blocks",
            }
        ],
    }


def test_an_absent_device_is_a_problem_and_no_repair(store: FilledStore) -> None:
    device = store.devices[1]
    device.rename(device.with_name("elsewhere"))
    away = int(store.placement.touches(1, array(SLOTS)).sum())
    assert 0 < away < len(SLOTS)
    result = fsck("--state-dir", store.state)
    assert result.exit_code == 1, result.output
    shown = " ".join(result.stdout.split())
    assert "does not exist: mount it" in shown
    assert f"0 block(s) cannot be served; {away} are on absent devices only" in shown
    assert "--repair is refused while a device is absent" in shown
    found = json.loads(fsck("--state-dir", store.state, "--json").stdout)
    assert (found["clean"], found["counts"]) == (False, {"device": 1})
    assert (found["bad"], found["out_of_reach"]) == (0, away)
    assert found["problems"][0]["subject"] == str(device)
    result = fsck("--state-dir", store.state, "--repair")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"device 1 ({device}) does not exist, and a repair without it" in result.stderr
    assert "mount it" in result.stderr
    device.with_name("elsewhere").rename(device)
    assert fsck("--state-dir", store.state).exit_code == 0


def test_what_cannot_be_checked_ends_with_2(store: FilledStore, tmp_path: Path) -> None:
    result = fsck(tmp_path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"no store.json in {tmp_path}" in result.stderr
    assert "name the devices of a store" in fsck().stderr
    result = fsck(store.devices[0], "--state-dir", store.state)
    assert result.exit_code == 2
    assert "has 2 device(s)" in result.stderr
    assert str(store.devices[1]) in result.stderr
    index, _ = open_index(store.place)
    result = fsck(*store.devices, "--state-dir", store.state, "--repair")
    index.close()
    assert result.exit_code == 2
    assert "is in use by this process" in result.stderr
    assert str(os.getpid()) not in result.stderr


def test_a_kind_of_finding_is_one_line(store: FilledStore) -> None:
    """With how often it was found, an example, and its cure; not thousands of lines."""
    for slot in SLOTS:
        for rank in range(RANKS):
            device, at = store.at(slot, GEOMETRY.header_bytes)
            flip(store.data(device, rank), at)
    (store.devices[0] / "rank7.data").write_text("a diary")
    result = fsck("--state-dir", store.state)
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[2:-2] == [
        "Finding Times For example Cure",
        f"orphan 1 {store.devices[0] / 'rank7.data'}: the store has 2 rank(s): it belongs to none "
        "of them it has no superblock of this store: move it away, or delete it if nobody needs it",
        f"page {len(SLOTS) * RANKS} slot 3, rank 0: page 0 does not match its checksum "
        "ssdkv fsck --repair drops the blocks",
    ]
    result = fsck("--state-dir", store.state, "--repair")
    shown = " ".join(result.stdout.split())
    assert f"page {len(SLOTS) * RANKS} slot 3, rank 0: page 0 does not match" in shown
    assert "8 repaired, 1 left" in shown


def test_blocks_of_a_lost_journal_are_counted(store: FilledStore) -> None:
    (store.state / "journal").unlink()
    spoil(store)
    result = fsck("--state-dir", store.state)
    shown = " ".join(result.stdout.split())
    assert f"{store.state / 'journal'} is missing" in shown
    assert "2 rank(s), 3 of 354 blocks " in shown
    assert (
        "3 were found by the headers of their slots, 1 slot(s) with such a header are not" in shown
    )


def test_long_lists_are_cut_and_counted() -> None:
    report = Report("store", "/state", ["/a"], 1, 5000)
    for slot in range(MAX_LISTED + 7):
        report.add("page", f"slot {slot}", "wrong")
    assert len(report.problems) == MAX_LISTED
    assert report.counts == {"page": MAX_LISTED + 7}
    report.add("journal", "/state/journal", "missing")
    assert [(k.count, k.example.kind) for k in report.kinds()] == [
        (MAX_LISTED + 7, "page"),
        (1, "journal"),
    ]
    report.repaired_all("journal")
    assert report.unrepaired == MAX_LISTED + 7
    report.repaired_all("page", "header")
    assert report.unrepaired == 0
    assert all(problem.repaired for problem in report.problems)
