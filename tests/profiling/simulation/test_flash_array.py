"""Dies and channels as events: the closed form's rates, and reads behind programs."""

from __future__ import annotations

import pytest

from vllm_ssdkv.profiling.simulation.flash_array import FlashArray
from vllm_ssdkv.profiling.simulation.hardware import Flash, find

FLASH = find(Flash, "970pro-class")
PAGES = 2048


@pytest.mark.parametrize("dies", [1, 2, 4])
def test_many_reads_are_as_fast_as_the_closed_form(dies: int) -> None:
    flash = FLASH.with_figures(dies=dies, link_bandwidth=1e12)
    seconds = FlashArray(flash).run(range(PAGES), ())
    rate = PAGES * flash.page_bytes / seconds
    assert rate == pytest.approx(flash.as_drive("d").read_bandwidth, rel=0.05)


def test_many_programs_are_as_fast_as_the_closed_form() -> None:
    flash = FLASH.with_figures(link_bandwidth=1e12)
    seconds = FlashArray(flash).run((), range(PAGES))
    rate = PAGES * flash.page_bytes / seconds
    assert rate == pytest.approx(flash.as_drive("d").write_bandwidth, rel=0.05)


def test_channels_are_never_busy_for_more_than_all_of_the_time() -> None:
    array = FlashArray(FLASH)
    array.run(range(500), range(300))
    for usage in array.usage():
        assert 0 < usage.utilisation <= 1 + 1e-9
    assert sum(usage.nbytes for usage in array.usage()) == 800 * FLASH.page_bytes


def test_reads_wait_for_programs_on_their_die_only() -> None:
    """A program that is under way is not interrupted: latency is no scalar."""
    dies = FLASH.channels * FLASH.dies
    alone, beside = FlashArray(FLASH), FlashArray(FLASH)
    alone.run(range(dies), ())
    beside.run(range(dies), [0])
    assert max(beside.stays) >= max(alone.stays) + 0.9 * FLASH.program_s
    assert sorted(beside.stays)[: dies // 2] == pytest.approx(sorted(alone.stays)[: dies // 2])


def test_more_dies_or_faster_ones_are_not_slower() -> None:
    base = FlashArray(FLASH).run(range(400), range(100))
    for change in ({"dies": 4}, {"read_s": 20e-6}, {"program_s": 90e-6}, {"channels": 16}):
        faster = FLASH.with_figures(**change)
        assert FlashArray(faster).run(range(400), range(100)) <= base * (1 + 1e-9)
