"""Start-up checks: what cannot be served is refused here, with the reason and the way out."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from vllm.platforms import current_platform

from vllm_ssdkv.config import SSDKVConfig
from vllm_ssdkv.connector.speculation import problems_of_page_mode
from vllm_ssdkv.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

_LOOPING = {"IQuestLoopCoderForCausalLM"}
"""Architectures that page mode's walk over a context, one layer after the other, does not fit."""

SUPPORTED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_engine(config: SSDKVConfig, vllm_config: VllmConfig) -> None:
    """Refuse engine settings that do not work with the connector.

    Raises:
        UnsupportedError: every problem found, one per line, each with its way out.
    """
    parallel = vllm_config.parallel_config
    problems = []
    if parallel.pipeline_parallel_size > 1:
        problems.append("--pipeline-parallel-size must be 1; use --tensor-parallel-size")
    if parallel.decode_context_parallel_size > 1:
        problems.append("--decode-context-parallel-size must be 1")
    if parallel.prefill_context_parallel_size > 1:
        problems.append("--prefill-context-parallel-size must be 1")
    cache = vllm_config.cache_config
    if cache.prefix_match_unit not in (None, cache.block_size):
        problems.append(
            f"--prefix-match-unit {cache.prefix_match_unit} is not the size of a block "
            f"({cache.block_size}): leave it out"
        )
    if vllm_config.kv_transfer_config.kv_role != "kv_both":
        problems.append("kv_role must be kv_both: blocks are stored and loaded by one engine")
    if config.mode == "page":
        problems += _page_mode(config, vllm_config)
    if problems:
        raise UnsupportedError(
            f"SSDKVConnector cannot start in mode {config.mode!r}:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )


def _page_mode(config: SSDKVConfig, vllm_config: VllmConfig) -> list[str]:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    reuse = 'use mode "reuse", which works with any attention'
    problems = problems_of_page_mode(config, vllm_config)
    if model.use_mla:
        problems.append(f"the model uses MLA, which page mode does not serve: {reuse}")
    if model.is_mm_prefix_lm:
        problems.append(
            "tokens of an image attend to those behind them, which page mode does not compute: "
            f"start with --language-model-only, or {reuse}"
        )
    looping = sorted(_LOOPING & set(model.architectures))
    if looping:
        problems.append(f"{looping[0]} attends to a layer's KV several times in a step: {reuse}")
    if model.is_hybrid or model.is_attention_free:
        problems.append(
            f"the model has layers with a state (Mamba, linear attention) in place of KV: {reuse}"
        )
    if cache.cache_dtype != "auto":
        problems.append(
            f"--kv-cache-dtype {cache.cache_dtype} is not served in page mode: leave it out, or "
            f"{reuse}"
        )
    if model.dtype not in SUPPORTED_DTYPES:
        problems.append(f"--dtype {model.dtype} is none of float32, float16, bfloat16")
    if cache.block_size % config.page_tokens:
        problems.append(
            f"--block-size {cache.block_size} is not a multiple of page_tokens "
            f"({config.page_tokens}): change one of them"
        )
    if vllm_config.parallel_config.use_ubatching:
        problems.append("steps are cut into micro-batches: leave out --enable-dbo, --ubatch-size")
    if not current_platform.is_cpu():
        logger.warning(
            "ssdkv: mode page on CUDA was tested in Triton's interpreter only, and never on a GPU: "
            "compare some answers with those of vLLM alone"
        )
    if config.window_tokens < cache.block_size:
        problems.append(
            f"hbm_window_tokens ({config.window_tokens}) is smaller than a block "
            f"({cache.block_size} tokens): raise it, or lower --block-size"
        )
    return problems
