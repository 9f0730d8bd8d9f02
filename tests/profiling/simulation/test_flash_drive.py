"""Inside of InstInfer's drive: what the maps give, against closed forms and draws."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from vllm_ssdkv.profiling.simulation.hardware import NearStorage, find
from vllm_ssdkv.profiling.simulation.papers import flash_drive
from vllm_ssdkv.profiling.simulation.papers.reproduce import results

FLASH = find(NearStorage, "instinfer-csd").drive.flash


def test_whole_contexts_are_read_at_the_bandwidth_of_the_flash() -> None:
    assert flash_drive.by_token() == pytest.approx(FLASH.bandwidth)
    (row,) = (one for one in results() if one.row == "P27")
    assert row.ours == pytest.approx(FLASH.bandwidth / 1e9)
    assert (row.verdict, row.kind) == ("miss", "arithmetic")


def test_pages_that_are_chosen_lie_less_evenly_than_all() -> None:
    loads = [flash_drive.by_token(share) for share in (1, 2, 8, 48)]
    assert loads == sorted(loads, reverse=True)
    assert 0.5 * FLASH.bandwidth < loads[-1] < loads[1] < loads[0]


@pytest.mark.parametrize("group", flash_drive.GROUPS)
def test_pages_by_channel_that_are_read(group: int) -> None:
    draw, pages = random.Random(3), 128 // group
    drawn = [len({channel // group for channel in draw.sample(range(128), 16)}) for _ in range(999)]
    assert flash_drive.by_channel(group) == pytest.approx(fmean(drawn) / pages, rel=0.02)


def test_ranges_copy_nothing_and_no_write_waits() -> None:
    ranges, shared = (flash_drive.contexts(ranges=ranges) for ranges in (True, False))
    assert ranges.written == shared.written == ranges.programmed
    assert ranges.erases == 0
    assert ranges.idle_erases > 0
    assert shared.programmed > shared.written
    assert shared.erases > 0
    found = {str(row[0]): row[1] for row in flash_drive.table().rows}
    assert found["GB/s by token, all pages"] == "6.73"
    assert found["pages programmed for each written"] == "1.00, 1.02"
    assert found["erases that a write waits for"] == "0%, 23%"
