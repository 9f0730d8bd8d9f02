"""Turns between batches: nobody is passed over while ready."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_ssdkv.batch.turns import Turns


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_whoever_has_work_gets_every_nth_turn(work: list[int]) -> None:
    turns: Turns[int] = Turns()
    for key in range(len(work)):
        turns.join(key)
        turns.join(key)
    left = list(work)
    given_turns: list[int] = []
    while (key := turns.next(lambda k: left[k] > 0)) is not None:
        left[key] -= 1
        given_turns.append(key)
    assert left == [0] * len(work)
    for a in range(len(work)):
        for b in range(len(work)):
            both = min(work[a], work[b])
            seen = [0, 0]
            for key in given_turns:
                seen[0] += key == a
                seen[1] += key == b
                if max(seen) > both:
                    break
                assert a == b or abs(seen[0] - seen[1]) <= 1


def test_who_has_left_gets_no_turn_and_who_was_not_ready_comes_first() -> None:
    turns: Turns[str] = Turns()
    for key in "abc":
        turns.join(key)
    assert turns.next(lambda key: key != "a") == "b"
    assert turns.next(lambda _: True) == "a"
    turns.leave("c")
    turns.leave("c")
    assert turns.next(lambda _: True) == "b"
    assert turns.next(lambda _: False) is None
