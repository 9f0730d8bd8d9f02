"""Frames of a step's contexts: what is kept from one step to the next, and until when."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.store.conftest import array
from vllm_ssdkv.store.cache.frames import NO_FRAME, FrameCache, FrameState
from vllm_ssdkv.store.memory.arena import Arena
from vllm_ssdkv.store.read.context_frames import NO_SLOTS, ContextFrames

FRAME_BYTES, FRAMES, SLOTS = 4096, 6, 12


@pytest.fixture
def cache() -> Iterator[FrameCache]:
    arena = Arena(FRAMES * FRAME_BYTES)
    yield FrameCache(arena, 0, FRAME_BYTES, FRAMES, SLOTS)
    arena.close()


def hold(cache: FrameCache, slots: NDArray[np.int64]) -> None:
    cache.finish_io(cache.take(slots, FrameState.LOADING), FrameState.CLEAN)


def step(
    cache: FrameCache, contexts: list[NDArray[np.int64]], latest: ContextFrames | None
) -> ContextFrames:
    """A step's frames, equal to those of a step that nothing is known before."""
    found = ContextFrames.borrow(cache, contexts, latest)
    anew = ContextFrames.borrow(cache, contexts, None)
    for name in ("slots", "begin", "end", "frames", "address", "framed", "shared"):
        np.testing.assert_array_equal(getattr(found, name), getattr(anew, name), name)
    assert found.in_frames == anew.in_frames
    cache.give_back(found.frames)
    cache.give_back(anew.frames)
    return found


def test_a_step_keeps_what_it_had_until_anything_of_it_changes(cache: FrameCache) -> None:
    one, other = array([3, 4, 5]), array([3, 7])
    hold(cache, array([3, 4, 5, 7]))
    first = step(cache, [one, other], None)
    assert first.in_frames
    assert first.shared.tolist() == [0, 1, 2, 0, 3]
    assert step(cache, [one, other], first) is first
    longer = array([3, 7, 8])  # a block more, without a frame
    second = step(cache, [one, longer], first)
    assert not second.in_frames
    assert second.address[second.slots == 8] == 0
    assert step(cache, [one, longer], second) is second
    assert step(cache, [longer, one], second) is not second
    assert step(cache, [one, longer, NO_SLOTS], second) is not second
    assert step(cache, [one], second) is not second
    assert step(cache, [], second) is not second


def test_frames_that_come_and_go_are_seen(cache: FrameCache) -> None:
    one = array([3, 4])
    hold(cache, one)
    first = step(cache, [one], None)
    cache.forget(one[:1])
    second = step(cache, [one], first)
    assert second.frames[0] == NO_FRAME
    assert not second.in_frames
    hold(cache, array([9]))  # where 3 was
    hold(cache, one[:1])
    third = step(cache, [one], second)
    assert third.in_frames
    assert third.frames[0] != first.frames[0]
