"""Names by which vLLM knows this package."""

from __future__ import annotations

CONNECTOR = "SSDKVConnector"
BATCH_PLUGIN = "ssdkv_batch"
"""Adds the Batch API to `vllm serve`, which loads it only where ``VLLM_PLUGINS`` names it."""
CONNECTOR_MODULE = "vllm_ssdkv.connector.front_end"
"""Where vLLM looks the class up, and has its configuration checked by that."""
RECOMPUTE = "recompute"
"""vLLM's policy for loads that failed. A cache never ends a request: it is computed."""
CPU_BACKEND = "vllm_ssdkv.connector.attention_backend.SSDKVCPUBackend"
CUDA_BACKEND = "vllm_ssdkv.connector.attention_backend.SSDKVBackend"
