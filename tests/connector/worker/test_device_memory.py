"""Memory of the device that attends, when there is not enough of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.messages import entry_for
from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.connector.worker.device_memory import channel_memory, hot_memory
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.memory.device_memory import DeviceMemory

LAYOUT = BlockLayout(32, 16, 2, 64, 4096, torch.bfloat16)
GEOMETRY = SlotGeometry("paged", 2, 2, 2, 4096)
CPU = torch.device("cpu")
TOO_MUCH = 1 << 56


@pytest.mark.parametrize(
    ("take", "option"),
    [
        (lambda: hot_memory(TOO_MUCH, LAYOUT, GEOMETRY, CPU), "sparse.hbm_pages"),
        (
            lambda: channel_memory(TOO_MUCH // 4096, LAYOUT, GEOMETRY, CPU),
            'sparse.channel_pages "hbm"',
        ),
    ],
)
def test_too_much_is_a_clear_error(take: Callable[[], DeviceMemory], option: str) -> None:
    with pytest.raises(ConfigError, match=f"no room for .* of {option} on cpu") as caught:
        take()
    assert "--gpu-memory-utilization" in str(caught.value)
    assert entry_for(str(caught.value)) is not None
