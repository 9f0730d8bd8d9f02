"""The switch and the watch of ``bench_metrics``."""

from __future__ import annotations

from vllm_ssdkv.connector.scheduler import SSDKVScheduler
from vllm_ssdkv.metrics import Counters
from vllm_ssdkv.profiling import bench_metrics


def test_without_metrics_nothing_is_counted_and_afterwards_it_is() -> None:
    counters, tell = Counters(), SSDKVScheduler.take_stats
    with bench_metrics._without_metrics():
        counters.add("slots_stored")
        counters.set("slots", 7)
        assert SSDKVScheduler.take_stats is not tell
    assert counters.take_gained() == {}
    counters.add("slots_stored")
    assert counters.total("slots_stored") == 1
    assert SSDKVScheduler.take_stats is tell


def test_time_in_metrics_is_counted_once() -> None:
    """``start_at_zero`` is no part of it, but calls one for every counter of a device."""
    counters, spent = Counters(), list[float]()
    with bench_metrics._watched(spent):
        counters.add("slots_stored")
        counters.set("slots", 7)
        assert len(spent) == 2
        counters.start_at_zero(["/a"])
    assert len(spent) > 10
    assert min(spent) > 0
    assert counters.total("slots_stored") == 1
    counters.add("slots_stored")
    assert counters.total("slots_stored") == 2


def test_the_range_of_a_median_covers_it() -> None:
    values = [float(n) for n in range(100)]
    low, high = bench_metrics.median_range(values[::-1])
    assert (low, high) == (40.0, 59.0)
    assert bench_metrics.median_range([3.0]) == (3.0, 3.0)
