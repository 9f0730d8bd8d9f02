"""Order of seats by vLLM's own scheduler: hits that are loaded ahead are before everybody else,
so there may not be many where it schedules by priority."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm.config.scheduler import SchedulerPolicy

from tests.connector.events import begin, end, hits, prompt, stored
from tests.connector.simulation import SEATS, Simulation, engine_config
from tests.e2e.models import make_llama

LONG = 100
SHORT = 8
MANY = 20
"""Requests of a batch."""


@pytest.fixture(params=["page", "reuse"])
def full(request: pytest.FixtureRequest, tmp_path: Path) -> Simulation:
    """By priority: all seats are taken, and more ask for what is stored than there are."""
    return make_full(tmp_path, request.param, "priority")


def make_full(path: Path, mode: str, policy: SchedulerPolicy) -> Simulation:
    config = engine_config(make_llama(path / "llama", layers=1), mode)
    config.scheduler_config.policy = policy
    run = Simulation(config, slots=400, hbm_blocks=400)
    stored(run, *(prompt(40, seed) for seed in range(MANY)))
    running = [f"running {n}" for n in range(SEATS)]
    for n, name in enumerate(running):
        run.add(name, prompt(10, -1 - n), LONG if n else SHORT)
    begin(run, *running)
    for n in range(MANY):
        run.add(f"batch {n}", prompt(40, n), LONG, priority=1)
    return run


def test_no_more_hits_are_loaded_ahead_than_there_are_seats(full: Simulation) -> None:
    most = 0
    while "batch 0" not in full.finished:
        full.step()
        most = max(most, len(full.seats))
        full.end_io()
    assert 0 < most <= SEATS
    end(full, *full.requests)
    assert all(hits(full, f"batch {n}") == [2] for n in range(MANY))


def test_who_comes_later_and_matters_more_waits_for_what_is_loaded_ahead_only(
    full: Simulation,
) -> None:
    # The others that are loaded ahead could run now, too, if they had a seat.
    while not any(full.delivered[f"batch {n}"] for n in range(MANY)):
        full.step()
        full.end_io()
    full.add("user", prompt(10, -100), 1)
    while "user" not in full.finished:
        full.step()
        full.end_io()
    begun = [n for n in range(MANY) if full.delivered[f"batch {n}"]]
    assert len(begun) <= 2 * SEATS, "those that run, and those that are loaded ahead"
    end(full, *full.requests)


def test_in_order_of_arrival_all_are_loaded_at_once(tmp_path: Path) -> None:
    """Nobody is overtaken, and vLLM need not ask again for each of them in every step."""
    run = make_full(tmp_path, "reuse", "fcfs")
    while "running 0" not in run.finished:
        run.step()
        run.end_io()
    run.step()
    assert all(hits(run, f"batch {n}") for n in range(MANY))
    end(run, *run.requests)
