"""vLLM entry point: registers connector, attention backends and KV cache spec.

Before that it has a look at vLLM's command line: wrong options end the first process at once. And
it has torch tell which module holds which, from which the model is found later.

vLLM calls :func:`register` in the front end, the engine core and every worker, some of them more
than once, and logs an exception instead of raising it: the connector's start-up checks that it
worked.
"""

from __future__ import annotations

import sys

from vllm_ssdkv.connector.names import CONNECTOR, CONNECTOR_MODULE, CPU_BACKEND, CUDA_BACKEND


def register() -> None:
    """Make vLLM know this package, in this process. Idempotent.

    Raises:
        SystemExit: vLLM's command line has options of ours that are wrong.
    """
    from vllm_ssdkv.connector.front_end import check_command_line

    check_command_line(sys.argv[1:])
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, CONNECTOR_MODULE, CONNECTOR)
    register_backend(AttentionBackendEnum.CPU_ATTN, CPU_BACKEND)
    register_backend(AttentionBackendEnum.CUSTOM, CUDA_BACKEND)
    from vllm_ssdkv.connector.identity.module_tree import TREE
    from vllm_ssdkv.connector.kv_cache_spec import register_spec

    register_spec()
    TREE.install()
