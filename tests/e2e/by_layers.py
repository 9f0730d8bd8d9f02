"""For vLLM's option ``worker_extension_cls``; ``LLM.collective_rpc("copy_by_layers")`` asks."""

from __future__ import annotations

from vllm.distributed.kv_transfer import get_kv_transfer_group


class ByLayers:
    """A worker of vLLM whose blocks are copied layer by layer, however small they are."""

    def copy_by_layers(self) -> None:
        """From the next step on."""
        get_kv_transfer_group().worker.layers.least_bytes = 1
