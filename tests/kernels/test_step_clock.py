"""The native clock: every part has its time, and no other part."""

from __future__ import annotations

import time

import pytest

from vllm_ssdkv.kernels.step_clock import ATTEND, FETCH, PARTS, WAIT, AttentionClock


def test_a_lap_goes_to_its_part() -> None:
    clock = AttentionClock()
    assert list(clock.seconds) == [0.0] * len(PARTS)
    began = time.perf_counter()
    clock.start()
    time.sleep(0.01)
    clock.lap(WAIT)
    clock.lap(ATTEND)
    time.sleep(0.01)  # nobody's
    clock.start()
    clock.lap(ATTEND)
    seconds = dict(zip(PARTS, clock.seconds, strict=True))
    assert seconds["wait"] >= 0.01
    assert seconds["attend"] > 0
    assert 0 < clock.window_seconds < seconds["attend"]  # that of the second layer
    assert seconds["wait"] + seconds["attend"] <= time.perf_counter() - began - 0.01
    assert all(seconds[part] == 0 for part in PARTS if part not in {"wait", "attend"})


@pytest.mark.parametrize("part", [len(PARTS), 1000])
def test_there_are_no_other_parts(part: int) -> None:
    clock = AttentionClock()
    with pytest.raises(IndexError):
        clock.lap(part)
    assert list(clock.seconds) == [0.0] * len(PARTS)


def test_the_end_of_a_look_up_is_known_after_attention() -> None:
    clock = AttentionClock()
    began = time.monotonic()
    clock.start()
    clock.lap(FETCH)
    ended = time.monotonic()
    clock.lap(ATTEND)
    assert began <= clock.fetched_at <= ended
