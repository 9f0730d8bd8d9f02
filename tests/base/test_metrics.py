"""The metric declarations and the accumulator."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tests.kit.sources import parsed
from vllm_ssdkv.base import metrics
from vllm_ssdkv.base.metric import LATENCY_BUCKETS, Metric
from vllm_ssdkv.base.metrics import (
    BATCH_METRICS,
    BY_NAME,
    METRICS,
    MOST_OF_RANKS,
    Counters,
    bucket_keys,
    combine_gauges,
    counter_key,
    histogram_of,
    metric_key,
    parse_key,
)
from vllm_ssdkv.base.metrics_node import NODE_SERVER_METRICS


def some_labels(metric: Metric, free: str = "/mnt/nvme0") -> dict[str, str]:
    return {label.name: label.values[0] if label.values else free for label in metric.labels}


@pytest.mark.parametrize("metric", BY_NAME.values(), ids=lambda metric: metric.name)
def test_every_metric_is_declared_well(metric: Metric) -> None:
    everywhere = (*METRICS, *BATCH_METRICS, *NODE_SERVER_METRICS)
    assert sum(other.name == metric.name for other in everywhere) == 1
    assert metric.help.endswith(".")
    assert metric.unit
    for label in metric.labels:
        assert bool(label.values) != bool(label.bounded_by), "bounded in exactly one way"
        # vLLM's own labels on every metric of a connector.
        assert label.name not in {"model_name", "engine"}
    assert metric.combine in {"counter": ("sum", "max"), "histogram": ("sum",)}.get(
        metric.kind, ("sum", "max", "min")
    )
    free = any(label.bounded_by for label in metric.labels)
    assert metric.kind != "counter" or metric.combine == "sum" or not free, "keys are known"
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))


@pytest.mark.parametrize("metric", BY_NAME.values(), ids=lambda metric: metric.name)
def test_exposed_name_is_what_prometheus_shows(metric: Metric) -> None:
    registry = CollectorRegistry()
    kind = {"counter": Counter, "histogram": Histogram}.get(metric.kind, Gauge)
    made = kind(metric.full_name, metric.help, metric.label_names, registry=registry)
    if metric.labels:
        made.labels(**some_labels(metric))
    lines = generate_latest(registry).decode().splitlines()
    samples = [line for line in lines if not line.startswith("#") and "_created" not in line]
    parts = ("_bucket", "_count", "_sum") if metric.kind == "histogram" else ("",)
    found = {line.partition("{")[0].partition(" ")[0] for line in samples}
    assert found == {metric.exposed_name + part for part in parts}


def test_ranks_that_do_the_same_in_a_step_do_not_add_up() -> None:
    assert {parse_key(key)[0].name for key in MOST_OF_RANKS} == {
        *("write_stalls", "write_stall_seconds", "stores_skipped"),
        *("step_copies", "layers_copied", "layer_copy_waits", "layer_copy_wait_seconds"),
        *("context_steps", "context_steps_native", "sparse_rows_exact", "attention_seconds"),
        *("offload_steps", "offload_seconds", "offload_step_seconds"),
        "x_cache_projection_seconds",
    }
    assert counter_key("attention_seconds", part="wait") in MOST_OF_RANKS


@given(st.text(max_size=40))
def test_key_round_trips_any_label_value(value: str) -> None:
    key = metric_key("bytes_read", {"device": value})
    metric, values = parse_key(key)
    assert (metric.name, values) == ("bytes_read", (value,))


def test_key_of_several_labels_is_in_declaration_order() -> None:
    key = metric_key("io_errors", {"kind": "eio", "device": "/a,b=c|d"})
    metric, values = parse_key(key)
    assert metric.label_names == ("device", "kind")
    assert values == ("/a,b=c|d", "eio")


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("nonsense", {}),
        ("slots_stored", {"device": "/a"}),
        ("bytes_read", {}),
        ("bytes_read", {"devices": "/a"}),
        ("hit_tokens", {"tier": "tape"}),
    ],
)
def test_undeclared_counts_are_refused(name: str, labels: dict[str, str]) -> None:
    counters = Counters()
    with pytest.raises(ValueError, match=name):
        counters.add(name, 1, **labels)
    assert counters.take_gained() == {}


PLACES = {"device": "/a,b=c|d#", "direction": "read"}


def test_parts_of_a_histogram_have_keys_of_their_own() -> None:
    for name, labels in (("io_latency_seconds", PLACES), ("io_queue_depth", {"device": "/a"})):
        key = metric_key(name, labels)
        parts = bucket_keys(key)
        assert len(set(parts)) == len(BY_NAME[name].buckets) + 2
        assert [histogram_of(part) for part in parts] == [(key, n) for n in range(len(parts))]
        assert {parse_key(part)[1][:-1] for part in parts} == {tuple(labels.values())}


def test_values_of_a_histogram_add_up() -> None:
    counters = Counters()
    first = [1.0] * (len(LATENCY_BUCKETS) + 1)
    counters.add_all("io_latency_seconds", first, 2.5, **PLACES)
    counters.add_all("io_latency_seconds", [0.0] * len(LATENCY_BUCKETS) + [3.0], 30.0, **PLACES)
    parts = bucket_keys(metric_key("io_latency_seconds", PLACES))
    expected = [1.0] * len(LATENCY_BUCKETS) + [4.0, 32.5]
    assert counters.take_gained() == dict(zip(parts, expected, strict=True))
    assert counters.take_gained() == {}


def test_a_histogram_takes_what_fits_only() -> None:
    counters = Counters()
    right = [0.0] * (len(LATENCY_BUCKETS) + 1)
    for name, counts, total, labels in (
        ("io_latency_seconds", right[:-1], 0.0, PLACES),
        ("io_latency_seconds", [-1.0, *right[1:]], 0.0, PLACES),
        ("io_latency_seconds", right, -1.0, PLACES),
        ("io_latency_seconds", [0.0, float("nan"), *right[2:]], 0.0, PLACES),
        ("io_latency_seconds", right, float("nan"), PLACES),
        ("io_latency_seconds", right, 0.0, {"device": "/a"}),
        ("slots_stored", [0.0], 0.0, {}),
    ):
        with pytest.raises(ValueError, match=name):
            counters.add_all(name, counts, total, **labels)
    with pytest.raises(ValueError, match="histogram"):
        counters.add("io_latency_seconds", 1, **PLACES)
    with pytest.raises(ValueError, match="histogram"):
        counters.set("io_latency_seconds", 1, **PLACES)
    assert counters.take_gained() == {}


def test_counters_of_devices_start_at_zero() -> None:
    """Prometheus sees no increase in a series that begins with its first error."""
    counters = Counters()
    counters.start_at_zero(["/a", "/b"])
    started = counters.take_gained()
    assert set(started.values()) == {0}
    for device in ("/a", "/b"):
        assert metric_key("device_lost", {"device": device}) in started
        assert metric_key("io_errors", {"device": device, "kind": "eio"}) in started
    assert not any(key.startswith("io_latency") or "device" not in key for key in started)
    assert counters.take_gained() == {}


def test_counter_and_gauge_are_not_mixed_up() -> None:
    counters = Counters()
    with pytest.raises(ValueError, match="gauge slots_ready"):
        counters.add("slots_ready", 1)
    with pytest.raises(ValueError, match="counter"):
        counters.set("slots_stored", 1)
    for wrong in (-1, float("nan")):
        with pytest.raises(ValueError, match="cannot add"):
            counters.add("slots_stored", wrong)


@given(st.lists(st.one_of(st.integers(0, 1000), st.none()), max_size=50))
def test_deltas_add_up_to_the_total(steps: list[int | None]) -> None:
    """None is a snapshot between the increments; no increment is lost or told twice."""
    counters = Counters()
    told = 0.0
    for step in steps:
        if step is None:
            told += counters.take_gained().get("slots_stored", 0)
        else:
            counters.add("slots_stored", step)
    told += counters.take_gained().get("slots_stored", 0)
    assert told == counters.total("slots_stored") == sum(step for step in steps if step)
    assert counters.take_gained() == {}


def test_a_gauge_is_told_when_it_has_another_value() -> None:
    counters = Counters()
    counters.set("slots_ready", 5)
    assert counters.take_gauges() == {"slots_ready": 5}
    counters.set("slots_ready", 5)
    assert counters.take_gauges() == {}
    counters.set("slots_ready", 3)
    counters.set("slots_free", 0)
    assert counters.take_gauges() == {"slots_ready": 3, "slots_free": 0}
    assert counters.take_gained() == {}


def test_gains_of_another_process_are_taken_in() -> None:
    """Those that are new and nothing yet among them."""
    worker, scheduler = Counters(), Counters()
    worker.start_at_zero(["/a"])
    for gain in (5, 0, 7):
        worker.add("slots_stored", gain)
        gained = worker.take_gained()
        scheduler.add_keyed(gained, gained.values())
    assert scheduler.total("slots_stored") == 12
    told = scheduler.take_gained()
    assert told["slots_stored"] == 12
    assert told[counter_key("device_lost", device="/a")] == 0
    scheduler.add_keyed(["slots_stored", "slots_evicted"], [0, 0])
    assert scheduler.take_gained() == {"slots_evicted": 0}


def test_keys_of_counters_are_checked_when_they_are_made() -> None:
    assert counter_key("hit_tokens", tier="ssd") == metric_key("hit_tokens", {"tier": "ssd"})
    with pytest.raises(ValueError, match="gauge slots_ready"):
        counter_key("slots_ready")
    with pytest.raises(ValueError, match="tier"):
        counter_key("hit_tokens", tier="tape")
    counters = Counters()
    for wrong in (-1, float("nan")):
        with pytest.raises(ValueError, match="slots_stored"):
            counters.add_keyed(["slots_stored"] * 2, [2, wrong])
    assert counters.total("slots_stored") == 4


def test_increments_of_many_threads_are_all_counted() -> None:
    counters = Counters()
    told: list[float] = []
    stop = threading.Event()

    def count() -> None:
        for _ in range(2000):
            counters.add("bytes_read", 3, device="/a")

    def drain() -> None:
        while not stop.is_set():
            told.append(sum(counters.take_gained().values()))

    threads = [threading.Thread(target=count) for _ in range(4)]
    drainer = threading.Thread(target=drain)
    drainer.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    stop.set()
    drainer.join(60)
    told.append(sum(counters.take_gained().values()))
    assert sum(told) == 4 * 2000 * 3 == counters.total("bytes_read", device="/a")


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_gauges_of_ranks_combine_as_declared(values: list[int]) -> None:
    ranks = [
        {
            "dram_frames_used": float(value),
            metric_key("device_state", {"device": "/a"}): float(value),
            metric_key("info", {"mode": "page", "io_engine": "e", "selector": "s"}): 1.0,
        }
        for value in values
    ]
    combined = combine_gauges(ranks)
    assert combined["dram_frames_used"] == sum(values)
    assert combined["device_state|device=/a"] == min(values)
    assert combined["info|mode=page,io_engine=e,selector=s"] == 1


# --- what the package counts, read from its source


def package_trees() -> list[ast.Module]:
    package = Path(metrics.__file__).parents[1]
    links = {package / name for name in ("triton_kernels", "profiling", "fpga_offload", "grafana")}
    paths = [path for path in package.rglob("*.py") if links.isdisjoint(path.parents)]
    return [parsed(path) for path in paths if not path.name.startswith("metrics")]


def counting_calls(tree: ast.Module) -> list[ast.Call]:
    """Calls of ``add``, ``add_all`` and ``set`` of something called counters."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in {"add", "add_all", "set"}
        and ast.unparse(node.func.value).rpartition(".")[2].lstrip("_") == "counters"
        and node.args
    ]


def test_all_that_is_counted_is_declared() -> None:
    """A wrong name or label would raise only when that line runs, perhaps on a failing disk."""
    calls = [call for tree in package_trees() for call in counting_calls(tree)]
    assert calls
    for call in calls:
        name = call.args[0]
        if not isinstance(name, ast.Constant):
            continue
        metric = BY_NAME[str(name.value)]
        assert isinstance(call.func, ast.Attribute)
        method = {"counter": "add", "histogram": "add_all"}.get(metric.kind, "set")
        assert call.func.attr == method, metric.name
        if any(keyword.arg is None for keyword in call.keywords):
            continue
        assert {keyword.arg for keyword in call.keywords} == set(metric.label_names), metric.name
        for label in metric.labels:
            (value,) = [keyword.value for keyword in call.keywords if keyword.arg == label.name]
            if label.values and isinstance(value, ast.Constant):
                assert value.value in label.values, f"{metric.name}: {label.name}"


def test_all_that_is_declared_is_counted() -> None:
    """A metric that nothing moves would tell users that all is well."""
    names: set[object] = set()
    starts: tuple[str, ...] = ()
    for tree in package_trees():
        names |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        for call in counting_calls(tree):
            if isinstance(call.args[0], ast.JoinedStr):
                first = call.args[0].values[0]
                assert isinstance(first, ast.Constant)
                starts += (str(first.value),)
    silent = [name for name in BY_NAME if name not in names and not name.startswith(starts)]
    assert silent == []


def test_keys_and_values_belong_together() -> None:
    counters = Counters()
    with pytest.raises(ValueError, match="differ in length"):
        counters.add_keyed(["slots_stored"], [1, 2])
    with pytest.raises(TypeError):
        counters.add_keyed(["slots_stored"], [None])  # type: ignore[list-item]  # refused
    assert counters.take_gained() == {}
