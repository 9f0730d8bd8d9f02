"""Steps that tests of single events have in common."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.connector.simulation import Simulation

Make = Callable[..., Simulation]
EXACT_BELOW = 80


def prompt(length: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, 500) for _ in range(length)]


def hits(run: Simulation, name: str) -> list[int]:
    """Blocks of each load that was planned for the request."""
    return [len(load.slots) for plan in run.plans for load in plan.loads if load.request_id == name]


def stored(run: Simulation, *prompts: list[int]) -> None:
    """Ask these prompts and let everything end, so that they are in the store but not in HBM."""
    for number, tokens in enumerate(prompts):
        run.add(f"stored {number}", tokens, 1)
    run.run()
    run.empty_hbm()


def begin(run: Simulation, *names: str) -> None:
    """Step until all of these requests have their first token."""
    while not all(run.delivered[name] for name in names):
        run.step()
        run.end_io()


def gauges(run: Simulation) -> dict[str, float]:
    """The scheduler's own, brought up to date."""
    run.ours.update_gauges()
    return dict(run.ours.counters._gauges)


def end(run: Simulation, *names: str) -> None:
    run.run()
    run.check_answers(names)
    run.check_idle()
