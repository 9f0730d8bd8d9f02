"""A store that nobody gave a size starts small, and grows to its limit whatever happens."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from typer.testing import CliRunner

from tests.kit.waiting import until
from tests.store.conftest import PAGED, PATIENCE_S
from tests.store.opening import MODEL, Opened, close, fill, found
from vllm_ssdkv.base import host
from vllm_ssdkv.base.errors import StoreError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.cli.main import app
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.index.slot_index import SlotIndex
from vllm_ssdkv.store.index_metrics import IndexMetrics
from vllm_ssdkv.store.maintenance.catalog import summarize
from vllm_ssdkv.store.maintenance.offline_store import find_store
from vllm_ssdkv.store.open import StorePlace, open_index
from vllm_ssdkv.store.placement import growth as growing
from vllm_ssdkv.store.placement.growth import DataFileSpace
from vllm_ssdkv.store.placement.rebalancer import Rebalancer

pytestmark = pytest.mark.usefixtures("small_segments")

LIMIT = 48 << 20


@pytest.fixture
def home(
    tmp_devices: Callable[[int], list[Path]], monkeypatch: pytest.MonkeyPatch, roomy_disk: None
) -> Path:
    """The cache directory of a user who names no devices."""
    (root,) = tmp_devices(1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(root))
    monkeypatch.setattr(host, "DEFAULT_CAPACITY_LIMIT", LIMIT)
    monkeypatch.setattr(growing, "PAUSE_S", 0.0)
    return root / "ssdkv"


def place(
    shapes: Sequence[SlotGeometry] = (PAGED,),
    **options: Any,  # noqa: ANN401 - any option
) -> StorePlace:
    mode = "page" if shapes[0].kind == "paged" else "reuse"
    given = {"mode": mode, "dram_gib": "40MiB", "io": {"staging": "4MiB"}} | options
    return StorePlace(SSDKVConfig.from_extra_config(given), shapes, MODEL, run="")


def grow(rebalancer: Rebalancer) -> None:
    """Steps of an engine, until nothing more is to come now."""

    def idle() -> bool:
        rebalancer.step()
        return not rebalancer.under_way

    until(idle, "the growth")


def store_until_full(
    index: SlotIndex, rebalancer: Rebalancer, seen: Callable[[], None] = lambda: None
) -> dict[int, bytes]:
    keys: dict[int, bytes] = {}
    while True:
        grow(rebalancer)
        seen()
        free = index.free_now()
        if not free:
            return keys
        keys |= fill(index, free)


def gauges(counters: Counters) -> dict[str, float]:
    return dict(counters.take_gauges())


def data_bytes(home: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in home.rglob("*.data"))


def used(home: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in home.rglob("*"))


@pytest.mark.parametrize(
    "shapes",
    [
        [PAGED],
        [PAGED, PAGED],
        [SlotGeometry("opaque", layers, 1, 1, 8192) for layers in (13, 2)],
    ],
    ids=["one rank", "two ranks", "stages"],
)
def test_it_starts_small_and_grows_to_its_limit(
    home: Path, opened: Opened, shapes: list[SlotGeometry]
) -> None:
    where, ranks = place(shapes), range(len(shapes))
    stores = [opened(where, rank) for rank in ranks]
    assert data_bytes(home) < LIMIT // 8
    index, rebalancer = open_index(where)
    assert rebalancer.growth is not None
    most = rebalancer.placement.slots + rebalancer.growth.to_come
    assert rebalancer.placement.slots < most // 10
    sizes: list[int] = []

    def seen() -> None:
        segments = rebalancer.take_segments()
        for store in stores if segments is not None else ():
            store.files.placement.change(segments)
        sizes.append(rebalancer.placement.slots)
        assert used(home) <= LIMIT
        for rank, store in enumerate(stores):
            (data,) = home.rglob(f"rank{rank}.data")
            assert data.stat().st_size == store.files.placement.device_bytes(0)

    keys = store_until_full(index, rebalancer, seen)
    assert len(sizes) > 10
    assert sizes == sorted(sizes)
    assert len(keys) == rebalancer.placement.slots
    assert 0.95 * most <= len(keys) <= most
    assert rebalancer.growth.to_come == 0
    assert data_bytes(home) > 0.9 * LIMIT
    assert rebalancer.close()
    index.close()
    for store in stores:
        close(store)
    # A restart has all of it, and has nothing to grow.
    stores = [opened(place(shapes), rank) for rank in ranks]
    index, rebalancer = open_index(place(shapes))
    assert found(index, keys) == set(keys)
    grow(rebalancer)
    assert rebalancer.placement.slots == len(keys)
    index.close()


def test_a_reservation_that_hangs_is_late(
    home: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(place())
    index, rebalancer = open_index(place())
    go = threading.Event()
    monkeypatch.setattr(DataFileSpace, "reserve", lambda space, nbytes: go.wait(PATIENCE_S))
    fill(index, index.free_now())
    clock = [0.0]
    monkeypatch.setattr(rebalancer, "_clock", lambda: clock[0])
    monkeypatch.setattr(rebalancer.growth, "_clock", lambda: clock[0])
    rebalancer.step()
    clock[0] += 7.0
    rebalancer.check_progress(7.0)
    with pytest.raises(StoreError, match="no new slots since 7 s, since a file system hangs"):
        rebalancer.check_progress(6.9)
    go.set()
    grow(rebalancer)
    rebalancer.check_progress(0.0)
    assert rebalancer.close()
    index.close()
    close(store)


def test_a_restart_goes_on_growing(home: Path, opened: Opened) -> None:
    keys: dict[int, bytes] = {}
    steps: list[int] = []
    for _ in range(4):
        store = opened(place())
        index, rebalancer = open_index(place())
        assert found(index, keys) == set(keys)
        steps.append(rebalancer.placement.slots)
        keys |= fill(index, index.free_now())
        grow(rebalancer)
        keys |= fill(index, index.free_now())
        assert rebalancer.close()
        index.close()
        close(store)
    each = steps[1] - steps[0]
    assert each > 0
    assert [b - a for a, b in pairwise(steps)] == [each] * 3
    assert steps[0] == each


@pytest.mark.parametrize("instant", ["space", "manifest", "slots"])
def test_a_kill_at_any_instant(
    home: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch, instant: str
) -> None:
    """Before the files have their space, before the manifest has the segment, before its use."""
    store = opened(place())
    index, rebalancer = open_index(place())
    before = rebalancer.placement.slots
    keys = fill(index, index.free_now())
    assert rebalancer.growth is not None
    reserve, never = rebalancer.growth._reserve, threading.Event()

    def cut_short(segment: Any) -> None:  # noqa: ANN401 - a segment
        if instant == "space":
            never.wait(PATIENCE_S)
        reserve(segment)

    monkeypatch.setattr(rebalancer.growth, "_reserve", cut_short)
    if instant == "manifest":
        monkeypatch.setattr(rebalancer, "add", lambda _: False)
    rebalancer.step()
    if instant != "space":
        assert rebalancer.growth._thread is not None
        rebalancer.growth._thread.join(PATIENCE_S)
        assert data_bytes(home) > rebalancer.placement.device_bytes(0) + 4096
        rebalancer.step()
    assert rebalancer._saver.wait(PATIENCE_S)
    assert rebalancer.placement.slots == before
    index.close()
    close(store)
    # The next start knows nothing of it, or all.
    opened(place())
    index, rebalancer = open_index(place())
    assert found(index, keys) == set(keys)
    now = rebalancer.placement.slots
    assert now == before if instant != "slots" else now > before
    (data,) = home.rglob("*.data")
    assert data.stat().st_size == rebalancer.placement.device_bytes(0)
    store_until_full(index, rebalancer)
    assert rebalancer.placement.slots > 10 * before
    index.close()
    never.set()


def test_a_step_never_waits_for_it(
    home: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(place())
    index, rebalancer = open_index(place())
    slow = threading.Event()
    monkeypatch.setattr(DataFileSpace, "reserve", lambda *_: slow.wait(PATIENCE_S))
    fill(index, index.free_now())
    begin = time.monotonic()
    for _ in range(100):
        rebalancer.step()
        assert rebalancer.under_way
    assert time.monotonic() - begin < PATIENCE_S, "as long as a wait would take"
    # Meanwhile it evicts, as any cache that is full.
    assert len(index.allocate(1)) == 1
    slow.set()
    index.close()


@pytest.mark.parametrize("why", ["little is left", "full"])
def test_a_full_disk_ends_it_for_the_time(
    home: Path,
    opened: Opened,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    why: str,
) -> None:
    opened(place())
    counters = Counters()
    index, rebalancer = open_index(place(), counters)
    growth = rebalancer.growth
    assert growth is not None
    clock = [0.0]
    monkeypatch.setattr(growth, "_clock", lambda: clock[0])
    metrics = IndexMetrics(index, rebalancer, counters)
    metrics.update()
    whole = gauges(counters)["slots"]
    with monkeypatch.context() as patch:
        if why == "full":
            patch.setattr(growing._io, "preallocate", lambda *_: errno.ENOSPC)
        else:
            patch.setattr(growing, "SPARE", 2.0)
        keys = store_until_full(index, rebalancer)
        assert counters.total("growth_errors") == 1
        for _ in range(3):
            clock[0] += growing.RETRY_S
            rebalancer.step()
            until(lambda: rebalancer.step() or not growth.busy, "another attempt")
    assert counters.total("growth_errors") == 4
    assert sum("does not grow beyond" in message for message in caplog.messages) == 1
    # It goes on as it is, and says so: it is as full as it looks.
    assert len(keys) == rebalancer.placement.slots
    assert found(index, keys) == set(keys)
    assert growth.to_come == 0
    metrics.update()
    told = gauges(counters)
    assert told["slots"] == len(keys) < whole
    assert told["slots_free"] == 0
    # Later there is room again.
    clock[0] += growing.RETRY_S
    keys |= store_until_full(index, rebalancer)
    assert len(keys) > 0.9 * whole
    metrics.update()
    assert gauges(counters)["slots"] == rebalancer.placement.slots
    index.close()


def test_commands_and_metrics_count_the_same_slots(home: Path, opened: Opened) -> None:
    """Blocks of now and blocks to come, while the store grows and when it is whole."""
    store = opened(place())
    counters = Counters()
    index, rebalancer = open_index(place(), counters)
    metrics = IndexMetrics(index, rebalancer, counters)
    (state,) = {file.parent for file in home.rglob("store.json")}
    told: dict[str, float] = {}

    def counted() -> str:
        """The same by all."""
        metrics.update()
        told.update(gauges(counters))
        summary = summarize(find_store([], state))
        stored, now = index.gauges()["ready"], rebalancer.placement.slots
        assert (summary.stored, summary.slots - summary.slots_to_come) == (stored, now)
        assert (summary.slots, summary.slots_to_come) == (told["slots"], told["slots_to_come"])
        if not summary.slots_to_come:
            return f"{stored} of {now} blocks"
        return f"{stored} of {now} blocks now, up to {summary.slots}"

    def shown(command: str) -> str:
        return CliRunner(env={"COLUMNS": "300"}).invoke(app, [command, str(state)]).stdout

    texts = [counted()]
    assert "up to" in texts[0]
    assert all(f" {texts[0]}" in shown(command) for command in ("ls", "inspect", "quota"))
    store_until_full(index, rebalancer, lambda: texts.append(counted()))
    assert "up to" not in texts[-1]
    assert len(set(texts)) > 10
    assert rebalancer.close()
    index.close()
    close(store)
    assert f" {texts[-1]}\n" in shown("fsck")


def test_what_is_in_use_is_said_of_the_limit(home: Path, opened: Opened) -> None:
    """Not of what the store has grown to: it would seem full all its life."""
    opened(place())
    counters = Counters()
    index, rebalancer = open_index(place(), counters)
    metrics = IndexMetrics(index, rebalancer, counters)
    fill(index, index.free_now())
    grow(rebalancer)
    fill(index, index.free_now() // 2)
    metrics.update()
    told = gauges(counters)
    slots, free = told["slots"], told["slots_free"]
    ready = index.gauges()["ready"]
    assert slots - free == ready
    assert ready / slots < 0.2
    assert rebalancer.growth is not None
    assert slots == rebalancer.placement.slots + rebalancer.growth.to_come
    assert rebalancer.close()
    index.close()
    summary = summarize(find_store([], place().state))
    assert (summary.stored, summary.slots) == (ready, slots)


def test_a_store_with_devices_has_its_size(tmp_devices: Callable[[int], list[Path]]) -> None:
    devices = [{"path": d, "capacity": 16 << 20, "weight": 1} for d in tmp_devices(2)]
    index, rebalancer = open_index(place(devices=devices))
    assert rebalancer.growth is None
    assert rebalancer.placement.slots == index.num_slots
    index.close()


def test_a_store_of_an_earlier_release_keeps_what_it_has(home: Path, opened: Opened) -> None:
    """It took all of its space at once, and was a store with that device for a time."""
    where = place()
    where.prepare()
    device = [{"path": where.paths[0], "capacity": LIMIT, "weight": 1}]
    close(opened(place(devices=device)))
    index, _ = open_index(place(devices=device))
    keys = fill(index, index.free_now())
    index.close()
    opened(place())
    index, rebalancer = open_index(place())
    assert found(index, keys) == set(keys)
    assert rebalancer.growth is not None
    assert rebalancer.growth.to_come == 0
    index.close()


def test_who_needs_many_slots_gets_them(home: Path, opened: Opened) -> None:
    """A request of page mode waits until there is room for all of its context."""
    opened(place())
    index, rebalancer = open_index(place())
    assert rebalancer.growth is not None
    most = rebalancer.placement.slots + rebalancer.growth.to_come
    wanted = most // 2
    turns = 0
    while index.available() < wanted:
        rebalancer.step()
        assert rebalancer.grow_for(wanted) or index.available() >= wanted
        assert rebalancer._saver.wait(PATIENCE_S)
        turns += 1
        assert turns < 10_000
        time.sleep(0.001)
    index.reserve(wanted)
    index.close()


def test_a_file_without_preallocation_grows_too(
    home: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(place())
    index, rebalancer = open_index(place())
    monkeypatch.setattr(growing._io, "preallocate", lambda *_: errno.EOPNOTSUPP)
    keys = store_until_full(index, rebalancer)
    (data,) = home.rglob("*.data")
    assert data.stat().st_size == rebalancer.placement.device_bytes(0)
    assert len(keys) == rebalancer.placement.slots
    index.close()


def test_what_is_no_file_of_ours_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"x")
    link = tmp_path / "rank0.data"
    link.symlink_to(target)
    with pytest.raises(growing.DeviceError, match="symbolic link"):
        DataFileSpace([link], "of ours").reserve([1 << 20])
    assert os.stat(target).st_size == 1


def test_what_has_come_in_place_of_a_file_of_ours_is_left_alone(
    home: Path, opened: Opened, tmp_path: Path
) -> None:
    """A drive that was moved while the engine runs, with another store in its place."""
    opened(place())
    (data,) = home.rglob("rank0.data")
    store = place().stored().store
    size = data.stat().st_size
    with pytest.raises(growing.DeviceError, match="not the store's file any more"):
        DataFileSpace([data], str(uuid4())).reserve([2 * size])
    assert data.stat().st_size == size
    DataFileSpace([data], store).reserve([2 * size])
    assert data.stat().st_size == 2 * size
