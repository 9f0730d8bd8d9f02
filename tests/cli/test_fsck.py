"""``ssdkv fsck`` on the command line: what it prints, writes and ends with."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.store.conftest import array
from tests.store.filled_store import GEOMETRY, RANKS, FilledStore, flip
from vllm_ssdkv.cli.main import app
from vllm_ssdkv.store.fsck_report import MAX_LISTED, Report
from vllm_ssdkv.store.open import open_index

SLOTS = (0, 1, 2, 3)


def fsck(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["fsck", *map(str, arguments)])


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
        assert "1 problem(s): page 1; 1 block(s) cannot be served" in result.stdout
        assert "--repair" in result.stdout
    result = fsck("--state-dir", store.state, "--repair")
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
        "stored": len(SLOTS),
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
    assert f"0 block(s) cannot be served, {away} more are on absent devices only" in shown
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


def test_long_lists_are_cut_and_counted() -> None:
    report = Report("store", "/state", ["/a"], 1, 5000)
    for slot in range(MAX_LISTED + 7):
        report.add("page", f"slot {slot}", "wrong")
    assert len(report.problems) == MAX_LISTED
    assert report.counts == {"page": MAX_LISTED + 7}
    report.repaired_all("page", "header")
    assert report.unrepaired == 0
    assert all(problem.repaired for problem in report.problems)
