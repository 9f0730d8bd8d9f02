"""Flash of drives that attend: the closed form against events, address maps, and erases."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tests.oracles.flash_events import read_s
from vllm_ssdkv.offload.testing.drive_timing import DRIVES
from vllm_ssdkv.offload.testing.flash import BLOCK_BYTES, ERASE_S, FlashTiming, IdleErasure

FLASH = FlashTiming(channels=4, dies=2, page_bytes=4096, read_s=40e-6, channel_bandwidth=1e9)


@pytest.mark.parametrize(
    ("dies", "read_us"), [(1, 40.0), (2, 40.0), (8, 40.0), (16, 40.0), (8, 5.0)]
)
def test_many_reads_are_as_fast_as_the_closed_form(dies: int, read_us: float) -> None:
    flash = FlashTiming(4, dies, 4096, read_us * 1e-6, 1e9)
    pages = 2000
    seconds = read_s(flash, [page % 4 for page in range(pages)])
    assert pages * 4096 / seconds == pytest.approx(flash.bandwidth, rel=0.05)


def test_the_fullest_channel_ends_last() -> None:
    loads = [300, 100, 100, 20]
    pages = [channel for channel, count in enumerate(loads) for _ in range(count)]
    assert read_s(FLASH, pages) == pytest.approx(FLASH.read_pages_s(loads), rel=0.05)


def test_times_by_hand() -> None:
    assert FLASH.transfer_s == pytest.approx(4.096e-6)
    assert FLASH.page_s == pytest.approx((40e-6 + 4.096e-6) / 2)
    assert FlashTiming(4, 16, 4096, 40e-6, 1e9).page_s == pytest.approx(4.096e-6)
    # What a drive of InstInfer reads inside follows from its flash. The paper prints 7.66.
    flash = DRIVES["instinfer"].flash
    assert flash.bandwidth == pytest.approx(8 * 8 * 4096 / (36e-6 + 4096 / 1.4e9))
    assert flash.bandwidth == pytest.approx(6.734e9, rel=1e-4)
    assert DRIVES["smartssd"].flash.bandwidth == pytest.approx(3e9)


@pytest.mark.parametrize("heads", [1, 3, 8])
def test_a_head_lies_on_all_channels_and_heads_begin_on_others(heads: int) -> None:
    pages = np.arange(64)
    placed = FLASH.channel(pages[:, None], np.arange(heads))
    for head in range(heads):
        assert np.bincount(placed[:, head], minlength=4).tolist() == [16] * 4
    assert placed[0].tolist() == [head % 4 for head in range(heads)]
    assert (np.diff(placed, axis=0) % 4 == 1).all()


def erased(idle: Sequence[float], blocks: float) -> tuple[list[float], IdleErasure]:
    erasure = IdleErasure(FLASH)
    erasure.drop(blocks * BLOCK_BYTES)
    return [erasure.idle(seconds) for seconds in idle], erasure


def test_blocks_are_erased_in_idle_time_one_for_each_die_at_once() -> None:
    # Eight dies: 20 blocks are three turns. An erase under way is ended.
    found, erasure = erased([0.5 * ERASE_S, 10 * ERASE_S, ERASE_S], 20.5)
    assert found == pytest.approx([ERASE_S, 2 * ERASE_S, 0.0])
    assert (erasure.erased, erasure.stale) == (20, 0.5)
    # No idle time, nothing that is whole: nothing is erased.
    assert erased([0.0], 20)[1].erased == 0
    assert erased([1.0], 0.9)[0] == [0.0]
