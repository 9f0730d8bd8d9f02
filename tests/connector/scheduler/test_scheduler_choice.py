"""Choice between loading a hit and computing it, in vLLM's own scheduler; see ``simulation.py``."""

from __future__ import annotations

import pytest

from tests.connector.events import EXACT_BELOW, Make, end, hits, prompt, stored
from tests.connector.rank import BLOCK, Pace
from tests.connector.simulation import Simulation
from vllm_ssdkv.connector.messages import PROBE


def ask_again(run: Simulation, tokens: list[int], times: int) -> list[int]:
    """Blocks that were loaded each time a stored prompt was asked for again."""
    loaded = []
    for _ in range(times):
        name = str(len(run.requests))
        run.add(name, tokens, 4)
        run.run()
        run.check_answers([name])
        run.check_idle()
        assert run.scheduler.reset_prefix_cache()
        loaded.append(sum(hits(run, name)))
    return loaded


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_hits_on_a_slow_drive_are_computed_after_the_first(
    reuse: Make, depth: int, ranks: int
) -> None:
    run = reuse(pace=Pace(token_s=0.001, block_s=1.0), depth=depth, ranks=ranks)
    stored(run, prompt(100))
    allocated = run.index.counters["allocated"]
    assert ask_again(run, prompt(100), 4) == [6, 0, 0, 0]
    assert run.ours.counters.total("hit_tokens_computed") == 3 * 6 * BLOCK
    assert run.index.counters["allocated"] == allocated, "what is stored is not stored again"


def test_hits_on_a_fast_drive_are_loaded(reuse: Make) -> None:
    run = reuse(pace=Pace(token_s=0.001, block_s=0.0001))
    stored(run, prompt(100))
    assert ask_again(run, prompt(100), 4) == [6, 6, 6, 6]
    assert run.ours.counters.total("hit_tokens_computed") == 0


def test_page_mode_loads_in_any_case(page: Make) -> None:
    run = page(pace=Pace(token_s=0.001, block_s=1.0))
    stored(run, prompt(100))
    assert ask_again(run, prompt(100), 3) == [6, 6, 6]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_drive_that_is_fast_again_is_used_again(reuse: Make, depth: int) -> None:
    run = reuse(pace=Pace(token_s=0.001, block_s=1.0), depth=depth)
    stored(run, prompt(100))
    assert ask_again(run, prompt(100), 2) == [6, 0]
    run.pace.block_s = 0.0001
    loaded = []
    for _ in range(5):
        run.pace.now += 60.0
        loaded += ask_again(run, prompt(100), 1)
    computed = loaded.count(0)
    assert 1 <= computed <= 2
    assert loaded == [0] * computed + [6] * (5 - computed)
    probes = [load for plan in run.plans for load in plan.loads if load.request_id == PROBE]
    assert len(probes) == run.ours.counters.total("load_probes") == computed
    assert not any(load.block_ids.any() for load in probes), "a probe touches no block of HBM"
    assert not any(load.whole for load in probes), "and needs no frames for longer"


def test_a_probe_that_finds_bad_bytes_drops_them(reuse: Make) -> None:
    run = reuse(pace=Pace(token_s=0.001, block_s=1.0))
    stored(run, prompt(100))
    assert ask_again(run, prompt(100), 2) == [6, 0]
    run.pace.now += 60.0
    run.ranks[0].broken.update(run.ranks[0].slots)
    assert ask_again(run, prompt(100), 1) == [0]
    assert run.ours.counters.total("slots_dropped", cause="read_error") >= 1


# ---- loads that fail ----


def test_a_hit_that_is_attended_to_as_a_whole_is_said_to_be(page: Make, sparse: Make) -> None:
    """Those are worth frames for all of it: the others only read what they choose."""
    short, long = prompt(EXACT_BELOW - 1), prompt(EXACT_BELOW, seed=1)
    for make, wanted in ((page, [True, True]), (sparse, [True, False])):
        run = make()
        stored(run, short, long)
        for name, tokens in (("short", short), ("long", long)):
            run.add(name, tokens, 4)
            end(run, name)
        loads = [load for plan in run.plans for load in plan.loads]
        assert [load.whole for load in loads] == wanted
