"""Rates and states of two scrapes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.cli.metric_pages import THEIRS, Values, page
from vllm_ssdkv.base.metrics import BY_NAME
from vllm_ssdkv.cli.monitor.metrics_sample import TROUBLES, Sample, compare
from vllm_ssdkv.cli.monitor.metrics_scrape import Scrape, parse

URL = "http://host/metrics"

BEFORE: dict[str, Any] = {
    "hit_tokens_computed": {(): 200},
    "hit_tokens": {("dram",): 100, ("ssd",): 1000},
    "bytes_read": {("/a",): 1_000_000},
    "bytes_written": {("/a",): 0},
    "io_requests": {("/a", "read"): 10, ("/a", "write"): 0},
    "io_latency_seconds": {("/a", "read"): [0.001] * 10},
    "io_queue_depth": {("/a",): [4.0] * 10},
    "io_errors": {("/a", "eio"): 1},
    "info": {("page", "uring", "exact"): 1},
    "device_state": {("/a",): 1},
    "device_share": {("/a",): 0.75},
    "slots": {(): 100},
    "slots_to_come": {(): 20},
    "slots_ready": {(): 60},
    "slots_free": {(): 30},
    "slots_pinned": {(): 10},
    "slots_retained": {(): 5},
    "dram_frames": {(): 8},
    "dram_frames_used": {(): 6},
    "dram_frames_dirty": {(): 2},
}
AFTER: dict[str, Any] = {
    **BEFORE,
    "hit_tokens_computed": {(): 400},
    "hit_tokens": {("dram",): 150, ("ssd",): 3000},
    "bytes_read": {("/a",): 5_000_000},
    "bytes_written": {("/a",): 2_000_000},
    "io_requests": {("/a", "read"): 50, ("/a", "write"): 20},
    "io_latency_seconds": {
        ("/a", "read"): [0.001] * 10 + [0.003] * 40,
        ("/a", "write"): [0.01] * 20,
    },
    "io_queue_depth": {("/a",): [4.0] * 10 + [8.0] * 30},
    "io_errors": {("/a", "eio"): 3, ("/a", "short"): 1},
    "context_pages_streamed": {("ssd",): 64},
    "checksum_failures": {(): 2},
    "seconds_saved": {("loading",): 90, ("computing",): 10},
    "seconds_lost": {(): 4},
    "wear_bytes": {("/a",): 25 * 10**12},
    "wear_used": {("/a",): 0.25},
}
THEIRS_BEFORE = {
    "num_requests_running": 1,
    "num_requests_waiting": 0,
    "kv_cache_usage_perc": 0.5,
    "prompt_tokens": 2000,
    "generation_tokens": 100,
    "external_prefix_cache_queries": 2000,
    "external_prefix_cache_hits": 1000,
}
THEIRS_AFTER = {
    "num_requests_running": 3,
    "num_requests_waiting": 2,
    "kv_cache_usage_perc": 0.25,
    "prompt_tokens": 4000,
    "generation_tokens": 140,
    "external_prefix_cache_queries": 4000,
    "external_prefix_cache_hits": 2500,
}


def scrape(at: float, ours: Values, theirs: dict[str, float] | None = None) -> Scrape:
    return parse(page(ours, theirs), at, URL)


def sample(seconds: float = 2.0) -> Sample:
    older = scrape(10.0, BEFORE, THEIRS_BEFORE)
    return compare(older, scrape(10.0 + seconds, AFTER, THEIRS_AFTER), URL, 1e9)


def test_rates_are_differences_over_the_time_between() -> None:
    found = sample()
    assert (found.seconds, found.time, found.url) == (2.0, 1e9, URL)
    assert found.prompt_tokens_per_s == 1000
    assert found.generation_tokens_per_s == 20
    assert found.restored_tokens_per_s == {"dram": 25, "ssd": 1000}
    assert found.context_pages_per_s == {"dram": 0, "ssd": 32}
    assert found.hit_rate == 0.85, "what was found and computed is a hit"
    assert sample(4.0).prompt_tokens_per_s == 500


def test_what_is_there_is_that_of_the_later_page() -> None:
    found = sample()
    assert found.models == ("some/model",)
    assert found.in_force == ("page, uring, exact",)
    assert (found.requests_running, found.requests_waiting, found.hbm_used) == (3, 2, 0.25)
    assert found.restored_tokens == {"dram": 150, "ssd": 3000}
    assert found.hit_rate_since_start == 0.725
    assert (found.slots, found.slots_to_come, found.slots_ready) == (100, 20, 60)
    assert (found.slots_free, found.slots_pinned, found.slots_retained) == (30, 10, 5)
    assert (found.dram_frames, found.dram_frames_used, found.dram_frames_dirty) == (8, 6, 2)
    assert {name for name, count in found.troubles.items() if count} == {"checksum_failures"}


def test_a_device_is_shown_as_it_works() -> None:
    (device,) = sample().devices
    assert (device.device, device.in_service, device.share) == ("/a", True, 0.75)
    assert (device.read_bytes_per_s, device.written_bytes_per_s) == (2e6, 1e6)
    assert (device.reads_per_s, device.writes_per_s) == (20, 10)
    assert device.read_latency_s == pytest.approx(0.003)
    assert device.write_latency_s == pytest.approx(0.01)
    assert device.queue_depth == pytest.approx(8)
    assert (device.errors, device.new_errors) == (4, 3)


def test_gains_and_their_price_are_told() -> None:
    found = sample()
    assert found.seconds_saved == 96
    assert found.written_bytes_per_day == 86_400e6
    assert found.worst_years_left == pytest.approx(75e12 / 1e6 / 86_400 / 365)
    before = scrape(10.0, BEFORE, THEIRS_BEFORE)
    still = compare(before, scrape(12.0, BEFORE, THEIRS_BEFORE), URL, 0)
    assert (still.written_bytes_per_day, still.worst_years_left) == (0, None)


def test_a_device_that_does_nothing_has_no_latency() -> None:
    again = scrape(12.0, BEFORE, THEIRS_BEFORE)
    found = compare(scrape(10.0, BEFORE, THEIRS_BEFORE), again, URL, 0)
    (device,) = found.devices
    assert (device.read_latency_s, device.write_latency_s, device.queue_depth) == (None,) * 3
    assert (device.reads_per_s, device.new_errors, found.hit_rate) == (0, 0, None)
    assert found.hit_rate_since_start == 0.6


def test_a_device_out_of_use_on_any_rank_is_out() -> None:
    first = page({"device_state": {("/a",): 1, ("/b",): 1}, "device_share": {("/a",): 0.5}})
    second = page({"device_state": {("/a",): 0}, "device_share": {("/a",): 0.1}}, engine="1")
    both = parse(first + second, 1.0, URL)
    found = compare(Scrape(0.0, {}), both, URL, 0)
    states = {device.device: (device.in_service, device.share) for device in found.devices}
    assert states == {"/a": (False, 0.3), "/b": (True, None)}


def test_an_engine_tells_of_its_node() -> None:
    """One that has none says nothing of it; of several engines all must be answered."""
    assert sample().node_answers is None
    first = page({"node_connected": {(): 1}, "node_sessions_lost": {(): 2}})
    alone = compare(Scrape(0.0, {}), parse(first, 1.0, URL), URL, 0)
    assert (alone.node_answers, alone.troubles["node_sessions_lost"]) == (True, 2)
    second = page({"node_connected": {(): 0}}, engine="1")
    assert compare(Scrape(0.0, {}), parse(first + second, 1.0, URL), URL, 0).node_answers is False


def test_a_server_that_has_started_anew_shows_no_negative_rate() -> None:
    older = scrape(10.0, AFTER, THEIRS_AFTER)
    found = compare(older, scrape(12.0, BEFORE, THEIRS_BEFORE), URL, 0)
    assert found.restored_tokens_per_s == {"dram": 50, "ssd": 500}
    assert found.devices[0].read_bytes_per_s == 5e5
    assert found.devices[0].read_latency_s == pytest.approx(0.001)


def test_an_engine_without_requests_yet_has_no_numbers_but_zero() -> None:
    page_of_new = {"load_failures": {(): 0}}
    found = compare(scrape(1.0, page_of_new), scrape(2.0, page_of_new), URL, 0)
    assert (found.models, found.in_force, found.devices) == ((), (), ())
    assert (found.slots, found.hbm_used, found.hit_rate_since_start) == (0, None, None)


def test_the_names_of_vllms_metrics_are_those_of_its_loggers() -> None:
    """Without importing it, which takes long."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    loggers = (Path(spec.origin).parent / "v1" / "metrics" / "loggers.py").read_text()
    assert {name for name in THEIRS if f'name="vllm:{name}"' not in loggers} == set()


def test_troubles_are_counters() -> None:
    assert {BY_NAME[name].kind for name in TROUBLES} == {"counter"}
