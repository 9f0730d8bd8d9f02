"""Loads for models with sliding windows or states, in HBM that has room for few; see
``simulation.py``."""

from __future__ import annotations

import numpy as np
import pytest

from tests.connector.events import Make, end, hits, prompt, stored
from tests.connector.rank import BLOCK
from tests.connector.simulation import STATE

LONG = 160
"""Tokens of a hit that is longer than what vLLM lets a window's group hold at a time."""


@pytest.mark.parametrize(
    ("windows", "blocks", "depth", "count"),
    [
        ((None, 8, 8, 8, 8, 8), 44, 1, 2),
        ((None, 8, 8, 8, 8, 8), 48, 1, 3),
        ((None, 8, 8, 8, 8, 8), 58, 2, 3),
        ((None, 8, 8, 8, 8, 8), 62, 2, 4),
        ((None, 8, 8, 8, 8, 8), 200, 2, 4),
        ((8,), 6, 1, 4),
        ((8,), 7, 1, 4),
    ],
)
def test_requests_that_are_loaded_can_go_on(
    reuse: Make, windows: tuple[int | None, ...], blocks: int, depth: int, count: int
) -> None:
    run = reuse(windows=windows, hbm_blocks=blocks, depth=depth, slots=600)
    heads = [prompt(LONG, seed) for seed in range(count)]
    stored(run, *[[*head, 5] for head in heads])
    for number, head in enumerate(heads):
        run.add(str(number), head + prompt(48, 30 + number), 2)
    end(run, *map(str, range(count)))
    whole = LONG // BLOCK
    windows_only = 1 if windows[0] else whole + (len(windows) - 1)
    for number in range(count):
        assert hits(run, str(number)) == [windows_only]


@pytest.mark.parametrize("depth", [1, 2])
def test_nobody_overtakes_a_request_that_waits_for_room(reuse: Make, depth: int) -> None:
    """However many small ones come behind it."""
    run = reuse(windows=(None, 8), hbm_blocks=26, depth=depth, slots=3000)
    head = prompt(LONG)
    stored(run, [*head, 5])

    def small() -> None:
        number = len(run.requests)
        run.add(f"small {number}", prompt(40, 100 + number), 30 + 7 * (number % 5))

    for _ in range(3):
        small()
    for _ in range(6):
        run.step()
        run.end_io()
    run.add("big", head + prompt(40, 7), 2)
    before = len(run.requests)
    while "big" not in run.finished:
        if len(run.scheduler.requests) < 6:
            small()
        run.step()
        run.end_io()
        assert len(run.requests) < before + 20, "it waits for ever"
    end(run, *[name for name in run.requests if not name.startswith("stored")])


def test_a_request_that_shares_blocks_with_another_is_loaded_beside_it(reuse: Make) -> None:
    run = reuse(windows=(None, 8), hbm_blocks=24, slots=3000)
    head = prompt(LONG)
    stored(run, [*head, *prompt(16, 1), 5], [*head, *prompt(16, 2), 5])
    run.add("a", head + prompt(8, 3), 60)
    for _ in range(8):
        run.step()
        run.end_io()
    run.add("b", [*head, *prompt(16, 2), 9, 9], 4)
    while "b" not in run.finished:
        assert "a" not in run.finished
        run.step()
        run.end_io()
    end(run, "a", "b")


def test_a_state_that_only_hbm_has_is_stored_when_it_is_used(reuse: Make) -> None:
    """Here it was lost, or evicted; or a first use was not worth a write."""
    run = reuse(windows=(None, STATE, STATE), hbm_blocks=80, slots=300, retention=0)
    head = prompt(100)
    run.add("a", head, 2)
    run.run()
    run.index.drop(run.index.lookup(run.ours.groups.keys(run.ours.keys_of(run.requests["a"]), 0)))
    for group in (1, 2):
        for key in run.ours.groups.keys(run.ours.keys_of(run.requests["a"]), group):
            if (slot := run.index.find(key)) is not None:
                run.index.drop(np.array([slot]))
    run.add("b", [*head, 7, 8, 9], 2)
    run.run()
    assert hits(run, "b") == [], "it was in HBM"
    assert run.scheduler.reset_prefix_cache()
    run.add("c", [*head, 10], 2)
    end(run, "a", "b", "c")
    whole = 100 // BLOCK
    assert hits(run, "c") == [whole + 2]


def test_a_load_that_failed_waits_for_no_more_than_it_needs(reuse: Make) -> None:
    """A request holds few blocks of a group with a state, whatever its length."""
    run = reuse(windows=(None, STATE, STATE, STATE), hbm_blocks=33, slots=400, retention=0)
    head = prompt(100)
    stored(run, head)
    run.add("long", prompt(20, 5), 120)
    for _ in range(4):
        run.step()
        run.end_io()
    run.add("b", head, 2)
    while not run.ranks[0].loads:
        run.step()
    run.ranks[0].end_load(False, run.hbm, run.content)
    while "b" not in run.finished:
        assert "long" not in run.finished
        run.step()
        run.end_io()
    end(run, "long", "b")
