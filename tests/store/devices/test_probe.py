"""Measuring devices at start: ratios are found, bounded, remembered, and nothing is left behind."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.clock import Clock
from tests.store.conftest import PAGED, PATIENCE_S
from vllm_ssdkv.base.errors import DeviceError
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.io_engine import EngineOptions, FaultRule, ThrottleRule
from vllm_ssdkv.store.devices import probe
from vllm_ssdkv.store.devices.probe import ALIKE, STEP, read_rates, weights_of
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.io.testing import throttled
from vllm_ssdkv.store.open import StorePlace

Devices = Callable[[int], list[Path]]


def rates(paths: list[Path], which: list[int], **options: Any) -> list[float]:  # noqa: ANN401
    chosen = EngineOptions(engine="threads", **options)
    return read_rates([str(p) for p in paths], which, chosen, "auto", PATIENCE_S)


@given(st.lists(st.floats(1.0, 1e10), min_size=1, max_size=8))
def test_weights_follow_rates(measured: list[float]) -> None:
    weights = weights_of(measured)
    assert max(weights) == 1.0
    for rate, weight in zip(measured, weights, strict=True):
        share = rate / max(measured)
        if share >= ALIKE:
            assert weight == 1.0
        else:
            assert weight >= STEP
            assert weight == pytest.approx(max(share, STEP), abs=STEP / 2 + 1e-9)


def test_a_slow_device_is_measured_as_such(
    tmp_devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock().govern(monkeypatch, probe, throttled)
    paths = tmp_devices(3)
    throttle = (
        ThrottleRule(device=0, bandwidth=80e6),
        ThrottleRule(device=1, bandwidth=1.0),  # is not asked for
        ThrottleRule(device=2, bandwidth=20e6),
    )
    fast, slow = rates(paths, [0, 2], throttle=throttle)
    assert weights_of([fast, slow]) == [1.0, 0.25]
    assert fast == pytest.approx(80e6)
    assert [list(path.iterdir()) for path in paths] == [[], [], []]


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (FaultRule(kind="dead", device=1), "No such device"),
        (FaultRule(kind="eio", device=1, op="read"), "Input/output error"),
        (FaultRule(kind="short", device=1, op="read"), "fewer bytes"),
    ],
)
def test_a_device_that_fails_is_named(tmp_devices: Devices, rule: FaultRule, text: str) -> None:
    paths = tmp_devices(2)
    with pytest.raises(DeviceError, match=f"{paths[1]} cannot be measured: {text}"):
        rates(paths, [0, 1], faults=(rule,))
    assert [list(path.iterdir()) for path in paths] == [[], []]


def test_a_device_that_does_not_answer_is_named(tmp_devices: Devices) -> None:
    paths = tmp_devices(1)
    stuck = EngineOptions(engine="threads", faults=(FaultRule(kind="stall", device=0, seconds=60),))
    with pytest.raises(DeviceError, match=rf"{paths[0]} did not answer within 0\.2 s"):
        read_rates([str(paths[0])], [0], stuck, "auto", 0.2)


def test_each_device_is_measured_once(
    tmp_devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = tmp_devices(3)
    asked: list[list[str]] = []
    speeds = {str(d): rate for d, rate in zip(devices, (4e9, 1.2e9, 8e9), strict=True)}

    def measured(paths: list[str], which: list[int], *_: object) -> list[float]:
        asked.append([paths[i] for i in which])
        return [speeds[paths[i]] for i in which]

    monkeypatch.setattr(probe, "read_rates", measured)

    def weights(paths: list[Path], **entry: Any) -> list[float]:  # noqa: ANN401
        config = SSDKVConfig.from_extra_config(
            {"devices": [{"path": d, "capacity": "16MiB"} | entry for d in paths]}
        )
        place = StorePlace(config, [PAGED], Fingerprint({"model": "tiny"}))
        place.prepare()
        found = place.manifest()
        return [device.weight for device in found.present()]

    assert weights(devices[:1]) == [1.0]
    assert asked == []
    assert weights(devices[:2]) == [1.0, 0.3]
    assert weights(devices[:2]) == [1.0, 0.3]
    assert weights(devices[1::-1]) == [0.3, 1.0]
    assert weights(devices) == [0.5, 0.15, 1.0]
    assert asked == [[str(devices[0]), str(devices[1])], [str(devices[2])]]
    assert weights(devices, weight=3) == [3.0] * 3
    assert len(asked) == 2


def test_what_was_measured_is_said(tmp_devices: Devices, caplog: pytest.LogCaptureFixture) -> None:
    paths = tmp_devices(1)
    with caplog.at_level(logging.INFO):
        (rate,) = rates(paths, [0], throttle=(ThrottleRule(bandwidth=1e9),))
    assert f"device {paths[0]} reads {rate / 1e6:.0f} MB/s" in caplog.text
