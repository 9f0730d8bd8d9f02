"""A start that fails, wherever it does: what was opened is closed, and the next start works."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.kit.waiting import until
from tests.store.opening import fill, impatient, place
from vllm_ssdkv.base.errors import DeviceError, StoreError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store import open as opening
from vllm_ssdkv.store import tiered_store
from vllm_ssdkv.store.devices.data_device import open_device
from vllm_ssdkv.store.devices.manifest_copies import CopySpreader
from vllm_ssdkv.store.format.journal_record import JOURNAL
from vllm_ssdkv.store.index.slot_index import SlotIndex
from vllm_ssdkv.store.io.engines.open import EngineOptions, open_engine
from vllm_ssdkv.store.maintenance import journal_rebuild
from vllm_ssdkv.store.memory.arena import Arena
from vllm_ssdkv.store.open import StorePlace, open_index, open_rank
from vllm_ssdkv.store.placement.rebalancer import Rebalancer
from vllm_ssdkv.store.tiered_store import TieredStore

pytestmark = pytest.mark.usefixtures("small_segments")

Devices = Callable[[int], list[Path]]
Patch = pytest.MonkeyPatch


def descriptors() -> list[str]:
    """Files that this process has open, without those of Python itself."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    return sorted(path for path in found if "ssdkv-test-" in path)


@contextmanager
def nothing_left() -> Iterator[None]:
    """Files that are opened here are closed, and threads that begin here end."""
    before, threads = descriptors(), set(threading.enumerate())
    yield
    assert descriptors() == before
    until(lambda: not set(threading.enumerate()) - threads, "the end of all threads")


def fails(patch: Patch, owner: Any, name: str, *, call: int = 1) -> list[int]:  # noqa: ANN401 - any
    """Have a function, method or class raise when it is called for the ``call``-th time."""
    real, calls = getattr(owner, name), []

    def failing(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any
        calls.append(1)
        if len(calls) == call:
            raise StoreError("no luck")
        return real(*args, **kwargs)

    patch.setattr(owner, name, failing)
    return calls


def run(where: list[Path], **options: Any) -> None:  # noqa: ANN401 - any option
    """Start and end as an engine does."""
    with impatient():
        store = open_rank(place(where, **options), 0, Counters())
        index, restriper = open_index(place(where, **options))
    fill(index, 3)
    assert restriper.close()
    assert index.close()
    store.close()


@pytest.mark.parametrize("engine", ["threads", "aiofiles"])
@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        (opening, "open_device", 2),
        (opening, "claim", 2),
        (Arena, "__init__", 1),
        (opening, "open_engine", 1),
        (Arena, "populate", 1),
        (opening, "DeviceHealth", 1),
        (opening, "SlotIO", 1),
        (opening, "OpenStore", 1),
    ],
)
def test_a_rank_that_does_not_open(
    tmp_devices: Devices, monkeypatch: Patch, owner: object, name: str, call: int, engine: str
) -> None:
    where = tmp_devices(3)
    options = {"io": {"staging": "4MiB", "engine": engine}}
    with nothing_left():
        with monkeypatch.context() as patch:
            calls = fails(patch, owner, name, call=call)
            with pytest.raises(StoreError, match="no luck") as caught:
                open_rank(place(where, **options), 0, Counters())
        assert len(calls) == call
        run(where, **options)
        del caught  # until here, nothing was closed by being forgotten


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (threading.Thread, "start"),  # the journal's
        (opening, "SlotIndex"),
        (SlotIndex, "flush"),
        (CopySpreader, "spread"),
        (opening, "BackgroundSaver"),
        (opening, "Rebalancer"),
        (Rebalancer, "step_and_wait"),
    ],
)
def test_an_index_that_does_not_open(
    tmp_devices: Devices, monkeypatch: Patch, owner: object, name: str
) -> None:
    where = tmp_devices(2)
    run(where)
    with nothing_left():
        with monkeypatch.context() as patch:
            calls = fails(patch, owner, name)
            with pytest.raises(StoreError, match="no luck") as caught:
                open_index(place(where))
        assert calls
        run(where)
        del caught


def test_segments_that_are_never_saved(tmp_devices: Devices, monkeypatch: Patch) -> None:
    """The thread that tries it again ends with the start."""
    first, second = tmp_devices(1), tmp_devices(1)
    run(first)
    with nothing_left():
        with monkeypatch.context() as patch, impatient():

            def fail(*_: object) -> None:
                raise StoreError("no luck")

            patch.setattr(StorePlace, "save_segments", fail)
            patch.setattr(opening, "Rebalancer", WithAnotherWeight)
            with pytest.raises(StoreError, match="could not be saved") as caught:
                open_index(place([*first, *second]))
        run([*first, *second])
        del caught


class WithAnotherWeight(Rebalancer):
    """One that finds at once that what is empty is striped as it should not be."""

    def step_and_wait(self, timeout_s: float) -> None:
        self.reweigh([1.0, 0.3])
        super().step_and_wait(timeout_s)


def test_a_store_that_is_closed_before_it_had_threads(tmp_devices: Devices) -> None:
    """The engine's descriptors are duplicates, and hold the locks."""
    where = tmp_devices(2)
    with nothing_left():
        store = open_rank(place(where), 0, Counters())
        store.close()
        store.close()
        run(where)


def test_threads_of_a_store_that_does_not_begin(tmp_devices: Devices, monkeypatch: Patch) -> None:
    where = tmp_devices(2)
    options = {"io": {"staging": "4MiB", "scrub_rate": "1MiB"}}
    with nothing_left():
        opened = open_rank(place(where, **options), 0, Counters())
        with monkeypatch.context() as patch:
            fails(patch, tiered_store, "Scrubber")
            with pytest.raises(StoreError, match="no luck") as caught:
                TieredStore(
                    opened.files,
                    opened.arena,
                    opened.plan,
                    opened.num_slots,
                    32,
                    lambda *_: None,
                    scrub_rate=1 << 20,
                )
        opened.close()
        run(where)
        del caught


def test_a_journal_that_is_not_made_anew(tmp_devices: Devices, monkeypatch: Patch) -> None:
    where = tmp_devices(3)
    run(where)
    (where[0] / JOURNAL).unlink()
    with nothing_left():
        with monkeypatch.context() as patch:
            fails(patch, journal_rebuild, "open_data_file", call=2)
            with pytest.raises(StoreError, match="no luck") as caught:
                open_index(place(where))
        run(where)
        del caught


def test_a_data_file_whose_name_is_not_durable(tmp_devices: Devices, monkeypatch: Patch) -> None:
    (where,) = tmp_devices(1)
    with nothing_left():
        with monkeypatch.context() as patch:

            def fail(_: int) -> None:
                raise OSError(5, "Input/output error")

            patch.setattr(os, "fsync", fail)
            with pytest.raises(DeviceError, match="cannot open") as caught:
                open_device(
                    where, index=0, rank=0, nbytes=1 << 20, direct="auto", lock_timeout_s=0.0
                )
        del caught


@pytest.mark.parametrize("engine", ["aiofiles"])
def test_an_engine_without_a_thread(tmp_devices: Devices, monkeypatch: Patch, engine: Any) -> None:  # noqa: ANN401 - a literal
    (where,) = tmp_devices(1)
    path = where / "data"
    path.write_bytes(bytes(4096))
    arena = Arena(1 << 20)
    with nothing_left():
        fd = os.open(path, os.O_RDWR)
        with monkeypatch.context() as patch:
            fails(patch, threading.Thread, "start")
            with pytest.raises(StoreError, match="no luck") as caught:
                open_engine(EngineOptions(engine=engine), [fd], [path], arena)
        os.close(fd)
        del caught
    arena.close()
