"""Names by which vLLM knows this package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CONNECTOR = "SSDKVConnector"
BATCH_PLUGIN = "ssdkv_batch"
"""Adds the Batch API to `vllm serve`, which loads it only where ``VLLM_PLUGINS`` names it."""
CONNECTOR_MODULE = "vllm_ssdkv.connector.front_end"
"""Module in which vLLM looks the class up, and by which it checks its configuration."""
OFFLOADING = "OffloadingConnector"
"""vLLM's own connector, which has secondary tiers."""
RECOMPUTE = "recompute"
"""vLLM's policy for loads that failed. A cache never ends a request: it is computed."""
CPU_BACKEND = "vllm_ssdkv.connector.attention_backend.SSDKVCPUBackend"
CUDA_BACKEND = "vllm_ssdkv.connector.attention_backend.SSDKVBackend"
PIECEWISE_FLAG = """--compilation-config '{"cudagraph_mode": "PIECEWISE"}'"""
"""vLLM's flag for CUDA graphs that end where attention begins."""


def transfer_config(options: Mapping[str, Any]) -> dict[str, Any]:
    """Value of ``--kv-transfer-config`` for an engine with these options of ours."""
    return {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        "kv_connector_extra_config": dict(options),
    }
