"""Blocks that are read again leave a slow device's old share; see ``simulation.py``."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from vllm.config import VllmConfig

from tests.connector.events import Make, begin, end, hits, prompt, stored
from tests.connector.rank import SLOT_BYTES
from tests.connector.simulation import STATE, Simulation, engine_config
from tests.e2e.models import make_llama
from vllm_ssdkv.connector.scheduler import rewriter
from vllm_ssdkv.connector.scheduler.hit_verifier import FIRST_HITS
from vllm_ssdkv.store.index.slot_index import SlotState

FRAMES = 1000
PROMPT = prompt(100)
BLOCKS = 6


def slow(run: Simulation, device: int = 1, worth: float = 0.2) -> None:
    """Every rank says that a device is worth a part of its weight."""
    for rank in run.ranks:
        rank.report.speeds.append((device, worth))


def saved(run: Simulation) -> list[int]:
    """Slots that workers were told to fill, from HBM or from a frame."""
    slots: list[int] = []
    for plan in run.plans:
        slots += plan.save.slots.tolist()
        slots += [] if plan.copy_frames is None else plan.copy_frames.new.tolist()
    return slots


def rewritten(run: Simulation) -> float:
    return run.ours.counters.total("blocks_rewritten")


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


def begin_to_rewrite(run: Simulation) -> None:
    """Of a request for what is stored, which is read."""
    run.add("a", PROMPT, 2)
    before = len(saved(run))
    while len(saved(run)) == before:
        run.step()
        for rank in run.ranks:
            rank.end_load(True, run.hbm, run.content)


def with_slow_device(run: Simulation) -> list[int]:
    """A prompt is stored, then a device becomes slow; slots of the prompt."""
    stored(run, PROMPT)
    slow(run)
    before = found(run)
    assert len(before) == BLOCKS
    return before


@pytest.mark.parametrize("mode", ["page", "reuse"])
def test_healthy_devices_rewrite_nothing(mode: str, request: pytest.FixtureRequest) -> None:
    run: Simulation = request.getfixturevalue(mode)(slots=100, frames=FRAMES)
    stored(run, PROMPT)
    before = found(run)
    for name in "abc":
        ask(run, name)
    assert hits(run, "c") == [BLOCKS]
    assert found(run) == before
    assert rewritten(run) == 0


@pytest.mark.parametrize("mode", ["page", "reuse"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_hit_is_stored_again_and_read_from_there(
    mode: str, ranks: int, request: pytest.FixtureRequest
) -> None:
    run: Simulation = request.getfixturevalue(mode)(slots=100, ranks=ranks, frames=FRAMES)
    other = prompt(100, seed=9)
    stored(run, PROMPT, other)
    cold = found(run, other)
    slow(run)
    before = found(run)
    ask(run, "first")
    after = found(run)
    assert not set(after) & set(before)
    assert lanes(run, after).isdisjoint(lanes(run, before))
    assert {run.index.state(slot) for slot in before} == {SlotState.FREE}
    assert rewritten(run) == BLOCKS
    ask(run, "second")
    assert hits(run, "second") == [BLOCKS]
    assert found(run) == after, "once"
    assert found(run, other) == cold, "nobody read it"
    assert after == sorted(after), "neighbours stay neighbours"


def test_a_running_request_keeps_the_slots_that_it_reads(page: Make) -> None:
    """Its context names the old slots; the next one finds the new ones."""
    run = page(slots=100, frames=FRAMES)
    before = with_slow_device(run)
    run.add("a", PROMPT, 40)
    run.add("b", PROMPT, 3)
    begin(run, "a")
    while rewritten(run) < BLOCKS:  # b has ended
        run.step()
        run.end_io()
    assert run.ranks[0].contexts.keys() == {"a"}
    assert run.ranks[0].contexts["a"][:BLOCKS] == before
    assert {run.index.state(slot) for slot in before} == {SlotState.PRIVATE}
    run.add("c", PROMPT, 3)
    end(run, "a", "b", "c")
    assert not set(found(run)) & set(before)


def test_a_request_may_end_while_its_hit_is_rewritten(reuse: Make) -> None:
    run = reuse(slots=100, frames=FRAMES)
    before = with_slow_device(run)
    begin_to_rewrite(run)
    assert run.index.gauges()["pinned"] >= 2 * BLOCKS
    run.abort("a")
    run.run()
    run.check_idle()
    assert rewritten(run) == BLOCKS
    assert not set(found(run)) & set(before)


@pytest.mark.parametrize("mode", ["page", "reuse"])
def test_a_failed_write_leaves_the_old_copy_and_the_next_hit_tries_again(
    mode: str, request: pytest.FixtureRequest
) -> None:
    run: Simulation = request.getfixturevalue(mode)(slots=100, ranks=2, frames=FRAMES)
    before = with_slow_device(run)
    begin_to_rewrite(run)
    for _ in range(2):
        run.ranks[1].end_write(good=False)
    end(run, "a")
    assert run.scheduler.reset_prefix_cache()
    assert found(run)[:2] == before[:2]
    assert not set(found(run)[2:]) & set(before)
    assert rewritten(run) == BLOCKS - 2
    assert run.ours.counters.total("slots_dropped", cause="write_error") == 0
    ask(run, "b")
    assert hits(run, "b") == [BLOCKS]
    assert not set(found(run)) & set(before)


def test_a_rank_without_frames_leaves_the_old_copy(reuse: Make) -> None:
    run = reuse(slots=100, ranks=2, frames=FRAMES)
    before = with_slow_device(run)
    run.ranks[1].no_frames = 1
    ask(run, "a")
    assert found(run) == before
    assert rewritten(run) == 0
    ask(run, "b")
    assert rewritten(run) == BLOCKS


def test_in_page_mode_blocks_that_left_dram_are_fetched(page: Make) -> None:
    run = page(slots=100, ranks=2, frames=FRAMES)
    before = with_slow_device(run)
    run.ranks[1].cold.update(before[:2])
    ask(run, "a")
    assert not set(found(run)) & set(before)
    assert rewritten(run) == BLOCKS
    assert run.ranks[1].cold == set()


def test_blocks_that_left_dram_wait_until_running_contexts_leave_frames(page: Make) -> None:
    run = page(slots=100, frames=8)
    before = with_slow_device(run)
    run.ranks[0].cold.update(before)
    run.add("a", PROMPT, 2)
    run.add("b", prompt(120, seed=5), 40)
    while "a" in run.requests and not run.requests["a"].is_finished():
        run.step()
        run.end_io()
    assert rewritten(run) == 0, "b has all frames"
    end(run, "a", "b")
    assert not set(found(run)) & set(before)
    assert rewritten(run) == BLOCKS
    run.check_idle()


def test_few_blocks_wait_for_frames(page: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewriter, "MOST_WAITING", 2)
    run = page(slots=100, frames=FRAMES)
    before = with_slow_device(run)
    ask(run, "a")
    assert found(run)[2:] == before[2:]
    assert rewritten(run) == 2


def test_a_store_with_one_frame_rewrites_nothing_in_page_mode(page: Make) -> None:
    run = page(slots=100, frames=1)
    before = with_slow_device(run)
    ask(run, "a")
    assert found(run) == before
    run.check_idle()


def test_a_device_that_becomes_slow_while_a_request_runs_counts_for_its_hit(reuse: Make) -> None:
    run = reuse(slots=100, frames=FRAMES)
    stored(run, PROMPT)
    before = found(run)
    run.add("a", PROMPT, 20)
    begin(run, "a")
    assert rewritten(run) == 0
    slow(run)
    end(run, "a")
    assert rewritten(run) == BLOCKS
    assert not set(found(run)) & set(before)


def test_a_budget_bounds_rewrites(reuse: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run = reuse(slots=100, frames=FRAMES)
    before = with_slow_device(run)
    monkeypatch.setattr(run.write_policy, "used_up", lambda under_way: under_way >= 2)
    run.add("a", PROMPT, 2)
    while not run.ranks[0].writes:
        run.step()
        run.ranks[0].end_load(True, run.hbm, run.content)
    assert len(run.ranks[0].writes) == 2
    end(run, "a")
    assert found(run)[-1] == before[-1]


def test_a_budget_that_is_used_up_rewrites_nothing(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model = make_llama(tmp_path_factory.mktemp("model") / "llama", layers=1)
    directory = tmp_path_factory.mktemp("ssd")
    devices = [
        {"path": str(directory / "a"), "daily_write_budget": "16 MiB"},
        {"path": str(directory / "b")},
    ]
    config: VllmConfig = engine_config(model, "reuse", devices=devices)
    run = Simulation(config, slots=100, frames=FRAMES)
    before = with_slow_device(run)
    run.write_policy.wrote([(0, 16 << 20)])
    count = len(saved(run))
    ask(run, "a")
    assert len(saved(run)) == count
    assert found(run) == before


@pytest.mark.parametrize("mode", ["page", "reuse"])
def test_an_old_copy_that_turns_out_bad_takes_the_new_one_with_it(
    mode: str, request: pytest.FixtureRequest
) -> None:
    run: Simulation = request.getfixturevalue(mode)(slots=100, frames=FRAMES)
    before = with_slow_device(run)
    begin_to_rewrite(run)
    run.ranks[0].report.bad.append((before[0], run.index.epoch(before[0])))
    end(run, "a")
    assert found(run) == []
    assert rewritten(run) == BLOCKS - 1


def test_a_reset_that_forgets_keeps_no_rewrite(reuse: Make) -> None:
    run = reuse(slots=100, frames=FRAMES, on_reset="forget")
    with_slow_device(run)
    begin_to_rewrite(run)
    run.ours.reset()
    end(run, "a")
    assert rewritten(run) == 0
    assert found(run) == []


def test_a_device_that_is_fast_again_stops_rewrites(
    reuse: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewriter, "STEP_BYTES", SLOT_BYTES)
    run = reuse(slots=100, frames=FRAMES)
    before = with_slow_device(run)
    run.add("a", PROMPT, 20)
    while rewritten(run) < 2:
        run.step()
        run.end_io()
    slow(run, worth=1.0)
    end(run, "a")
    assert 2 <= rewritten(run) < BLOCKS - 1, "what is on its way ends"
    assert found(run)[-1] == before[-1]


def test_few_are_rewritten_at_a_time(reuse: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewriter, "STEP_BYTES", 2 * SLOT_BYTES)
    run = reuse(slots=100, frames=16)  # of which a quarter
    with_slow_device(run)
    first = len(run.plans)
    run.add("a", PROMPT, 30)
    while not run.ranks[0].writes:
        run.step()
        run.ranks[0].end_load(True, run.hbm, run.content)
    for _ in range(5):
        run.step()
    assert [n for p in run.plans[first:] if (n := len(p.save.slots))] == [2, 2]
    run.ranks[0].end_write(good=True)
    run.step()
    run.step()
    assert sum(len(p.save.slots) for p in run.plans[first:]) == 5
    end(run, "a")
    assert rewritten(run) == BLOCKS


def test_in_a_full_store_all_that_is_hot_is_rewritten_in_the_end(reuse: Make) -> None:
    run = reuse(slots=200, frames=FRAMES)
    prompts = [prompt(100, seed=seed) for seed in range(36)]
    stored(run, *prompts)
    assert run.index.gauges()["free"] < 10
    slow(run)
    for number in range(3):
        for seed in range(20, 36):
            ask(run, f"{number} {seed}", prompts[seed], 1)
    assert rewritten(run) > 60
    hot = [s for p in prompts[20:] for s in found(run, p)]
    assert len(hot) > 0.9 * 16 * BLOCKS
    assert lanes(run, hot).isdisjoint({(0, 1)})


def test_an_added_device_gets_its_share_of_what_is_read_again(reuse: Make) -> None:
    """Blocks stored while the device was worth little are stored again over both."""
    run = reuse(slots=100, frames=FRAMES)
    slow(run)
    run.add("warm", prompt(20, seed=3), 8)
    end(run, "warm")
    stored(run, PROMPT)
    before = lanes(run, found(run))
    assert all(of.count(1) < of.count(0) for of in before)
    slow(run, worth=1.0)
    ask(run, "a", count=8)
    assert rewritten(run) == BLOCKS
    assert {of.count(1) / len(of) for of in lanes(run, found(run))} == {0.5}


@pytest.mark.parametrize("windows", [(None, 40), (24, None, 3), (40,), (None, STATE)])
def test_blocks_that_leave_hbm_while_a_request_runs_are_rewritten_in_its_first_step(
    reuse: Make, windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other tokens take their places: the simulation compares what is stored with its key."""
    monkeypatch.setattr(rewriter, "STEP_BYTES", 2 * SLOT_BYTES)
    run = reuse(slots=300, hbm_blocks=60, frames=FRAMES, windows=windows)
    stored(run, PROMPT)
    slow(run)
    first = len(run.plans)
    for name in "abc":
        ask(run, name, count=60)
        assert hits(run, name), "it is loaded"
    assert 2 <= rewritten(run) <= 6
    assert all(len(plan.save.slots) < 12 for plan in run.plans[first:])


def test_a_suspended_store_rewrites_nothing(reuse: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM computes into the blocks of a hit then, with what may be wrong."""
    monkeypatch.setattr(rewriter, "STEP_BYTES", SLOT_BYTES)
    run = reuse(slots=200, hbm_blocks=100, frames=FRAMES, verify_hits=FIRST_HITS + 1)
    stored(run, prompt(180), prompt(100, 7))
    for number in range(FIRST_HITS):
        ask(run, str(number), prompt(100, 7))
    slow(run)
    run.add("runs", prompt(180), 60)
    begin(run, "runs")
    run.ranks[0].distrusts = True
    run.add("shows", prompt(100, 7), 4)
    while not run.suspensions:
        run.step()
        run.end_io()
    first = len(run.plans)
    assert rewritten(run) > 0, "it has begun"
    run.run()
    run.check_answers(["runs", "shows"])
    assert not any(len(plan.save.slots) for plan in run.plans[first:])


def test_a_lost_device_leaves_no_rewrite_behind(reuse: Make) -> None:
    run = reuse(slots=100, frames=FRAMES)
    with_slow_device(run)
    begin_to_rewrite(run)
    run.lose_device(1)
    run.step()
    run.step()
    end(run, "a")
    assert run.index.gauges()["pinned"] == 0
    assert not run.ours.unfinished()


def test_an_idle_engine_does_not_wait_for_writes_that_are_on_trial(page: Make) -> None:
    """Only a new request's write ends the trial: steps without one would be without end."""
    run = page(slots=100, frames=FRAMES)
    before = with_slow_device(run)
    run.ranks[0].cold.update(before)
    run.add("a", PROMPT, 2)
    begin(run, "a")
    run.ranks[0].pause_writes()
    end(run, "a")
    assert not run.ours.unfinished()
    assert rewritten(run) == 0
    run.check_idle()
    run.ranks[0].resume_writes()
    ask(run, "b")
    ask(run, "c")
    assert rewritten(run) == BLOCKS


@pytest.mark.parametrize("windows", [(24, None, 3), (None, STATE)])
def test_blocks_that_leave_hbm_are_not_rewritten_when_writes_go_on_later(
    reuse: Make, windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other tokens have taken their places by then."""
    monkeypatch.setattr(rewriter, "STEP_BYTES", 2 * SLOT_BYTES)
    run = reuse(slots=300, hbm_blocks=60, frames=FRAMES, windows=windows)
    stored(run, PROMPT)
    slow(run)
    run.add("a", PROMPT, 60)
    run.step()
    run.end_io()
    run.ranks[0].pause_writes()
    begin(run, "a")
    for _ in range(40):
        run.step()
        run.end_io()
    run.ranks[0].resume_writes()
    end(run, "a")
    assert hits(run, "a"), "it is loaded"
    assert rewritten(run) == 0
    run.check_answers(["a"])
