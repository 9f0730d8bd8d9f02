"""Memory of the device that attends, when there is not enough of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.cli.explain.catalog import entry_for
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.connector.worker import device_memory
from vllm_ssdkv.connector.worker.device_memory import (
    held_for_summaries,
    hold_summary_memory,
    hot_memory,
    take_summary_memory,
)
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry

LAYOUT = BlockLayout(32, 16, 2, 64, 4096, torch.bfloat16)
GEOMETRY = SlotGeometry("paged", 2, 2, 2, 4096)
CPU = torch.device("cpu")
TOO_MUCH = 1 << 56


def test_too_much_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"no room for .* of sparse.hbm_pages on cpu") as caught:
        hot_memory(TOO_MUCH, LAYOUT, GEOMETRY, CPU)
    assert "--gpu-memory-utilization" in str(caught.value)
    assert entry_for(str(caught.value)) is not None


def with_summaries_of(nbytes: int, **more: object) -> SSDKVConfig:
    options = {"mode": "page", "selector": "bounds", "devices": [{"path": "/x"}], **more}
    return SSDKVConfig.from_extra_config({**options, "sparse": {"hbm_summaries": nbytes}})


@pytest.fixture
def _cpu_for_a_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(device_memory, "_is_host", lambda device: False)
    yield
    take_summary_memory()


@pytest.mark.usefixtures("_cpu_for_a_device")
def test_memory_for_summaries_is_taken_once_and_handed_over() -> None:
    """Each layer asks for it."""
    assert held_for_summaries() == 0
    hold_summary_memory(with_summaries_of(4096), CPU)
    first = device_memory._HELD.memory
    hold_summary_memory(with_summaries_of(4096), CPU)
    assert held_for_summaries() == 4096
    assert take_summary_memory() is first
    assert take_summary_memory() is None
    hold_summary_memory(with_summaries_of(8192), CPU)  # of the process's next engine
    hold_summary_memory(with_summaries_of(4096), CPU)
    assert held_for_summaries() == 4096
    for more in ({"selector": "sparf"}, {"selector": "exact"}):
        hold_summary_memory(with_summaries_of(4096, **more), CPU)
        assert held_for_summaries() == 0


@pytest.mark.usefixtures("_cpu_for_a_device")
def test_without_room_for_summaries_they_lie_in_dram(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):  # layers
        hold_summary_memory(with_summaries_of(TOO_MUCH), CPU)
    assert held_for_summaries() == 0
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.startswith("ssdkv: no room for 65536 TiB of sparse.hbm_summaries on cpu")
    assert entry_for(message) is not None


def test_a_cpu_has_no_other_memory_for_summaries(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        hold_summary_memory(with_summaries_of(4096), CPU)
    assert take_summary_memory() is None
    (message,) = (record.getMessage() for record in caplog.records)
    assert "no effect on a CPU" in message
    assert entry_for(message) is not None
