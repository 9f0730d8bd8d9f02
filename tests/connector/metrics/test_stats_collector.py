"""Times at which numbers are told: none twice, none kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.connector.events import Make, end, prompt
from vllm_ssdkv.base.metrics import TELL_INTERVAL_S, Counters
from vllm_ssdkv.connector.messages import RankReport
from vllm_ssdkv.connector.metrics import stats_collector
from vllm_ssdkv.connector.metrics.stats import SSDKVStats
from vllm_ssdkv.connector.metrics.stats_collector import StatsCollector


class Rig:
    """A collector with a clock of its own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.counters = Counters()
        self.collector = StatsCollector(self.counters, lambda: self.now)


def test_while_requests_run_it_is_told_in_intervals() -> None:
    rig = Rig()
    assert rig.collector.due(running=True)
    rig.collector.take()
    rig.now += 0.9 * TELL_INTERVAL_S
    assert not rig.collector.due(running=True)
    assert rig.collector.due(running=False), "who has the answer may look at once"
    rig.now += 0.2 * TELL_INTERVAL_S
    assert rig.collector.due(running=True)


def test_nothing_is_told_of_nothing() -> None:
    rig = Rig()
    assert rig.collector.take() is None
    rig.counters.set("slots_ready", 5)
    rig.collector.take_in([(0, RankReport(gained={"slots_stored": 2}))])
    assert rig.collector.take() is not None
    rig.counters.set("slots_ready", 5)
    rig.collector.take_in([(0, RankReport())])
    assert rig.collector.take() is None


def test_gauges_that_have_not_changed_go_with_those_that_have() -> None:
    """With several API servers, one that was told nothing before hears of all."""
    rig = Rig()
    rig.counters.set("slots_ready", 5)
    rig.collector.take_in([(0, RankReport(gauges={"dram_frames_used": 3, "dram_frames": 9}))])
    rig.collector.take_in([(1, RankReport(gauges={"dram_frames_used": 4}))])
    first = rig.collector.take()
    assert first is not None
    rig.collector.take_in([(1, RankReport(gauges={"dram_frames_used": 8}))])
    second = rig.collector.take()
    assert second is not None
    assert first.reduce() == {"slots_ready": 5, "dram_frames_used": 7, "dram_frames": 9}
    assert second.reduce() == {"slots_ready": 5, "dram_frames_used": 11, "dram_frames": 9}


def test_what_all_ranks_do_in_a_step_is_counted_once() -> None:
    """A step waits as long as its slowest rank; what ranks read and write adds up."""
    rig = Rig()
    stall, read = "write_stall_seconds", "bytes_read|device=/a"
    skipped = "stores_skipped|cause=write_buffer"
    rig.counters.add("stores_skipped", 1, cause="store_full")
    for gains in (
        [{stall: 2.0, skipped: 3, read: 10}, {stall: 0.5, read: 20}, {stall: 1.0, skipped: 4}],
        [{}, {stall: 0.25, skipped: 1, read: 5}, {}],
    ):
        rig.collector.take_in([(rank, RankReport(gained=dict(g))) for rank, g in enumerate(gains)])
    told = rig.collector.take()
    assert told is not None
    expected = {stall: 2.25, skipped: 5, read: 35, "stores_skipped|cause=store_full": 1}
    assert told.data["counters"] == expected


steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["scheduler", "0", "1"]), st.integers(0, 9)),
        st.just("take"),
    ),
    max_size=30,
)


@given(steps)
def test_no_count_is_lost_or_told_twice(steps: list[tuple[str, int] | str]) -> None:
    rig, told, counted = Rig(), SSDKVStats(), 0
    for step in [*steps, "take"]:
        if isinstance(step, str):
            stats = rig.collector.take()
            told = told.aggregate(stats) if stats is not None else told
        else:
            who, gain = step
            counted += gain
            if who == "scheduler":
                rig.counters.add("slots_stored", gain)
            else:
                rig.collector.take_in([(int(who), RankReport(gained={"slots_stored": gain}))])
    assert told.data["counters"].get("slots_stored", 0) == counted
    assert rig.collector.take() is None


# ---- under vLLM's scheduler ----


def test_what_workers_counted_is_told_with_the_last_token(
    page: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not later: a client that has its answer looks at the metrics."""
    monkeypatch.setattr(stats_collector, "TELL_INTERVAL_S", float("inf"))  # none passes here
    run = page(ranks=2)
    heard = SSDKVStats()
    take = run.ours.take_stats

    def told() -> SSDKVStats | None:
        stats = take()
        if stats is not None:
            heard.aggregate(stats)
        return stats

    monkeypatch.setattr(run.ours, "take_stats", told)
    run.add("a", prompt(100), 4)
    for _ in range(2):
        run.step()
        run.end_io()
    for rank in run.ranks:
        rank.report.gained = {"hit_tokens|tier=ssd": 5.0}
    while "a" not in run.finished:
        assert "hit_tokens|tier=ssd" not in heard.data["counters"]
        run.step()
        run.end_io()
    assert heard.data["counters"]["hit_tokens|tier=ssd"] == 10


def test_when_all_has_ended_workers_hear_of_it_once(reuse: Make, page: Make) -> None:
    """They bring their gauges up to date then, as no step may follow."""
    for make in (reuse, page):
        run = make()
        run.add("a", prompt(100), 4)
        end(run, "a")
        assert [plan.settled for plan in run.plans].count(True) == 1
        assert run.plans[-1].settled
        run.add("b", prompt(50), 2)
        end(run, "b")
        assert [plan.settled for plan in run.plans].count(True) == 2
        assert run.plans[-1].settled


def test_an_aborted_request_settles_too(page: Make) -> None:
    run = page()
    run.add("a", prompt(100), 50)
    for _ in range(5):
        run.step()
    run.abort("a")
    run.run()
    assert run.plans[-1].settled
    run.check_idle()
