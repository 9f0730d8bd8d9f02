"""From options to an engine."""

from __future__ import annotations

import logging
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from tests.store.io.conftest import skip_if_absent
from vllm_ssdkv import _io
from vllm_ssdkv.base.errors import ConfigError, EngineUnavailableError
from vllm_ssdkv.config.io_engine import EngineKind, EngineOptions, FaultRule, ThrottleRule
from vllm_ssdkv.store.io.engines.open import open_engine

if TYPE_CHECKING:
    from tests.store.io.conftest import Rig


@pytest.fixture
def devices(rig: Rig) -> Rig:
    rig.add_device(b"")
    return rig


def test_auto_is_uring_where_there_is_one(devices: Rig, caplog: pytest.LogCaptureFixture) -> None:
    skip_if_absent("uring")
    with caplog.at_level(logging.INFO):
        engine = devices.open(EngineOptions())
    assert engine.name.startswith("uring")
    assert f"I/O engine {engine.name} (asked for auto)" in caplog.text
    assert str(devices.paths[0]) in caplog.text


def test_auto_goes_on_to_threads_and_says_why(
    devices: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_io, "has_uring", False)
    with caplog.at_level(logging.INFO):
        engine = devices.open(EngineOptions())
    assert engine.name == "threads"
    assert "I/O engine uring cannot run here: this build has no io_uring" in caplog.text
    assert "I/O engine threads (asked for auto)" in caplog.text
    with pytest.raises(EngineUnavailableError, match="install liburing"):
        open_engine(EngineOptions(engine="uring"), devices.fds, devices.paths, devices.arena)


@pytest.mark.parametrize(
    ("engine", "cure"),
    [("kvikio", "pip install kvikio-cu12"), ("aiofiles", "pip install aiofiles")],
)
def test_a_missing_package_is_named(
    devices: Rig, monkeypatch: pytest.MonkeyPatch, engine: EngineKind, cure: str
) -> None:
    before = set(os.listdir("/proc/self/task"))
    monkeypatch.setitem(sys.modules, engine, None)
    with pytest.raises(EngineUnavailableError, match=cure):
        open_engine(EngineOptions(engine=engine), devices.fds, devices.paths, devices.arena)
    assert set(os.listdir("/proc/self/task")) <= before


def test_kvikio_without_a_driver_is_explained(
    devices: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("libcuda.so.1: cannot open shared object file")

    package = ModuleType("kvikio")
    package.defaults = ModuleType("kvikio.defaults")  # type: ignore[attr-defined]
    package.CuFile = fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvikio", package)
    monkeypatch.setitem(sys.modules, "kvikio.defaults", package.defaults)
    with pytest.raises(EngineUnavailableError, match=r"libcuda\.so\.1.*NVIDIA's driver"):
        open_engine(EngineOptions(engine="kvikio"), devices.fds, devices.paths, devices.arena)


def test_twins_wrap_what_was_asked_for(devices: Rig) -> None:
    throttle, faults = (ThrottleRule(iops=1e6),), (FaultRule(kind="eio"),)
    names = {
        "noop": EngineOptions(engine="noop"),
        "throttled(noop)": EngineOptions(engine="noop", throttle=throttle),
        "faulty(noop)": EngineOptions(engine="noop", faults=faults),
        "faulty(throttled(threads))": EngineOptions(
            engine="threads", throttle=throttle, faults=faults
        ),
    }
    assert {name: devices.open(options).name for name, options in names.items()} == {
        name: name for name in names
    }


def test_a_fault_file_alone_makes_it_faulty(devices: Rig) -> None:
    path = str(devices.folder / "faults.json")
    options = EngineOptions(engine="noop", fault_file=path)
    assert devices.open(options).name == "faulty(noop)"


def test_an_unknown_engine_names_the_choices(devices: Rig) -> None:
    with pytest.raises(ConfigError, match=r"^io\.engine: 'warp'.*uring, threads"):
        devices.open(EngineOptions(engine="warp"))


def test_a_closed_descriptor_is_refused(devices: Rig) -> None:
    gone = os.dup(devices.fds[0])
    os.close(gone)
    with pytest.raises(EngineUnavailableError, match="descriptor"):
        open_engine(EngineOptions(), [gone], ["device"], devices.arena)


@pytest.mark.parametrize("engine", ["uring", "threads", "kvikio", "aiofiles"])
def test_numbers_out_of_range_are_refused(devices: Rig, engine: EngineKind) -> None:
    for depth in (0, 1025):
        with pytest.raises(ValueError, match="queue_depth"):
            devices.open(EngineOptions(engine=engine, queue_depth=depth))
    with pytest.raises(ValueError, match="1 descriptors for 2 paths"):
        open_engine(EngineOptions(), devices.fds, ["a", "b"], devices.arena)
    with pytest.raises(ValueError, match="devices"):
        open_engine(EngineOptions(), [], [], devices.arena)


def test_a_wrong_rule_leaves_no_threads_behind(devices: Rig) -> None:
    before = set(os.listdir("/proc/self/task"))
    with pytest.raises(ConfigError, match="device 1 of 1"):
        devices.open(EngineOptions(faults=(FaultRule(kind="eio", device=1),)))
    with pytest.raises(ConfigError, match="device 1 of 1"):
        devices.open(EngineOptions(throttle=(ThrottleRule(device=1),)))
    assert set(os.listdir("/proc/self/task")) <= before
