"""vLLM entry point: registers connector, attention backends and KV cache spec, and has torch tell
which module holds which. Nothing else.

vLLM calls :func:`register` in the front end, the engine core and every worker, some of them more
than once, and logs an exception instead of raising it: the connector's start-up checks that it
worked.
"""

from __future__ import annotations

CONNECTOR = "SSDKVConnector"
CONNECTOR_MODULE = "vllm_ssdkv.connector.connector"
CPU_BACKEND = "vllm_ssdkv.attention.backend.SSDKVCPUBackend"
CUDA_BACKEND = "vllm_ssdkv.attention.backend.SSDKVBackend"


def register() -> None:
    """Make vLLM know this package, in this process. Idempotent."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, CONNECTOR_MODULE, CONNECTOR)
    register_backend(AttentionBackendEnum.CPU_ATTN, CPU_BACKEND)
    register_backend(AttentionBackendEnum.CUSTOM, CUDA_BACKEND)
    from vllm_ssdkv.connector.cache_spec import register_spec
    from vllm_ssdkv.connector.module_tree import TREE

    register_spec()
    TREE.install()
