"""The scheduler's guess of what is in DRAM."""

from __future__ import annotations

import numpy as np

from vllm_ssdkv.connector.scheduler.residency import ResidentSlots


def guess(resident: ResidentSlots, *slots: int) -> list[bool]:
    found: list[bool] = resident.which(np.array(slots, dtype=np.int64)).tolist()
    return found


def test_nothing_is_in_dram_while_its_size_is_unknown() -> None:
    resident = ResidentSlots()
    resident.touch([1, 2])
    assert guess(resident, 1, 2) == [False, False]


def test_the_newest_are_in_dram() -> None:
    resident = ResidentSlots()
    resident.set_frames(32)
    resident.touch(range(30))
    assert guess(resident, 0, 29) == [True, True]
    resident.touch([0])
    resident.touch([100, 101])
    assert guess(resident, 0, 1, 2, 3, 29, 100, 101) == [True, False, False, True, True, True, True]


def test_memory_is_bounded_by_the_frames() -> None:
    resident = ResidentSlots()
    resident.set_frames(64)
    resident.touch(range(10_000))
    assert len(resident._slots) == 60


def test_frames_come_and_go() -> None:
    """Memory is lent to them (``store/cache/dram_balancer.py``)."""
    resident = ResidentSlots()
    resident.set_frames(64)
    resident.touch(range(60))
    resident.set_frames(32)
    assert guess(resident, 29, 30, 59) == [False, True, True]
    resident.set_frames(64)
    resident.touch([0])
    assert guess(resident, 0, 29, 30) == [True, False, True]
