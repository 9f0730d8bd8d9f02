"""Stats from a worker's counters to the text of ``/metrics``, with vLLM's own classes between."""

from __future__ import annotations

import bisect
import copy
import json
import os
import pickle
from pathlib import Path
from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from vllm.config import VllmConfig
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from tests.kit.child import Child
from vllm_ssdkv.base.metrics import BY_NAME, METRICS, Counters, metric_key, parse_key
from vllm_ssdkv.connector.metrics.stats import SSDKVPromMetrics, SSDKVStats

LABELS = ["model_name", "engine"]
ENGINES: dict[int, list[object]] = {0: ["tiny", "0"], 1: ["tiny", "1"]}
TYPES: dict[type, type] = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}


class Config:
    """The one attribute of VllmConfig that the base class reads."""

    kv_transfer_config = None


@pytest.fixture
def prom() -> SSDKVPromMetrics:
    unregister_vllm_metrics()
    return SSDKVPromMetrics(cast(VllmConfig, Config()), TYPES, LABELS, ENGINES)


def sample(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"model_name": "tiny", "engine": "0", **labels})


def stats_of(source: str, **values: float) -> SSDKVStats:
    counters = {key: value for key, value in values.items() if parse_key(key)[0].adds_up}
    gauges = {key: value for key, value in values.items() if key not in counters}
    return SSDKVStats.of(counters, {source: gauges} if gauges else {})


def counted(counters: Counters) -> SSDKVStats:
    return SSDKVStats.of(counters.take_gained(), {"rank0": counters.take_gauges()})


COUNTER_KEYS = ["slots_stored", "io_deadline_exceeded", metric_key("bytes_read", {"device": "/a"})]
STATE = metric_key("device_state", {"device": "/a"})
snapshots = st.dictionaries(st.sampled_from([*COUNTER_KEYS, "dram_frames_used", STATE]), st.just(1))
stats_lists = st.lists(
    st.tuples(st.sampled_from(["rank0", "rank1", "scheduler"]), snapshots), min_size=1, max_size=8
)


@given(stats_lists, st.integers(0, 8))
def test_aggregation_may_be_grouped_in_any_way(
    parts: list[tuple[str, dict[str, float]]], cut: int
) -> None:
    """Over ranks first and then over time, or all at once: the same."""

    def fold(chosen: list[tuple[str, dict[str, float]]]) -> SSDKVStats:
        total = SSDKVStats()
        for source, snapshot in chosen:
            total = total.aggregate(stats_of(source, **snapshot))
        return total

    assert fold(parts[:cut]).aggregate(fold(parts[cut:])).data == fold(parts).data


def test_counters_add_over_ranks_and_gauges_combine_as_declared() -> None:
    total = stats_of("rank0", slots_stored=2, dram_frames_used=5, **{STATE: 1})
    total.aggregate(stats_of("rank1", slots_stored=3, dram_frames_used=7, **{STATE: 0}))
    assert total.reduce() == {"slots_stored": 5, "dram_frames_used": 12, STATE: 0}


def test_a_later_gauge_of_the_same_rank_replaces_the_earlier() -> None:
    """vLLM's log accumulates steps with the same method that it uses for ranks."""
    total = stats_of("rank0", dram_frames_used=5)
    total.aggregate(stats_of("rank0", dram_frames_used=6))
    assert total.reduce() == {"dram_frames_used": 6}


def test_aggregate_leaves_payloads_of_others_alone() -> None:
    first, second = stats_of("rank0", slots_stored=1, slots_free=4), stats_of("rank0", slots_free=9)
    payload, other = first.to_dict(), second.to_dict()
    before = copy.deepcopy((payload, other))
    SSDKVStats(data=payload).aggregate(SSDKVStats(data=other))
    assert (payload, other) == before


def test_stats_survive_both_ways_of_travel() -> None:
    """Copies within a process, msgpack from the scheduler's to the API server."""
    counters = Counters()
    counters.add("io_errors", 2, device="/mnt/a b", kind="eio")
    counters.set("slots_free", 7)
    stats = counted(counters)
    assert pickle.loads(pickle.dumps(stats)) == stats
    payload = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict()))
    assert SSDKVStats(data=payload) == stats


def test_empty_until_something_is_reported() -> None:
    stats = SSDKVStats()
    assert stats.is_empty()
    assert not stats.aggregate(stats_of("rank0", slots_stored=1)).is_empty()
    stats.reset()
    assert stats.is_empty()
    assert SSDKVStats().is_empty(), "instances share nothing"


def test_aggregating_another_connector_is_an_error() -> None:
    with pytest.raises(TypeError, match="NoneType"):
        SSDKVStats().aggregate(None)


def test_every_metric_is_registered(prom: SSDKVPromMetrics) -> None:
    text = generate_latest(REGISTRY).decode()
    for metric in METRICS:
        assert f"# HELP {metric.exposed_name} {metric.help}" in text


def test_counters_with_known_labels_start_at_zero(prom: SSDKVPromMetrics) -> None:
    assert sample("vllm:ssdkv_slots_stored_total") == 0
    assert sample("vllm:ssdkv_hit_tokens_total", tier="ssd") == 0
    assert sample("vllm:ssdkv_bytes_read_total", device="/a") is None


def test_observations_reach_the_right_engine(prom: SSDKVPromMetrics) -> None:
    stats = stats_of("rank0", slots_stored=2, **{metric_key("bytes_read", {"device": "/a,b"}): 9})
    prom.observe(stats.to_dict(), 0)
    prom.observe(stats.to_dict(), 0)
    prom.observe(stats.to_dict(), 1)
    assert sample("vllm:ssdkv_slots_stored_total") == 4
    assert sample("vllm:ssdkv_slots_stored_total", engine="1") == 2
    assert sample("vllm:ssdkv_bytes_read_total", device="/a,b") == 18


def test_gauges_of_a_silent_rank_keep_their_value(prom: SSDKVPromMetrics) -> None:
    both = stats_of("rank0", dram_frames_used=5).aggregate(stats_of("rank1", dram_frames_used=7))
    prom.observe(both.to_dict(), 0)
    assert sample("vllm:ssdkv_dram_frames_used") == 12
    prom.observe(stats_of("rank1", dram_frames_used=1).to_dict(), 0)
    assert sample("vllm:ssdkv_dram_frames_used") == 6


LATENCY = BY_NAME["io_latency_seconds"]
PLACE = {"device": "/a", "direction": "read"}
values = st.lists(
    st.one_of(st.floats(0, 20), st.sampled_from([0.0, *LATENCY.buckets])), max_size=40
)


@given(values, values)
def test_a_histogram_is_what_single_observations_make(
    first: list[float], second: list[float]
) -> None:
    """Of prometheus_client's own class, whose inner attributes we use."""
    unregister_vllm_metrics()
    prom = SSDKVPromMetrics(cast(VllmConfig, Config()), TYPES, LABELS, ENGINES)
    registry = CollectorRegistry()
    expected = Histogram("expected", "-", buckets=LATENCY.buckets, registry=registry)
    for observed in (first, second):
        counters = Counters()
        counts = [0.0] * (len(LATENCY.buckets) + 1)
        for value in observed:
            counts[bisect.bisect_left(LATENCY.buckets, value)] += 1
            expected.observe(value)
        counters.add_all("io_latency_seconds", counts, sum(observed), **PLACE)
        prom.observe(counted(counters).to_dict())
    found = {
        (s.name.removeprefix(LATENCY.full_name), s.labels.get("le")): s.value
        for family in REGISTRY.collect()
        for s in family.samples
        if s.name.startswith(LATENCY.full_name) and not s.name.endswith("_created")
    }
    wanted = {
        (s.name.removeprefix("expected"), s.labels.get("le")): s.value
        for family in registry.collect()
        for s in family.samples
        if not s.name.endswith("_created")
    }
    assert found.keys() == wanted.keys()
    assert found == pytest.approx(wanted)


class RayLike:
    """What vLLM's wrapper of Ray's histogram offers: one value at a time."""

    def __init__(self, **options: object) -> None:
        self.observed: list[float] = []

    def labels(self, *values: object) -> RayLike:
        return self

    def observe(self, value: float) -> None:
        self.observed.append(value)


def test_without_prometheus_own_class_values_are_observed_one_by_one() -> None:
    unregister_vllm_metrics()
    types = {**TYPES, Histogram: RayLike}
    prom = SSDKVPromMetrics(cast(VllmConfig, Config()), types, LABELS, ENGINES)
    counters = Counters()
    counters.add_all("io_queue_depth", [2, 0, 1, *[0] * 6, 1], 300.0, device="/a")
    prom.observe(counted(counters).to_dict())
    made = cast(RayLike, prom._histograms["io_queue_depth"])
    assert made.observed == [1.0, 1.0, 4.0, 512.0]


def test_info_names_what_is_in_force(prom: SSDKVPromMetrics) -> None:
    counters = Counters()
    counters.set("info", 1, mode="page", io_engine="faulty(threads)", selector="exact")
    prom.observe(counted(counters).to_dict())
    labels = {"mode": "page", "io_engine": "faulty(threads)", "selector": "exact"}
    assert sample("vllm:ssdkv_info", **labels) == 1


MULTIPROCESS = """
import json, sys
from multiprocessing import get_context
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, multiprocess
from vllm_ssdkv.connector.metrics.stats import SSDKVPromMetrics, SSDKVStats
class Config: kv_transfer_config = None
def serve(pipe, other_end):
    other_end.close()  # so that this one ends when the first process does
    prom = SSDKVPromMetrics(
        Config(), {Gauge: Gauge, Counter: Counter, Histogram: Histogram}, ["model_name", "engine"],
        {0: ["tiny", "0"]})
    pipe.send("ready")  # a file of metrics is empty for an instant, and its reader fails then
    while True:
        try:
            gauges = {"rank0": {"slots_free": pipe.recv()}}
        except EOFError:
            return
        prom.observe(SSDKVStats.of({"slots_stored": 2}, gauges).to_dict())
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
        labels = {"model_name": "tiny", "engine": "0"}
        names = ("vllm:ssdkv_slots_stored_total", "vllm:ssdkv_slots_free")
        pipe.send([registry.get_sample_value(name, labels) for name in names])
fork, servers = get_context("fork"), []
for _ in range(2):
    ours, theirs = fork.Pipe()
    fork.Process(target=serve, args=(theirs, ours), daemon=True).start()
    servers.append(ours)
for server in servers:
    server.recv()
for line in sys.stdin:
    server, free = map(int, line.split())
    servers[server].send(free)
    print(json.dumps(servers[server].recv()), flush=True)
"""


def test_several_api_servers_add_counters_and_show_the_newest_gauge(tmp_path: Path) -> None:
    """Prometheus's multiprocess mode, as with ``vllm serve --api-server-count 2``. What a server
    is told may be what it was told last, but not what the other one was."""
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    with Child.python("-c", MULTIPROCESS, env=environment, cwd=tmp_path) as servers:
        for told, (server, free) in enumerate(((0, 8), (1, 7), (0, 8), (1, 7), (1, 6)), 1):
            servers.say(f"{server} {free}")
            assert json.loads(servers.hear()) == [2 * told, free]
