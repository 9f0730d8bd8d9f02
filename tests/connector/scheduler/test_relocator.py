"""Blocks that are read again move off a slow device's old share; see ``simulation.py``."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np
import pytest
from vllm.config import VllmConfig

from tests.connector.events import Make, begin, end, hits, prompt, stored
from tests.connector.rank import SLOT_BYTES
from tests.connector.simulation import Simulation, engine_config
from tests.e2e.models import make_llama
from vllm_ssdkv.connector.messages import FETCH
from vllm_ssdkv.connector.scheduler import relocator
from vllm_ssdkv.store.index.slot_index import SlotState

FRAMES = 1000
PROMPT = prompt(100)
BLOCKS = 6


def slow(run: Simulation, device: int = 1, worth: float = 0.2) -> None:
    """Every rank says that a device is worth a part of its weight."""
    for rank in run.ranks:
        rank.report.speeds.append((device, worth))


def planned(run: Simulation) -> list[tuple[int, int]]:
    """Old and new slot of each move."""
    return [
        pair
        for plan in run.plans
        for pair in zip(plan.move.old.tolist(), plan.move.new.tolist(), strict=True)
    ]


def moved(run: Simulation) -> float:
    return run.ours.counters.total("blocks_moved")


def failed(run: Simulation) -> float:
    return run.ours.counters.total("moves_failed")


def found(run: Simulation, tokens: list[int] = PROMPT) -> list[int]:
    """Slots that hold these tokens' blocks."""
    request = run.requests[next(n for n, r in run.requests.items() if r.prompt_token_ids == tokens)]
    return run.index.lookup(run.ours.keys_of(request)).tolist()


def lanes(run: Simulation, slots: Iterable[int]) -> set[tuple[int, ...]]:
    placement = run.rebalancer.placement
    return {s.lanes for s in placement.segments if set(s.all_slots().tolist()) & set(slots)}


def ask(run: Simulation, name: str, tokens: list[int] = PROMPT, count: int = 2) -> None:
    """A request whose prompt was stored, and everything that it brings about."""
    run.add(name, tokens, count)
    end(run, name)
    assert run.scheduler.reset_prefix_cache()


class Frozen(set[int]):
    """A set that keeps what it has."""

    def difference_update(self, *others: Iterable[object]) -> None:
        pass


def begin_to_move(run: Simulation) -> None:
    """Of a request for what is stored, which is read."""
    run.add("a", PROMPT, 2)
    while not planned(run):
        run.step()
        for rank in run.ranks:
            rank.end_load(True, run.hbm, run.content)


def fetched(run: Simulation) -> list[set[int]]:
    """Slots of each load of what was to move and was not in DRAM."""
    return [
        set(load.slots.tolist())
        for plan in run.plans
        for load in plan.loads
        if load.request_id == FETCH
    ]


def with_slow_device(run: Simulation) -> list[int]:
    """A prompt is stored, then a device becomes slow; slots of the prompt."""
    stored(run, PROMPT)
    slow(run)
    before = found(run)
    assert len(before) == BLOCKS
    return before


@pytest.mark.parametrize("mode", ["page", "reuse"])
def test_healthy_devices_move_nothing(mode: str, request: pytest.FixtureRequest) -> None:
    run: Simulation = request.getfixturevalue(mode)(slots=100, frames=FRAMES)
    stored(run, PROMPT)
    before = found(run)
    for name in "abc":
        ask(run, name)
    assert hits(run, "c") == [BLOCKS]
    assert found(run) == before
    assert planned(run) == []


@pytest.mark.parametrize("mode", ["page", "reuse"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_read_again_moves_and_is_read_from_there(
    mode: str, ranks: int, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    run: Simulation = request.getfixturevalue(mode)(slots=100, ranks=ranks, frames=FRAMES)
    other = prompt(100, seed=9)
    stored(run, PROMPT, other)
    cold = found(run, other)
    slow(run)
    before = found(run)
    with caplog.at_level(logging.INFO):
        ask(run, "first")
        after = found(run)
        assert not set(after) & set(before)
        assert lanes(run, after).isdisjoint(lanes(run, before))
        assert {run.index.state(slot) for slot in before} == {SlotState.FREE}
        assert (moved(run), failed(run)) == (BLOCKS, 0)
        ask(run, "second")
    assert hits(run, "second") == [BLOCKS]
    assert found(run) == after, "they move once"
    assert found(run, other) == cold, "nobody read it"
    assert [old for old, _ in planned(run)] == before, "neighbours stay neighbours"
    told = [m for m in caplog.messages if "are written anew" in m]
    assert told == [
        "ssdkv: stored blocks that are read again are written anew from now on, where they are "
        "read faster: the devices are worth 1, 0.2"
    ]


def test_a_running_request_keeps_what_it_reads(page: Make) -> None:
    """Its context names the old slots; the next one finds the new ones."""
    run = page(slots=100, frames=FRAMES)
    before = with_slow_device(run)
    run.add("a", PROMPT, 40)
    begin(run, "a")
    for _ in range(4):
        run.step()
        run.end_io()
    assert moved(run) == BLOCKS
    assert run.ranks[0].contexts["a"][:BLOCKS] == before
    assert {run.index.state(slot) for slot in before} == {SlotState.PRIVATE}
    run.add("b", PROMPT, 3)
    end(run, "a", "b")
    assert found(run) == [new for _, new in planned(run)]


@pytest.mark.parametrize("mode", ["page", "reuse"])
@pytest.mark.parametrize("when", ["load", "move"])
def test_the_request_ends_meanwhile(mode: str, when: str, request: pytest.FixtureRequest) -> None:
    run: Simulation = request.getfixturevalue(mode)(slots=100, frames=FRAMES)
    before = with_slow_device(run)
    run.add("a", PROMPT, 40)
    while not run.ranks[0].loads:
        run.step()
    if when == "move":
        for rank in run.ranks:
            rank.end_load(True, run.hbm, run.content)
        while not planned(run):
            run.step()
        assert run.index.gauges()["pinned"] >= 2 * BLOCKS
    run.abort("a")
    run.run()
    run.check_idle()
    assert moved(run) == BLOCKS
    assert not set(found(run)) & set(before)


@pytest.mark.parametrize("mode", ["page", "reuse"])
@pytest.mark.parametrize("why", ["write", "cold"])
def test_where_one_rank_fails_it_is_tried_once_more(
    mode: str, why: str, request: pytest.FixtureRequest
) -> None:
    """What has left DRAM is fetched first."""
    run: Simulation = request.getfixturevalue(mode)(slots=100, ranks=2, frames=FRAMES)
    before = with_slow_device(run)
    if why == "cold":
        run.ranks[1].cold.update(before[:2])
    begin_to_move(run)
    for _ in range(2 if why == "write" else 0):
        run.ranks[1].end_write(good=False)
    end(run, "a")
    assert fetched(run) == [set(before[:2])]
    assert not set(found(run)) & set(before)
    assert (moved(run), failed(run)) == (BLOCKS, 0)
    assert run.ours.counters.total("slots_dropped", cause="write_error") == 0


@pytest.mark.parametrize("mode", ["page", "reuse"])
def test_where_it_fails_again_the_block_stays_where_it_was(
    mode: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: Simulation = request.getfixturevalue(mode)(slots=100, ranks=2, frames=FRAMES)
    before = with_slow_device(run)
    with monkeypatch.context() as patch:
        patch.setattr(run.ranks[1], "cold", Frozen(before[:2]))
        ask(run, "a")
    assert fetched(run) == [set(before[:2])]
    assert found(run)[:2] == before[:2]
    assert not set(found(run)[2:]) & set(before)
    assert (moved(run), failed(run)) == (BLOCKS - 2, 2)
    run.check_idle()
    ask(run, "b")
    assert not set(found(run)) & set(before), "it is tried again when it is read again"


def test_what_is_fetched_waits_for_frames_that_running_contexts_leave(page: Make) -> None:
    run = page(slots=100, frames=4)  # one at a time
    before = with_slow_device(run)
    run.ranks[0].cold.update(before)
    run.add("a", PROMPT, 40)
    run.add("b", prompt(60, seed=3), 60)
    begin(run, "a", "b")
    for _ in range(10):
        run.step()
        run.end_io()
    assert fetched(run) == []
    end(run, "a", "b")
    assert [len(slots) for slots in fetched(run)] == [1] * BLOCKS
    assert moved(run) == BLOCKS
    run.check_idle()


def test_what_was_read_before_a_device_was_found_to_be_slow_moves_if_dram_has_it(
    reuse: Make,
) -> None:
    run = reuse(slots=100, frames=FRAMES)
    stored(run, PROMPT)
    ask(run, "a")
    before = found(run)
    run.ranks[0].cold.update(before[:2])
    slow(run)
    run.add("b", prompt(20, seed=3), 8)
    end(run, "b")
    assert found(run)[:2] == before[:2], "nobody has asked for it since: it is not fetched"
    assert not set(found(run)[2:]) & set(before)
    assert (moved(run), failed(run), fetched(run)) == (BLOCKS - 2, 2, [])


def test_what_was_read_long_ago_does_not_move(reuse: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relocator, "PATIENCE_S", -1.0)
    run = reuse(slots=100, frames=FRAMES)
    stored(run, PROMPT)
    ask(run, "a")
    slow(run)
    run.add("b", prompt(20, seed=3), 8)
    end(run, "b")
    assert planned(run) == []


def test_what_a_budget_has_room_for_moves(reuse: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run = reuse(slots=100, frames=FRAMES)
    before = with_slow_device(run)
    monkeypatch.setattr(run.write_policy, "used_up", lambda under_way: under_way >= 2)
    ask(run, "a")
    assert (moved(run), failed(run)) == (2, 0)
    assert [old for old, _ in planned(run)] == before[-2:]


def test_nothing_is_fetched_after_the_budget_is_used_up(
    reuse: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = reuse(slots=100, frames=FRAMES)
    before = with_slow_device(run)
    run.ranks[0].cold.update(before)
    begin_to_move(run)
    monkeypatch.setattr(run.write_policy, "used_up", lambda under_way: True)
    end(run, "a")
    run.check_idle()
    assert (fetched(run), moved(run)) == ([], 0)


def test_bad_bytes_found_meanwhile_are_not_taken_along(reuse: Make) -> None:
    run = reuse(slots=100, frames=FRAMES)
    before = with_slow_device(run)
    begin_to_move(run)
    run.ranks[0].report.bad.append((before[0], run.index.epoch(before[0])))
    end(run, "a")
    assert failed(run) == 1
    assert found(run) == []


def test_a_reset_cache_keeps_nothing_that_moves(reuse: Make) -> None:
    run = reuse(slots=100, frames=FRAMES)
    with_slow_device(run)
    begin_to_move(run)
    run.ours.forget_all()
    end(run, "a")
    assert (moved(run), failed(run)) == (0, BLOCKS)
    assert found(run) == []


def test_a_device_that_is_fast_again_stops_what_waits(reuse: Make) -> None:
    run = reuse(slots=100, frames=4)  # one at a time
    before = with_slow_device(run)
    run.add("a", PROMPT, 2)
    while len(planned(run)) < 2:
        run.step()
        run.end_io()
    slow(run, worth=1.0)
    end(run, "a")
    assert 2 <= len(planned(run)) <= 3
    assert found(run)[0] == before[0]


def test_few_move_at_a_time(reuse: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relocator, "STEP_BYTES", 2 * SLOT_BYTES)
    run = reuse(slots=100, frames=16)  # of which a quarter
    with_slow_device(run)
    run.add("a", PROMPT, 30)
    while not planned(run):
        run.step()
        run.ranks[0].end_load(True, run.hbm, run.content)
    for _ in range(5):
        run.step()
    assert [len(plan.move.new) for plan in run.plans if len(plan.move.new)] == [2, 2]
    run.ranks[0].end_write(good=True)
    run.step()
    run.step()
    assert len(planned(run)) == 5
    end(run, "a")
    assert moved(run) == BLOCKS


def test_what_waits_is_bounded(reuse: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relocator, "MAX_WAITING", 2)
    run = reuse(slots=100, frames=FRAMES)
    before = with_slow_device(run)
    ask(run, "a")
    assert [old for old, _ in planned(run)] == before[-2:], "read first"


def test_a_store_without_room_for_moves_moves_nothing_and_comes_to_rest(reuse: Make) -> None:
    """Of three segments none is given up for it."""
    run = reuse(slots=30, frames=FRAMES)
    for seed in range(1, 6):
        stored(run, prompt(100, seed=seed))
    stored(run, PROMPT)
    assert run.index.gauges()["free"] == 0
    slow(run)
    ask(run, "a")
    assert moved(run) == 0


def test_in_a_full_store_all_that_is_hot_moves_in_the_end(reuse: Make) -> None:
    run = reuse(slots=200, frames=FRAMES)
    prompts = [prompt(100, seed=seed) for seed in range(36)]
    stored(run, *prompts)
    assert run.index.gauges()["free"] < 10
    slow(run)
    for number in range(3):
        for seed in range(20, 36):
            ask(run, f"{number} {seed}", prompts[seed], 1)
    assert moved(run) > 60
    assert lanes(run, [s for p in prompts[20:] for s in found(run, p)]).isdisjoint({(0, 1)})


def test_a_budget_that_is_used_up_moves_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = make_llama(tmp_path_factory.mktemp("model") / "llama", layers=1)
    directory = tmp_path_factory.mktemp("ssd")
    devices = [
        {"path": str(directory / "a"), "daily_write_budget": "16 MiB"},
        {"path": str(directory / "b")},
    ]
    config: VllmConfig = engine_config(model, "reuse", devices=devices)
    run = Simulation(config, slots=100, frames=FRAMES)
    with_slow_device(run)
    run.write_policy.wrote([(0, 16 << 20)])
    ask(run, "a")
    assert planned(run) == []


def test_a_lost_device_ends_moves_to_it(reuse: Make) -> None:
    run = reuse(slots=100, frames=FRAMES)
    with_slow_device(run)
    begin_to_move(run)
    run.lose_device(1)
    run.step()
    run.step()
    end(run, "a")
    new = np.array([slot for _, slot in planned(run)])
    assert moved(run) + failed(run) == BLOCKS
    assert run.index.gauges()["pinned"] == 0
    assert not run.ours.unfinished(), new
