"""The store's numbers, as vLLM wants a tier to tell them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from vllm.config import VllmConfig
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
)

from tests.secondary_tier.rig import key_of, running
from vllm_ssdkv.secondary_tier.tier_metrics import definitions, observations

Devices = Callable[[int], list[Path]]

BUCKETS = (1.0, 2.0, 4.0, 8.0)
KINDS = {
    "counter": OffloadingCounterMetadata,
    "gauge": OffloadingGaugeMetadata,
    "histogram": OffloadingHistogramMetadata,
}


def counts(values: list[float]) -> list[int]:
    """Values in each bucket, as Prometheus counts them."""
    found = [0] * (len(BUCKETS) + 1)
    for value in values:
        found[sum(value > bound for bound in BUCKETS)] += 1
    return found


@given(st.lists(st.floats(0.01, 16.0), max_size=30))
def test_single_values_make_the_same_histogram(values: list[float]) -> None:
    made = list(observations(BUCKETS, [*counts(values), sum(values)]))
    assert counts(made) == counts(values)
    assert math.isclose(sum(made), sum(values), rel_tol=1e-6, abs_tol=1e-6)


def test_every_number_is_declared(settings: VllmConfig, tmp_devices: Devices) -> None:
    declared, keys = definitions(), [key_of(number) for number in range(12)]
    with running(settings, tmp_devices(2)) as engine:
        context = engine.begin()
        engine.store(keys, context)
        engine.settle()
        engine.empty_pool()
        assert engine.looked_up(keys, context) == keys
        stats = engine.tier.get_stats()
        assert stats is not None
    types, values = stats.data["types"], stats.data["data"]
    for name, of_labels in values.items():
        assert isinstance(declared[name], KINDS[types[name]])
        for labels in of_labels:
            assert len(labels) == len(declared[name].labelnames)
    assert values["vllm:ssdkv_slots_stored"][()] == len(keys)
    tokens = values["vllm:ssdkv_hit_tokens"]
    assert sum(tokens.values()) == len(keys) * 16
    assert values["vllm:ssdkv_slots_ready"][()] == len(keys)
    writes = values["vllm:ssdkv_io_requests"]
    assert sum(writes.values()) > 0
    assert set(values["vllm:ssdkv_device_state"].values()) == {1.0}
