"""From an engine's statistics to the metrics."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from vllm_ssdkv.base.metrics import BY_NAME, Counters, bucket_keys, metric_key
from vllm_ssdkv.store.engine_metrics import EngineMetrics
from vllm_ssdkv.store.io.engines.protocol import U16, U32, U64, Batch, Op, zero_totals


class Counting:
    """An engine of which only the statistics matter."""

    name = "counting"

    def __init__(self) -> None:
        self.totals = zero_totals(2)

    def submit(self, op: Op, device: U16, offset: U64, length: U32, buffer: U64) -> Batch:
        raise AssertionError("only the statistics are asked for")

    def statistics(self) -> Mapping[str, int]:
        return self.totals

    def close(self, timeout_s: float) -> bool:
        return True


def told(counters: Counters, name: str, **labels: str) -> list[float]:
    """Everything that a histogram was told, and the sum."""
    totals = counters.take_gained()
    return [totals[key] for key in bucket_keys(metric_key(name, labels))]


def test_every_number_finds_its_place() -> None:
    engine, counters = Counting(), Counters()
    engine.totals |= {name: n for n, name in enumerate(engine.totals)}
    EngineMetrics(engine, ["/a", "/b"], counters).update()
    snapshot = counters.take_gained()
    for device, path in enumerate(("/a", "/b")):
        for direction in ("read", "write"):
            labels = {"device": path, "direction": direction}
            requests = engine.totals[f"{direction}_requests.{device}"]
            assert counters.total("io_requests", **labels) == requests
            *keys, total = bucket_keys(metric_key("io_latency_seconds", labels))
            bounds = [round(b * 1e9) for b in BY_NAME["io_latency_seconds"].buckets]
            for key, bound in zip(keys, [*bounds, "inf"], strict=True):
                assert snapshot[key] == engine.totals[f"{direction}_latency_{bound}.{device}"]
            assert snapshot[total] == engine.totals[f"{direction}_nanoseconds.{device}"] / 1e9
        *keys, total = bucket_keys(metric_key("io_queue_depth", {"device": path}))
        bounds = [int(b) for b in BY_NAME["io_queue_depth"].buckets]
        for key, bound in zip(keys, [*bounds, "inf"], strict=True):
            assert snapshot[key] == engine.totals[f"depth_{bound}.{device}"]
        assert snapshot[total] == engine.totals[f"depth_sum.{device}"]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=10))
def test_what_was_told_is_not_told_again(steps: list[int]) -> None:
    engine, counters = Counting(), Counters()
    metrics = EngineMetrics(engine, ["/a", "/b"], counters)
    for step in steps:
        engine.totals["read_requests.1"] += step
        engine.totals["read_latency_50000.1"] += step
        metrics.update()
    labels = {"device": "/b", "direction": "read"}
    assert counters.total("io_requests", **labels) == sum(steps)
    assert told(counters, "io_latency_seconds", **labels)[0] == sum(steps)
