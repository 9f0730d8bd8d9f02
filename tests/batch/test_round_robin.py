"""Turns: batches of a key are passed over by none of them, and keys share the seats."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_ssdkv.batch.round_robin import Turns

ME, OTHER = b"me", b"other"


def take(turns: Turns[int], left: list[int], owner: bytes = ME) -> int | None:
    """The next one that has work, which has its turn."""
    key = turns.next(lambda key: left[key] > 0, lambda _: 0)
    if key is not None:
        left[key] -= 1
        turns.took(owner, key)
    return key


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_whoever_has_work_gets_every_nth_turn(work: list[int]) -> None:
    turns: Turns[int] = Turns()
    for key in range(len(work)):
        turns.join(ME, key)
        turns.join(ME, key)
    left = list(work)
    given_turns: list[int] = []
    while (key := take(turns, left)) is not None:
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


def test_who_has_left_gets_no_turn_and_who_is_passed_over_keeps_its_place() -> None:
    turns: Turns[str] = Turns()
    for key in "abc":
        turns.join(ME, key)

    def next_one(but: str = "") -> str | None:
        return turns.next(lambda _: True, lambda _: 0, but)

    assert next_one("a") == "b"
    assert next_one() == "a"
    turns.took(ME, "a")
    turns.leave(ME, "c")
    turns.leave(ME, "c")
    assert next_one() == "b"
    turns.took(ME, "b")
    assert next_one() == "a"
    turns.leave(ME, "a")
    turns.leave(ME, "b")
    assert next_one() is None


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 8))
def test_keys_have_as_many_seats_however_many_batches(lengths: list[int], seats: int) -> None:
    """One key's requests take as long as they like, another's end at once."""
    turns: Turns[int] = Turns()
    for key in range(len(lengths)):
        turns.join(ME, key)
    turns.join(OTHER, -1)
    running: list[tuple[int, bytes]] = []
    most, now = 0, 0
    for now in range(200):
        running = [one for one in running if one[0] > now]
        while len(running) < seats:
            held = [owner for _, owner in running]
            key = turns.next(lambda _: True, held.count)
            assert key is not None
            owner, length = (OTHER, 1) if key < 0 else (ME, 5 * lengths[key])
            turns.took(owner, key)
            running.append((now + length, owner))
        most = max(most, sum(owner == ME for _, owner in running))
    assert most <= (seats + 1) // 2
