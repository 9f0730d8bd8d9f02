"""Engines whose decode steps in page mode can be one CUDA graph, and the tables of these.

vLLM decides at the start, by the configuration alone, and nobody can veto a graph for one step
(vLLM 0.32). So an engine has full graphs only if they serve every row that there can be.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

import torch

from vllm_ssdkv.base.errors import UnsupportedError
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.connector.names import PIECEWISE_FLAG
from vllm_ssdkv.kernels.operands.block_layout import FLOAT8

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_ssdkv.connector.kv_layout import KVLayout
    from vllm_ssdkv.connector.worker.page_mode import ContextLayers
    from vllm_ssdkv.connector.worker.worker import SSDKVWorker

logger = logging.getLogger(__name__)


def config_reason(config: SSDKVConfig) -> str:
    """Reason for which no step can be captured, as far as the options tell; empty: there is
    none."""
    sparse, selector = config.sparse, config.selector
    if config.offload is not None:
        return "contexts are attended to, or projected, between layers (offload)"
    if config.nodes:
        return "contexts lie on nodes (nodes)"
    if selector == "exact":
        return ""
    if sparse.reuse_steps > 1:
        return "what rows choose depends on steps before (sparse.reuse_steps)"
    if sparse.dense_layers:
        return "what rows choose depends on the layer (sparse.dense_layers)"
    scorer = config.scorer if selector == "adaptive" else selector
    if scorer not in ("window", "bounds", "spread", "codes"):
        return f"the host takes part in the choice of the selector {selector}, scorer {scorer}"
    if scorer == "spread" and sparse.estimate_rest:
        return "the host adds means of V (sparse.estimate_rest)"
    return ""


def piecewise_reason(config: SSDKVConfig, layout: KVLayout, layers: ContextLayers) -> str:
    """Reason for which no step of a rank can be captured; empty: there is none."""
    if reason := config_reason(config):
        return reason
    if not layers.plain:
        return "some layers have attention sinks, or logits that are no plain products"
    if layout.dtype in FLOAT8:
        return "K and V are stored in 8 bits"
    if list(layers.numbers) != list(range(layout.geometry.layers)):
        return "some layers attend to a window alone"
    return ""


def engine_reason(vllm_config: VllmConfig, worker: SSDKVWorker) -> str:
    """Reason for which vLLM must not capture whole steps of this rank; empty: there is none."""
    from vllm_ssdkv.connector.model_layout import context_layers, logits_are_plain
    from vllm_ssdkv.connector.worker.page_mode import ContextLayers

    config, layout = worker.config, worker.layout
    plain = logits_are_plain(vllm_config, layout)
    layers = ContextLayers(context_layers(vllm_config, layout), plain=plain)
    if reason := piecewise_reason(config, layout, layers):
        return reason
    if vllm_config.model_config.enable_cumem_allocator:
        return "tables in HBM lose their content while an engine sleeps (--enable-sleep-mode)"
    needed, there = most_blocks(vllm_config, layout.block_tokens), worker.least_frames
    if there >= needed or worker.least_chosen >= needed:
        return ""
    chosen = f", and the pages chosen from {worker.least_chosen}" if worker.least_chosen else ""
    return (
        f"DRAM may hold {there} blocks of contexts{chosen}, and running requests can have {needed} "
        "(raise dram_gib, or lower --max-num-seqs, --max-model-len or sparse.page_cache)"
    )


def most_blocks(vllm_config: VllmConfig, block_tokens: int) -> int:
    """Blocks of all requests that vLLM may run at a time, each of the greatest length."""
    longest = int(vllm_config.model_config.max_model_len) // block_tokens + 1
    return int(vllm_config.scheduler_config.max_num_seqs) * longest


@functools.cache
def tell(reason: str) -> None:
    """Say once why graphs end where a layer's attention begins."""
    logger.info("ssdkv: CUDA graphs do not hold attention (mode PIECEWISE): %s", reason)


def attach(vllm_config: VllmConfig, worker: SSDKVWorker, caches: list[torch.Tensor]) -> None:
    """Take the memory for whole steps, which vLLM is about to capture.

    ``caches``: of the rank's layers, in HBM.

    Raises:
        UnsupportedError: vLLM captures what kernels do not serve, or there is no memory.
    """
    from vllm_ssdkv.connector.worker.device_decode import DeviceDecode

    paged = worker.page_mode
    strides = {paged.flat(cache).stride(0) for cache in caches}
    reason = engine_reason(vllm_config, worker)
    if not reason and len(strides) > 1:
        reason = "the blocks of some layers in HBM are further apart than those of others"
    if reason:
        raise UnsupportedError(
            f"vLLM would capture whole steps of page mode, and {reason}: start with "
            f"{PIECEWISE_FLAG}"
        )
    rows = int(vllm_config.scheduler_config.max_num_seqs)
    blocks = vllm_config.model_config.max_model_len // paged.layout.block_tokens + 1
    cuda: type = torch.cuda.Event
    try:
        paged.device = DeviceDecode(paged, rows, blocks, strides.pop(), caches[0].device, cuda)
    except RuntimeError as error:  # CUDA's out of memory is one
        where = caches[0].device
        raise UnsupportedError(
            f"no room on {where} for the tables of {rows} rows of {blocks} blocks beside the "
            "model and vLLM's KV cache: lower --gpu-memory-utilization, --max-num-seqs or "
            f"--max-model-len, or start with {PIECEWISE_FLAG} ({str(error).splitlines()[0]})"
        ) from error
    logger.info("ssdkv: CUDA graphs hold whole decode steps of up to %d rows", rows)
