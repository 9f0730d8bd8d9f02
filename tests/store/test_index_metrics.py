"""Gauges of the index: "in use" is a share of what the store has room for, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.store.opening import CAPACITY, MODEL, close, fill, place
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store.device_weights import DeviceWeights
from vllm_ssdkv.store.index.slot_index import SlotIndex
from vllm_ssdkv.store.index_metrics import IndexMetrics
from vllm_ssdkv.store.maintenance.catalog import summarize
from vllm_ssdkv.store.maintenance.offline_store import find_store
from vllm_ssdkv.store.open import open_index, open_rank
from vllm_ssdkv.store.placement import segments as dividing
from vllm_ssdkv.store.placement.rebalancer import Rebalancer

Devices = Callable[[int], list[Path]]


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dividing, "MIN_SLOTS", 16)


def told(index: SlotIndex, rebalancer: Rebalancer) -> dict[str, float]:
    counters = Counters()
    IndexMetrics(index, rebalancer, counters).update()
    return dict(counters.take_gauges())


def opened(paths: list[Path], **options: Any) -> tuple[SlotIndex, Rebalancer]:  # noqa: ANN401 - any option
    store = open_rank(place(paths, MODEL, **options), 0, Counters())
    index, rebalancer = open_index(place(paths, MODEL, **options))
    close(store)
    return index, rebalancer


def check(index: SlotIndex, rebalancer: Rebalancer, devices: list[Path]) -> dict[str, float]:
    """Gauges add up, and commands say the same."""
    found = told(index, rebalancer)
    gauges = index.gauges()
    assert found["slots"] == gauges["ready"] + gauges["free"]
    assert found["slots"] - found["slots_free"] == gauges["ready"]
    assert rebalancer.close()
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
    index, rebalancer = opened(devices)
    fill(index, index.num_slots // 2)
    assert check(index, rebalancer, devices)["slots"] == index.num_slots
    entries = [{"path": d, "capacity": CAPACITY, "weight": 1} for d in devices]
    entries[1] |= {k: v for k, v in change.items() if k != "replicas"}
    options = {"devices": entries, "replicas": change.get("replicas", 1)}
    index, rebalancer = opened(devices, **options)
    found = check(index, rebalancer, devices)
    assert found["slots"] == rebalancer.placement.slots
    # And back again.
    index, rebalancer = opened(devices)
    check(index, rebalancer, devices)


def test_blocks_on_a_device_that_is_lost_count_as_room(tmp_devices: Devices) -> None:
    devices = tmp_devices(3)
    index, rebalancer = opened(devices)
    fill(index, index.num_slots)
    shares = DeviceWeights(rebalancer, [str(device) for device in devices])
    before = told(index, rebalancer)
    assert before["slots_free"] == 0
    shares.mark_lost(2)
    after = told(index, rebalancer)
    every = np.arange(index.num_slots, dtype=np.int64)
    gone = int(rebalancer.placement.lost(rebalancer.out_of_use(), every).sum())
    assert after["slots"] == before["slots"]
    assert after["slots"] - after["slots_free"] == before["slots_ready"]
    assert before["slots_ready"] - after["slots_ready"] == after["slots_masked"] == gone > 0
    assert before["slots_masked"] == 0
    rebalancer.close()
    index.close()
