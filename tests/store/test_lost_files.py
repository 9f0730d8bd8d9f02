"""Files of a store that somebody deletes, replaces or cuts while a process uses it, which is then
killed: all that was called durable is there."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import disk_directory
from tests.kit.child import Child
from tests.kit.waiting import until
from tests.store.filled_store import FilledStore
from tests.store.lost_files_victim import SLOTS
from tests.store.opening import close, fill, place
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store.format.journal_record import HEADER_BYTES, JOURNAL, RECORD_BYTES
from vllm_ssdkv.store.format.manifest import COPY, NAME, Manifest, locked
from vllm_ssdkv.store.index.slot_index import SlotIndex
from vllm_ssdkv.store.open import open_index, open_rank
from vllm_ssdkv.store.placement import rebalancer as rebalancing
from vllm_ssdkv.store.placement.rebalancer import Rebalancer

VICTIM = Path(__file__).with_name("lost_files_victim.py")
DAMAGES = ("deleted", "replaced", "cut")
FILES = {JOURNAL: (0, JOURNAL), NAME: (0, NAME), COPY: (0, COPY), "copy on a device": (1, COPY)}
"""Device, and name."""

CASES = [(name, damage) for name in FILES for damage in DAMAGES]

Devices = Callable[[int], list[Path]]


def damage(path: Path, how: str) -> None:
    """What somebody does to a file of a store."""
    if how == "cut":
        size = HEADER_BYTES + RECORD_BYTES if path.name == JOURNAL else path.stat().st_size // 2
        with path.open("r+b") as file:
            file.truncate(size)
    elif how == "replaced":
        other = path.with_name("other")
        # A journal that is older is the worst of all: nothing in it is wrong.
        shutil.copyfile(path, other) if path.name == JOURNAL else other.write_text("something")
        other.replace(path)
    else:
        path.unlink()


def manifest_at(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


@pytest.fixture(scope="module")
def killed() -> Iterator[dict[tuple[str, str], list[Path]]]:
    """Devices of stores, by what was done to them before their process was killed."""
    with tempfile.TemporaryDirectory(prefix="ssdkv-test-", dir=disk_directory()) as root:
        stores = {case: [Path(root, *case, name) for name in "ab"] for case in CASES}
        for devices in stores.values():
            for device in devices:
                device.mkdir(parents=True)
        with Child.python(VICTIM) as victim:
            victim.say(json.dumps([list(map(str, d)) for d in stores.values()]))
            assert victim.hear() == "half"
            paths = {}
            for (name, how), devices in stores.items():
                device, file = FILES[name]
                paths[name, how] = devices[device] / file
                damage(paths[name, how], how)
            victim.say("")
            assert victim.hear() == "all"
            for (name, how), path in paths.items():
                if name != JOURNAL:
                    whole = stores[name, how][0] / (COPY if name == NAME else NAME)
                    until(
                        lambda path=path, whole=whole: manifest_at(path) == manifest_at(whole),
                        f"{path} again",
                    )
        yield stores


@pytest.mark.parametrize(("name", "how"), CASES)
def test_all_blocks_are_there(
    killed: dict[tuple[str, str], list[Path]], name: str, how: str
) -> None:
    devices = tuple(killed[name, how])
    assert FilledStore(devices, devices[0], SLOTS, ranks=1).served() == set(SLOTS)


# ---- within one process ----


@pytest.fixture
def store(
    tmp_devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[list[Path], SlotIndex, Rebalancer, Counters]]:
    """An open store whose manifest is looked after all the time."""
    monkeypatch.setattr(rebalancing, "LOOK_S", 0.01)
    devices = tmp_devices(2)
    where = place(devices)
    rank = open_rank(where, 0, where.counters)
    index, rebalancer = open_index(where, where.counters)
    yield devices, index, rebalancer, where.counters
    rebalancer.close()
    index.close()
    close(rank)


Open = tuple[list[Path], SlotIndex, Rebalancer, Counters]


@pytest.mark.parametrize(("name", "how"), CASES)
def test_it_is_said_and_counted_while_nothing_happens(
    store: Open, name: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    devices, index, _, counters = store
    fill(index, 3)
    device, file = FILES[name]
    path = devices[device] / file
    size = path.stat().st_size
    damage(path, how)

    def restored() -> float:
        journal = index.counters["journal_restores"]
        return journal if name == JOURNAL else counters.total("state_files_restored", file=file)

    until(lambda: restored() > 0, f"{path} again")
    assert restored() == 1
    assert path.stat().st_size >= min(size, HEADER_BYTES + 3 * RECORD_BYTES)
    assert sum(str(path) in line and "written again" in line for line in caplog.messages) == 1
    assert counters.total("manifest_errors") == counters.total("manifest_copy_errors") == 0
    assert (devices[0] / "journal.rejected").exists() == (name == JOURNAL and how != "deleted")


def test_what_a_reset_emptied_stays_empty(tmp_devices: Devices) -> None:
    """Saved without anybody's look in between, though the manifest is not there to be changed."""
    devices = tmp_devices(2)
    where = place(devices)
    rank = open_rank(where, 0, Counters())
    index, rebalancer = open_index(where)
    fill(index, 5)
    for path in (devices[0] / NAME, devices[0] / COPY, devices[1] / COPY):
        path.unlink()
    (devices[0] / JOURNAL).unlink()
    rebalancer.forget_stored()
    assert rebalancer.close()
    close(rank)
    # No close of the index: as if the process was killed.
    found = Manifest.load(devices[0])
    assert found is not None
    assert all(segment.since for segment in found.segments)
    assert (devices[0] / COPY).read_bytes() == (devices[0] / NAME).read_bytes()
    index.close()


@pytest.mark.parametrize("again", ["gone", "another one", "emptied"])
def test_nothing_is_put_into_another_directory(
    store: Open, again: str, caplog: pytest.LogCaptureFixture
) -> None:
    devices, index, _, counters = store
    fill(index, 3)
    if again == "emptied":
        with locked(devices[0]):  # nobody puts the first ones back meanwhile
            for file in sorted(devices[0].iterdir(), key=lambda file: file.name == JOURNAL):
                file.unlink()
    else:
        shutil.move(devices[0], devices[0].with_name("away"))
    if again == "another one":
        devices[0].mkdir()
    until(lambda: "is gone, or is another one" in caplog.text, "the word about the directory")
    fill(index, 3)
    index.flush()
    index.close()
    assert not devices[0].exists() or list(devices[0].iterdir()) == []
    restored = [counters.total("state_files_restored", file=file) for file in (NAME, COPY)]
    assert [*restored, index.counters["journal_restores"]] == [0, 0, 0]


def test_a_device_without_data_gets_no_copy(store: Open) -> None:
    devices, _, _, counters = store
    # The copy is the last: nobody puts it back while there is data.
    for file in sorted(devices[1].iterdir(), key=lambda file: file.name == COPY):
        file.unlink()
    for times in (1, 2):  # the second look begins when the first one has been at all devices
        (devices[0] / COPY).unlink()
        until(
            lambda times=times: counters.total("state_files_restored", file=COPY) == times,
            "the copy beside the manifest",
        )
    assert list(devices[1].iterdir()) == []


def test_a_look_that_fails_is_tried_again(
    store: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the manifest and of the journal: whatever is raised ends no thread."""
    devices, index, _, counters = store

    def fail(*_: object) -> bool:
        raise ValueError("of a test")

    with monkeypatch.context() as patch:
        patch.setattr("vllm_ssdkv.base.held_directory.os.path.samestat", fail)
        (devices[0] / JOURNAL).unlink()
        (devices[0] / NAME).unlink()
        until(lambda: counters.total("manifest_errors") > 1, "attempts")
        until(lambda: index.counters["journal_look_errors"] > 1, "attempts")
    until((devices[0] / NAME).exists, "the manifest")
    until((devices[0] / JOURNAL).exists, "the journal")
    assert caplog.text.count("cannot be looked after") == 2
