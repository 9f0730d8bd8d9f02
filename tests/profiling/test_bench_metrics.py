"""The switch and the watch of ``bench_metrics``."""

from __future__ import annotations

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.connector.scheduler.scheduler import SSDKVScheduler
from vllm_ssdkv.profiling import bench_metrics
from vllm_ssdkv.profiling.bench_metrics import Watched


def test_without_metrics_nothing_is_counted_and_afterwards_it_is() -> None:
    counters, tell = Counters(), SSDKVScheduler.take_stats
    with bench_metrics.switchable() as switch:
        counters.add("slots_stored")
        switch.on = False
        counters.add("slots_stored")
        counters.set("slots", 7)
        assert SSDKVScheduler.take_stats is not tell
        assert counters.take_gained() == {"slots_stored": 1}
        assert counters.take_gauges() == {}
        switch.on = True
        counters.add("slots_stored")
        switch.on = False
    counters.add("slots_stored")
    assert counters.total("slots_stored") == 3
    assert SSDKVScheduler.take_stats is tell


def test_time_in_metrics_is_counted_once() -> None:
    """``start_at_zero`` is no part of it, but calls one for every counter of a device."""
    counters, watch = Counters(), bench_metrics.Watch()
    with bench_metrics.watching(watch):
        counters.add("slots_stored")
        counters.set("slots", 7)
        assert {name: one.calls for name, one in watch.items() if one.calls} == {
            "Counters.add": 1,
            "Counters.set": 1,
        }
        counters.start_at_zero(["/a"])
    assert watch["Counters.add"].calls > 10
    assert watch["Counters.add_keyed"].calls == 0
    assert watch["Counters.add"].seconds > 0
    assert counters.total("slots_stored") == 1
    counters.add("slots_stored")
    assert counters.total("slots_stored") == 2


def test_what_watching_takes_is_taken_off() -> None:
    """By the call where it is known, else as the others in the mean."""
    watch = {"a": Watched(5.0, 2), "b": Watched(9.0, 3), "c": Watched()}
    blank = {"a": Watched(4.0, 4), "c": Watched(6.0, 1), "d": Watched()}
    assert bench_metrics.own_seconds(watch, blank) == (5.0 - 2 * 1.0) + (9.0 - 3 * 2.0)


def test_an_empty_watch_counts_calls_and_leaves_them_out() -> None:
    counters, blank = Counters(), bench_metrics.Watch()
    with bench_metrics.watching(blank, empty=True):
        counters.add("slots_stored", 1)
        counters.add("bytes_read", 1, device="/a")
    assert counters.totals() == {}
    assert blank["Counters.add"].calls == 2
    assert "Counters.take_gained" not in blank
