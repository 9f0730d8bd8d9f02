"""vLLM's own connector, its scheduler's half, with the tier: who calls us, with what in sight."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.request import Request

from tests.secondary_tier.rig import BLOCK_TOKENS, STEP_END, tier_entry
from vllm_ssdkv.node.server.daemon import Node
from vllm_ssdkv.secondary_tier.tier import SSDKVTier

Devices = Callable[[int], list[Path]]

BLOCKS = 4
SPEC = FullAttentionSpec(BLOCK_TOKENS, num_kv_heads=2, head_size=64, dtype=torch.float32)


@contextmanager
def connected(
    settings: VllmConfig, *devices: Path, **options: object
) -> Iterator[OffloadingConnector]:
    config = copy(settings)
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 1 << 20,
            "secondary_tiers": [tier_entry(devices, **options)],
        },
    )
    groups = [KVCacheGroupSpec(["layer.0"], SPEC)]
    connector = OffloadingConnector(config, KVConnectorRole.SCHEDULER, KVCacheConfig(8, [], groups))
    yield connector
    connector.shutdown()


def tier_of(connector: OffloadingConnector) -> SSDKVTier:
    manager: Any = connector.scheduler.manager
    (tier,) = manager.secondary_tiers
    assert isinstance(tier, SSDKVTier)
    return tier


def arrive(
    connector: OffloadingConnector, name: str, adapter: LoRARequest | None = None
) -> tuple[Request, ReqContext]:
    init_none_hash(sha256)
    tokens = list(range(BLOCKS * BLOCK_TOKENS + 1))
    request = Request(
        name,
        tokens,
        SamplingParams(),
        None,
        lora_request=adapter,
        block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
    )
    connector.on_new_request(request)
    context: ReqContext = connector.scheduler._req_status[name].req_context
    return request, context


def compute(connector: OffloadingConnector, name: str, context: ReqContext) -> list[OffloadKey]:
    """Have a request's blocks stored."""
    (state,) = connector.scheduler._req_status[name].group_states
    keys: list[OffloadKey] = state.offload_keys
    assert len(keys) == BLOCKS
    manager: Any = connector.scheduler.manager
    manager.prepare_store(keys, context)
    manager.complete_store(keys, context)
    while manager.has_pending_work():
        manager.on_schedule_end(STEP_END)
    return keys


def stored_blocks(connector: OffloadingConnector, request: Request) -> int:
    """Blocks of a request that vLLM finds, in its pool or loads for it."""
    while (found := connector.get_num_new_matched_tokens(request, 0)[0]) is None:
        connector.scheduler.manager.on_schedule_end(STEP_END)
    return int(found) // BLOCK_TOKENS


def test_a_request_finds_what_another_engine_has_stored(
    settings: VllmConfig, tmp_devices: Devices
) -> None:
    (device,) = tmp_devices(1)
    french = LoRARequest("french", 1, "/adapters/french")
    with connected(settings, device) as connector:
        request, context = arrive(connector, "first")
        assert stored_blocks(connector, request) == 0
        keys = compute(connector, "first", context)
        positions = [context.get_offload_key_position(key) for key in keys]
        assert positions == [(n + 1) * BLOCK_TOKENS for n in range(BLOCKS)]
        # vLLM's keys have the adapter's name; the tier does not know what is behind it.
        _, other = arrive(connector, "second", french)
        tier = tier_of(connector)
        assert [tier.lookup(key, other).name for key in keys] == ["MISS"] * BLOCKS
        assert [tier.lookup(key, context).name for key in keys] == ["HIT"] * BLOCKS
    with connected(settings, device) as connector:
        request, _ = arrive(connector, "third")
        assert stored_blocks(connector, request) == BLOCKS


@pytest.mark.usefixtures("patient")
def test_a_request_finds_what_another_engine_stores_on_their_node(
    settings: VllmConfig, start_node: Callable[..., Node]
) -> None:
    nodes = [str(start_node().addresses[0])]
    with connected(settings, nodes=nodes) as one, connected(settings, nodes=nodes) as other:
        request, context = arrive(one, "first")
        assert stored_blocks(one, request) == 0
        waiting, _ = arrive(other, "second")
        for _ in range(20):
            assert other.get_num_new_matched_tokens(waiting, 0)[0] is None
            other.scheduler.manager.on_schedule_end(STEP_END)
            time.sleep(0.005)
        compute(one, "first", context)
        assert stored_blocks(other, waiting) == BLOCKS
        assert tier_of(other).chunks.counters.total("prefix_waits", end="served") == 1
