"""Room in KV: what batches may take beside users, and what a request is expected to take."""

from __future__ import annotations

import pytest

from tests.kit.clock import Clock
from vllm_ssdkv.batch.answers import Usage
from vllm_ssdkv.batch.jobs import Pending
from vllm_ssdkv.batch.room import FIRST_ANSWER, MOST, STALE_S, Expected, KVCache, Load, Room


def room(share: float = 0.5, users_first: bool = False) -> tuple[Room, Clock]:
    clock = Clock(0.0)
    kv = KVCache(tokens=10_000, of_a_request=4000)
    return Room(kv, share, users_first=users_first, clock=clock), clock


def test_a_part_is_what_requests_take_at_most() -> None:
    """Of a window a request takes no more, however long its prompt."""
    tested, _ = room()
    assert tested.part(1000, 1) == 0.1
    assert tested.part(50_000, 1) == 0.4
    assert tested.part(50_000, 2) == 0.8
    assert Room(None, 0.5, users_first=False).part(50_000, 2) == 0


def test_batches_stay_within_their_share() -> None:
    tested, _ = room(share=0.5)
    assert tested.within_share(0.2, 0.3)
    assert not tested.within_share(0.2, 0.31)


@pytest.mark.parametrize(
    ("load", "users_first", "free"),
    [
        (None, False, True),
        (Load(waiting=0, running=3, used=MOST - 0.2), False, True),
        (Load(waiting=0, running=3, used=MOST - 0.19), False, False),
        (Load(waiting=1, running=3, used=0.1), False, False),
        # Users pass those that wait, but do not find the KV of those that run.
        (Load(waiting=1, running=3, used=0.1), True, True),
        (Load(waiting=1, running=3, used=MOST - 0.19), True, False),
        # Nothing runs, so what is said to be used was given back.
        (Load(waiting=0, running=0, used=1.0), False, True),
    ],
)
def test_users_have_what_they_run_and_wait_for(
    load: Load | None, users_first: bool, free: bool
) -> None:
    tested, _ = room(users_first=users_first)
    tested.see(load)
    assert tested.is_free(0.1, unseen=0.1) == free


def test_an_idle_engine_takes_one_that_is_larger_than_all() -> None:
    tested, _ = room()
    tested.see(Load(waiting=0, running=0, used=0.5))
    assert tested.is_free(1.0, unseen=0.0)
    assert not tested.is_free(1.0, unseen=0.01)


def test_what_an_engine_said_long_ago_holds_nobody_up() -> None:
    tested, clock = room()
    busy = Load(waiting=5, running=3, used=1.0)
    tested.see(busy)
    clock.now = STALE_S - 0.1
    tested.see(busy)
    assert not tested.is_free(0.1, 0.0)
    clock.now = STALE_S
    tested.see(busy)
    assert tested.is_free(0.1, 0.0)
    tested.see(Load(waiting=4, running=3, used=1.0))
    assert not tested.is_free(0.1, 0.0)


def request(tokens: int, answers: int = 1, answer_tokens: int = 0) -> Pending:
    return Pending(0, 1, 0, 0, tokens, answers, answer_tokens)


def test_expectations_follow_what_was_answered() -> None:
    expected = Expected()
    assert expected.prompt(request(700)) == 700
    assert expected.answers(request(700, answers=3)) == 3 * FIRST_ANSWER
    assert expected.answers(request(700, answer_tokens=50)) == 50
    for _ in range(500):
        expected.learn(request(1000, answers=2), Usage(prompt=1500, completion=200))
    assert expected.prompt(request(700)) == pytest.approx(1050, rel=0.01)
    assert expected.answers(request(700)) == pytest.approx(100, rel=0.01)
    assert expected.answers(request(700, answer_tokens=50)) == 50
    # One long answer is not forgotten soon.
    expected.learn(request(1000), Usage(prompt=1500, completion=900))
    expected.learn(request(1000), Usage(prompt=1500, completion=10))
    assert expected.answers(request(700)) > 850


def test_few_words_say_little_of_many() -> None:
    """The part that a chat template adds to a short prompt is no measure of long ones."""
    expected = Expected()
    expected.learn(request(1), Usage(prompt=30, completion=1))
    assert expected.prompt(request(10_000)) < 11_000
