"""Limit of the frames that workers copy from by themselves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_ssdkv.node.server.hosted_rank import LentFrames


@given(st.integers(0, 20), st.lists(st.integers(-3, 8)))
def test_half_of_the_frames_may_be_lent(frames: int, steps: list[int]) -> None:
    lent = LentFrames(lambda: frames)
    out: list[int] = []
    for step in steps:
        if step < 0 and out:
            lent.give_back(out.pop())
        elif step >= 0:
            fits = 2 * (sum(out) + step) <= frames
            assert lent.take(step) == fits
            out += [step] if fits else []
