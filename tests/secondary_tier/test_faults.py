"""Drives that hang or fail: every job ends in time, and nothing that failed is found."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.v1.kv_offload.base import OffloadKey

from tests.secondary_tier.rig import Engine, key_of, running

Devices = Callable[[int], list[Path]]

KEYS = [key_of(number) for number in range(12)]
DEADLINE_S = 0.5
LONGEST_S = 30.0
"""Several deadlines, on a busy machine."""


def faults(*rules: dict[str, Any]) -> dict[str, Any]:
    return {"io": {"deadline": DEADLINE_S, "faults": list(rules)}}


def replayed(engine: Engine, found: set[OffloadKey]) -> set[OffloadKey]:
    """Chunks that can be found by the events since the last call; ``found`` before."""
    for event in engine.events():
        (found.difference_update if event.removed else found.update)(event.keys)
    return found


@pytest.mark.parametrize("kind", ["eio", "enospc", "stall"])
def test_writes_that_fail_end_their_jobs(
    settings: VllmConfig, tmp_devices: Devices, kind: str
) -> None:
    rule: dict[str, Any] = {"kind": kind, "op": "write"}
    if kind == "stall":
        rule["seconds"] = 4 * DEADLINE_S
    with running(settings, tmp_devices(1), **faults(rule)) as engine:
        context = engine.begin()
        began = time.monotonic()
        assert engine.store(KEYS, context) == KEYS
        engine.settle()
        assert time.monotonic() - began < LONGEST_S
        assert engine.stored(KEYS, context) == set()
        # vLLM's pool has them all the same, and its chunks are free for others.
        assert engine.looked_up(KEYS, context) == KEYS
        more = [key_of(number) for number in range(100, 164)]
        assert engine.store(more, context) == more
        engine.settle()


def test_reads_that_fail_end_their_jobs(settings: VllmConfig, tmp_devices: Devices) -> None:
    devices = tmp_devices(1)
    with running(settings, devices) as engine:
        engine.store(KEYS, engine.begin())
        engine.settle()
    with running(settings, devices, **faults({"kind": "eio", "op": "read"})) as engine:
        context = engine.begin()
        began = time.monotonic()
        assert engine.looked_up(KEYS, context) == []
        assert time.monotonic() - began < LONGEST_S
        assert engine.stored(KEYS, context) == set()
    with running(settings, devices) as engine:  # the drive is well again
        assert engine.looked_up(KEYS, engine.begin()) == KEYS


def test_chunks_that_nothing_is_wrong_with_are_not_asked_for_again_at_once(
    settings: VllmConfig, tmp_devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy fails that blames no chunk, as where memory stays taken."""
    devices, loads = tmp_devices(1), []
    with running(settings, devices, enable_kv_events=True) as engine:
        engine.store(KEYS, engine.begin())
        engine.settle()
        engine.empty_pool()
        stored = engine.own.parts.bytes
        load = stored.load

        def broken(hit: Any, work: Any) -> None:  # noqa: ANN401 - of the loader's
            hit.outcome.complete = False

        monkeypatch.setattr(stored._loader, "_try", broken)
        monkeypatch.setattr(type(stored), "load", lambda _, job: loads.append(job) or load(job))
        context = engine.begin()
        assert engine.looked_up(KEYS, context) == []
        assert len(loads) == 1
        assert engine.stored(KEYS, context) == set()
        assert engine.looked_up(KEYS, context) == []
        assert len(loads) == 1
        monkeypatch.undo()
        assert replayed(engine, set()) == set()
        monkeypatch.setattr(engine.own.own.unread, "_clock", lambda: float("inf"))
        engine.step()
        assert replayed(engine, set()) == set(KEYS)
        assert engine.looked_up(KEYS, context) == KEYS
    with running(settings, devices) as engine:
        assert engine.looked_up(KEYS, engine.begin()) == KEYS


def test_an_end_does_not_wait_for_ever(
    settings: VllmConfig, tmp_devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of which nothing is heard; what was written before is found later."""
    devices = tmp_devices(1)
    with running(settings, devices, **faults()) as engine:
        engine.store(KEYS, engine.begin())
        engine.settle()
        stored = type(engine.own.parts.bytes)
        with monkeypatch.context() as patch:
            patch.setattr(stored, "take_write_results", lambda _: ([], []))
            engine.store([key_of(99)], engine.begin())
            engine.step()
            assert engine.tier.has_pending_work()
            began = time.monotonic()
            engine.tier.shutdown()
            assert 3 * DEADLINE_S <= time.monotonic() - began < LONGEST_S
    with running(settings, devices) as engine:
        assert engine.looked_up([*KEYS, key_of(99)], engine.begin()) == KEYS


def test_an_end_that_fails_in_part_closes_the_rest(
    settings: VllmConfig, tmp_devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = tmp_devices(1)
    with running(settings, devices) as engine:
        engine.store(KEYS, engine.begin())
        engine.settle()
        kind = type(engine.own.parts.writer)
        close = kind.close

        def fail(writer: Any) -> None:  # noqa: ANN401 - of chunks
            close(writer)
            raise RuntimeError("no luck")

        monkeypatch.setattr(kind, "close", fail)
        with pytest.raises(RuntimeError, match="no luck"):
            engine.tier.shutdown()
    monkeypatch.undo()
    with running(settings, devices) as engine:  # nothing is locked
        assert engine.looked_up(KEYS, engine.begin()) == KEYS


def test_events_tell_of_chunks_of_an_earlier_run_when_they_are_named(
    settings: VllmConfig, tmp_devices: Devices
) -> None:
    devices = tmp_devices(1)
    with running(settings, devices) as engine:
        engine.store(KEYS, engine.begin())
        engine.settle()
    with running(settings, devices, enable_kv_events=True) as engine:
        assert replayed(engine, set()) == set()
        assert engine.stored(KEYS[:2]) == {0, 1}
        assert engine.stored(KEYS[:2]) == {0, 1}
        (first, second) = engine.events()
        assert [*first.keys, *second.keys] == KEYS[:2]
        engine.store(KEYS, engine.begin())  # they were computed again, and are not stored again
        engine.settle()
        assert replayed(engine, set()) == set(KEYS[2:])
        engine.reset()
        assert [set(event.keys) for event in engine.events() if event.removed] == [set(KEYS)]


def test_events_tell_of_a_drive_that_is_away_for_a_while(
    settings: VllmConfig, tmp_devices: Devices
) -> None:
    found: set[OffloadKey] = set()
    with running(settings, tmp_devices(2), enable_kv_events=True) as engine:
        engine.store(KEYS, engine.begin())
        engine.settle()
        assert replayed(engine, found) == set(KEYS)
        told = engine.own.parts.access
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(told, "report", lambda found: found.lost_devices.append(1))
            engine.step()
        left = {KEYS[position] for position in engine.stored(KEYS)}
        assert replayed(engine, found) == left < set(KEYS)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(told, "report", lambda found: found.returned_devices.append(1))
            engine.step()
        assert replayed(engine, found) == set(KEYS)
        assert engine.looked_up(KEYS, engine.begin()) == KEYS
