"""``ssdkv ls``, ``inspect`` and ``rm`` on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.store.filled_store import GEOMETRY, FilledStore, flip
from vllm_ssdkv.cli.main import app
from vllm_ssdkv.store.format.manifest import COPY, NAME
from vllm_ssdkv.store.open import open_index

SLOTS = (0, 1, 2)


def ssdkv(*arguments: object, stdin: str = "") -> Result:
    return CliRunner(env={"COLUMNS": "300"}).invoke(app, list(map(str, arguments)), input=stdin)


@pytest.fixture
def cache(tmp_devices: Callable[[int], list[Path]], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache directory of a user who names no devices."""
    (root,) = tmp_devices(1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(root))
    return root / "ssdkv"


@pytest.fixture
def store(cache: Path) -> FilledStore:
    """A store in it, on one device."""
    place = cache / "0123456789abcdef" / "dp0"
    place.mkdir(parents=True)
    store = FilledStore((place,), place, SLOTS, ranks=1)
    store.fill()
    return store


def store_name(store: FilledStore) -> str:
    found: str = json.loads((store.state / NAME).read_bytes())["store"]
    return found


def test_stores_of_the_cache_are_listed(store: FilledStore, cache: Path) -> None:
    for arguments in ([], [cache], [store.state]):
        result = ssdkv("ls", *arguments)
        assert result.exit_code == 0, result.output
        assert str(store.state) in result.stdout
        assert "some/model" in result.stdout
        assert f"{len(SLOTS)} of " in result.stdout
        assert "UTC" in result.stdout
    index, _ = open_index(store.place)
    assert "in use" in ssdkv("ls").stdout
    index.close()


def test_the_list_as_json(store: FilledStore) -> None:
    (found,) = json.loads(ssdkv("ls", "--json").stdout)
    assert found["state_dir"] == str(store.state)
    assert (found["mode"], found["stored"], found["in_use"]) == ("page", len(SLOTS), False)
    assert found["block_bytes"] == GEOMETRY.slot_bytes


def test_no_stores_are_no_error(cache: Path) -> None:
    assert ssdkv("ls").stdout == "no stores\n"
    assert ssdkv("ls", "--json").stdout == "[]\n"


def test_a_broken_store_is_named_and_hides_no_other(store: FilledStore, cache: Path) -> None:
    broken = cache / "broken"
    broken.mkdir()
    (broken / NAME).write_text("{")
    result = ssdkv("ls")
    assert result.exit_code == 1
    assert str(store.state) in result.stdout
    assert f"{broken}: {broken / NAME} is damaged" in result.stderr


def test_each_store_is_listed_once(tmp_devices: Callable[[int], list[Path]]) -> None:
    """Every device has a copy of the manifest; without a state directory that is all there is."""
    devices = tmp_devices(2)
    FilledStore(tuple(devices), devices[0], SLOTS).fill()
    (found,) = json.loads(ssdkv("ls", devices[0].parent, "--json").stdout)
    assert found["state_dir"] == str(devices[0])
    (devices[0] / NAME).unlink()
    (found,) = json.loads(ssdkv("ls", devices[0].parent, "--json").stdout)
    assert found["state_dir"] == str(devices[0])
    devices[0].rename(devices[0].parent.with_name("pulled"))
    try:
        result = ssdkv("ls", devices[1].parent)
    finally:
        devices[0].parent.with_name("pulled").rename(devices[0])
    assert result.exit_code == 1
    assert f"{devices[1]}: a device of the store {found['store']} of some/model, whose" in (
        result.stderr
    )


def test_one_store_is_shown(store: FilledStore) -> None:
    result = ssdkv("inspect", store.state)
    assert result.exit_code == 0, result.output
    for text in ("some/model", f"{len(SLOTS)} of ", "layers 2", "bfloat16", "rank 0: ", "16 MiB"):
        assert text in result.stdout
    assert "problem" not in result.stdout
    (store.state / COPY).unlink()
    flip(store.data(0, 0), 20)
    result = ssdkv("inspect", "--state-dir", store.state)
    assert f"{COPY} is missing" in result.stdout
    assert "superblock: checksum" in result.stdout
    details = json.loads(ssdkv("inspect", store.state, "--json").stdout)
    assert details["summary"]["stored"] == len(SLOTS)
    assert details["geometry"]["payload_bytes"] == GEOMETRY.payload_bytes
    assert details["devices"][0]["files"][0]["superblocks"][1] == 1


def test_what_is_no_store_cannot_be_shown(tmp_path: Path) -> None:
    for command in ("inspect", "rm"):
        result = ssdkv(command, tmp_path)
        assert (result.exit_code, result.stdout) == (1, "")
        assert f"no store.json in {tmp_path}" in result.stderr


def test_a_store_is_removed_after_a_yes(store: FilledStore, cache: Path) -> None:
    for answer in ("n\n", ""):
        result = ssdkv("rm", store.state, stdin=answer)
        assert result.exit_code == 1
        assert str(store.data(0, 0)) in result.stderr
        assert store.data(0, 0).exists()
    for text in (store_name(store), "of some/model", "last opened 20", "KiB, written 20"):
        assert text in result.stderr
    result = ssdkv("rm", store.state, stdin="y\n")
    assert result.exit_code == 0, result.output
    assert "removed" in result.stdout
    assert cache.exists()
    assert list(cache.iterdir()) == [], "folders that a start has made go with it"


def test_a_removal_as_json(store: FilledStore, cache: Path) -> None:
    keep = cache / "0123456789abcdef" / "notes"
    keep.touch()
    files, name = {str(file) for file in store.state.iterdir()}, store_name(store)
    result = ssdkv("rm", store.state, "--yes", "--json")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert set(content["removed"]) == files
    assert (content["store"], content["model"], content["kept"]) == (name, "some/model", [])
    assert (content["wiped"], content["missing"]) == ([], [])
    assert content["bytes"] > 0
    assert list(cache.rglob("*")) == [keep.parent, keep]


def test_a_store_in_use_is_not_removed(store: FilledStore) -> None:
    index, _ = open_index(store.place)
    result = ssdkv("rm", store.state, "--yes")
    index.close()
    assert (result.exit_code, result.stdout) == (1, "")
    assert "is in use" in result.stderr
    assert "to be removed" not in result.stderr
    assert str(store.data(0, 0)) not in result.stderr
    assert store.served() == set(SLOTS)


def test_a_device_that_is_away_is_said(tmp_devices: Callable[[int], list[Path]]) -> None:
    devices = tmp_devices(2)
    store = FilledStore(tuple(devices), devices[0], SLOTS)
    store.fill()
    away = devices[1].with_name("away")
    devices[1].rename(away)
    result = ssdkv("rm", devices[0], "--yes")
    assert result.exit_code == 1
    said = result.stderr
    assert f"{devices[1]} is not there, and nothing was removed from it" in said
    assert "are free again" in result.stdout
    assert devices[0].is_dir(), "a folder that somebody named stays"
    assert list(devices[0].iterdir()) == []
    # When it is back, what is left on it goes.
    away.rename(devices[1])
    (devices[1] / "notes").write_text("mine")
    assert f"{devices[1]} is a device of the store" in ssdkv("rm", devices[1], "--yes").stderr
    command = said.split("what is left with ssdkv ")[1].split()
    result = ssdkv(*command, "--yes")
    assert result.exit_code == 0, result.output
    assert [file.name for file in devices[1].iterdir()] == ["notes"]
    assert "nothing of the store" in ssdkv(*command, "--yes").stderr


@pytest.mark.parametrize("command", ["ls", "quota", "inspect", "fsck", "rm"])
def test_a_directory_that_does_not_exist_is_named(command: str, tmp_path: Path) -> None:
    result = ssdkv(command, tmp_path / "nodir")
    assert result.exit_code == (2 if command == "fsck" else 1)
    assert f"{tmp_path / 'nodir'} does not exist: is it mounted?" in result.stderr


@pytest.mark.parametrize("command", ["inspect", "fsck", "rm"])
def test_who_names_no_store_learns_where_some_are(command: str) -> None:
    result = ssdkv(command)
    assert result.exit_code == (2 if command == "fsck" else 1)
    assert "ssdkv ls" in result.stderr


def test_a_suspended_store_is_shown_and_resumed(store: FilledStore) -> None:
    assert "was not suspended" in ssdkv("resume", store.state).stdout
    store.place.suspend("a hit differed")
    assert "suspended" in ssdkv("ls").stdout
    assert "a hit differed" in ssdkv("inspect", store.state).stdout
    (listed,) = json.loads(ssdkv("ls", "--json").stdout)
    assert listed["suspended"] == "a hit differed"
    index, _ = open_index(store.place)
    refused = ssdkv("resume", store.state)
    assert refused.exit_code == 1
    assert "in use" in refused.stderr
    index.close()
    result = ssdkv("resume", "--json", store.state)
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"store": store_name(store), "reason": "a hit differed"}
    assert "suspended" not in ssdkv("ls").stdout
