"""Gauges of the index: "in use" is a share of what the store has room for, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.store.opening import CAPACITY, MODEL, close, fill, place
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.connector.metrics.index_metrics import IndexMetrics
from vllm_ssdkv.connector.scheduler.device_weights import DeviceShares
from vllm_ssdkv.store.index.slot_index import SlotIndex
from vllm_ssdkv.store.maintenance.catalog import summarize
from vllm_ssdkv.store.maintenance.offline_store import find_store
from vllm_ssdkv.store.open import open_index, open_rank
from vllm_ssdkv.store.placement import segments as dividing
from vllm_ssdkv.store.placement.rebalancer import Restriper

Devices = Callable[[int], list[Path]]


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dividing, "MIN_SLOTS", 16)


def told(index: SlotIndex, restriper: Restriper) -> dict[str, float]:
    counters = Counters()
    IndexMetrics(index, restriper, counters).update()
    return dict(counters.take_gauges())


def opened(paths: list[Path], **options: Any) -> tuple[SlotIndex, Restriper]:  # noqa: ANN401 - any option
    store = open_rank(place(paths, MODEL, **options), 0, Counters())
    index, restriper = open_index(place(paths, MODEL, **options))
    close(store)
    return index, restriper


def check(index: SlotIndex, restriper: Restriper, devices: list[Path]) -> dict[str, float]:
    """Gauges add up, and commands say the same."""
    found = told(index, restriper)
    gauges = index.gauges()
    assert found["slots"] == gauges["ready"] + gauges["free"]
    assert found["slots"] - found["slots_free"] == gauges["ready"]
    assert restriper.close()
    index.close()
    summary = summarize(find_store([], devices[0]))
    assert (summary.stored, summary.slots) == (gauges["ready"], found["slots"])
    return found


@pytest.mark.parametrize(
    "change",
    [
        {"replicas": 2},
        {"capacity": 2 * CAPACITY},
        {"capacity": (CAPACITY * 9 // 8)},
        {"weight": 0.25},
        {},
    ],
    ids=str,
)
def test_after_a_change_of_size_or_copies(tmp_devices: Devices, change: dict[str, Any]) -> None:
    """The index has numbers to spare then, for segments that are striped anew."""
    devices = tmp_devices(3)
    index, restriper = opened(devices)
    fill(index, index.num_slots // 2)
    assert check(index, restriper, devices)["slots"] == index.num_slots
    entries = [{"path": d, "capacity": CAPACITY, "weight": 1} for d in devices]
    entries[1] |= {k: v for k, v in change.items() if k != "replicas"}
    options = {"devices": entries, "replicas": change.get("replicas", 1)}
    index, restriper = opened(devices, **options)
    found = check(index, restriper, devices)
    assert found["slots"] == restriper.placement.slots
    # And back again.
    index, restriper = opened(devices)
    check(index, restriper, devices)


def test_a_device_that_is_lost_is_no_room(tmp_devices: Devices) -> None:
    devices = tmp_devices(3)
    index, restriper = opened(devices)
    fill(index, index.num_slots)
    shares = DeviceShares(restriper, [str(device) for device in devices])
    before = told(index, restriper)
    assert before["slots_free"] == 0
    shares.lose(2, index)
    after = told(index, restriper)
    every = np.arange(index.num_slots, dtype=np.int64)
    gone = int(restriper.placement.lost(restriper.out_of_use(), every).sum())
    assert after["slots"] < before["slots"]
    assert after["slots"] - after["slots_free"] == index.gauges()["ready"]
    assert gone > 0
    restriper.close()
    index.close()
