"""Loads for models with sliding windows in HBM that has room for few; see ``simulation.py``."""

from __future__ import annotations

import pytest

from tests.connector.events import Make, end, hits, prompt, stored
from tests.connector.rank import BLOCK

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
