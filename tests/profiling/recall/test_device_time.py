"""Costs of layers for the busiest device, and for devices with even loads."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_ssdkv.config.io_engine import ThrottleRule
from vllm_ssdkv.profiling.recall.device_time import DeviceTime
from vllm_ssdkv.store.io.engines.protocol import Op
from vllm_ssdkv.store.io.testing.noop import NoopEngine
from vllm_ssdkv.store.io.testing.throttled import ThrottledEngine
from vllm_ssdkv.store.memory.arena import Arena


def test_layers_whose_busiest_devices_differ_add_up() -> None:
    rule = ThrottleRule(iops=10, latency_s=3.0)
    twin = ThrottledEngine(NoopEngine([0, 1], Arena(1 << 20), 16), 2, [rule])

    def read(*device: int) -> None:
        count = len(device)
        at = np.arange(count, dtype=np.uint64) * 4096
        length = np.full(count, 4096, dtype=np.uint32)
        twin.submit(Op.READ, np.array(device, dtype=np.uint16), at, length, at)

    read(0, 0, 0)  # before anybody looked
    time = DeviceTime(twin)
    read(0, 0, 1)
    read(1)
    time.layer_ended()
    assert (time.busiest_s, time.even_s) == pytest.approx((0.2, 0.2))
    read(1, 1, 1, 0)
    time.layer_ended()
    time.layer_ended()
    assert (time.busiest_s, time.even_s) == pytest.approx((0.5, 0.4))
    assert time.layers == 3
