"""Promotion to DRAM of blocks that running requests read in every step; see ``simulation.py``."""

from __future__ import annotations

import numpy as np
import pytest

from tests.connector.events import Make, begin, end, prompt
from tests.connector.simulation import Simulation
from vllm_ssdkv.connector.messages import PROMOTION


def promotions(run: Simulation) -> list[list[int]]:
    """Slots of each promotion that was planned."""
    loads = [load for plan in run.plans for load in plan.loads if load.request_id == PROMOTION]
    assert all(load.whole and not len(load.block_ids) for load in loads)
    return [load.slots.tolist() for load in loads]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_streamed_is_brought_in_when_there_is_room(page: Make, ranks: int) -> None:
    """One at a time, by every rank, whichever says so; nobody waits for it."""
    run = page(slots=60, ranks=ranks)
    run.add("a", prompt(100), 60)
    begin(run, "a")
    run.ranks[-1].streams = True
    for _ in range(4):
        run.step()
    run.ranks[-1].streams = False
    context = run.ranks[0].contexts["a"]
    (slots,) = promotions(run)
    assert slots == context[: len(slots)]
    assert len(slots) >= 4
    pinned = run.index.gauges()["pinned"]
    for rank in run.ranks:
        assert [load.request_id for load in rank.loads] == [PROMOTION]
    end(run, "a")
    assert pinned >= len(slots)
    assert run.ours.counters.total("hit_tokens_computed") == 0
    assert len(promotions(run)) == 1
    assert run.choice.load.known is False, "it shares the drives: it says nothing of hits"


def test_requests_end_while_their_blocks_are_brought_in(page: Make) -> None:
    run = page(slots=60)
    for name in "ab":
        run.add(name, prompt(100, seed=ord(name)), 60)
    begin(run, *"ab")
    run.ranks[0].streams = True
    run.step()
    run.step()
    (slots,) = promotions(run)
    both = {*run.ranks[0].contexts["a"], *run.ranks[0].contexts["b"]}
    assert set(slots) < both
    run.abort("a")
    run.step()
    assert run.ours.unfinished(), "workers still read into DRAM, and their slots stay"
    assert run.index.gauges()["pinned"] >= len(slots)
    run.ranks[0].streams = False
    end(run, "b")


def test_a_report_of_one_that_has_ended_means_nothing(page: Make) -> None:
    run = page(slots=60)
    run.add("a", prompt(100), 4)
    run.ranks[0].report.streamed.append(("ended", np.arange(3)))
    end(run, "a")
    assert promotions(run) == []


def test_bad_bytes_found_by_a_promotion_are_dropped(page: Make) -> None:
    """As by any read: the request is computed again."""
    run = page(slots=60)
    run.add("a", prompt(100), 30)
    begin(run, "a")
    slot = run.ranks[0].contexts["a"][1]
    run.ranks[0].report.streamed.append(("a", np.arange(3)))
    run.step()
    run.step()
    assert len(promotions(run)) == 1
    run.ranks[0].broken.add(slot)
    end(run, "a")
    assert run.ours.counters.total("slots_dropped", cause="read_error") >= 1
