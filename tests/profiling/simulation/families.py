"""Configurations of tiny models of many families, and the KV cache that vLLM makes for them.

No engine starts and no weights are made: modules are built without memory, and asked what they
keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
)
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

from tests.connector import kinds

MOE: Final[dict[str, Any]] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
LATENT: Final[dict[str, Any]] = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
FAMILIES: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    **{name: kind for name, kind in kinds.KINDS.items() if name not in ("whisper", "looping")},
    "gemma4": (
        *("Gemma4TextConfig", "Gemma4ForCausalLM"),
        {
            "global_head_dim": 64,
            "sliding_window": 64,
            "layer_types": [*["sliding_attention"] * 3, "full_attention"],
            "num_kv_shared_layers": 0,
        },
    ),
    "opt": ("OPTConfig", "OPTForCausalLM", {"ffn_dim": 64, "word_embed_proj_dim": 64}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 64, "n_layer": 4, "n_head": 4}),
    "gpt_bigcode": (
        *("GPTBigCodeConfig", "GPTBigCodeForCausalLM"),
        {"n_embd": 64, "n_layer": 4, "n_head": 4, "multi_query": True},
    ),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"n_layer": 4, "n_head": 4}),
    "falcon": (
        "FalconConfig",
        "FalconForCausalLM",
        {"multi_query": True, "without": ("head_dim",)},
    ),
    "falcon-groups": (
        *("FalconConfig", "FalconForCausalLM"),
        {"new_decoder_architecture": True, "num_kv_heads": 2, "without": ("head_dim",)},
    ),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**MOE, "sliding_window": None}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 64}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "qwen3-moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", MOE),
    "phi": ("PhiConfig", "PhiForCausalLM", {}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"sliding_window": None}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {"num_key_value_heads": 1}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"sliding_window": 64}),
    "gpt-oss": ("GptOssConfig", "GptOssForCausalLM", {**MOE, "sliding_window": 64}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "granite": ("GraniteConfig", "GraniteForCausalLM", {}),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", {"sliding_window": None}),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", {}),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM", {"sliding_window": 64}),
    "deepseek-v3": (
        *("DeepseekV3Config", "DeepseekV3ForCausalLM"),
        {
            **LATENT,
            "q_lora_rank": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
        },
    ),
    "mamba2": (
        *("Mamba2Config", "Mamba2ForCausalLM"),
        {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 2, "expand": 2},
    ),
    "falcon-mamba": ("FalconMambaConfig", "FalconMambaForCausalLM", {"state_size": 8}),
    "jamba": (
        *("JambaConfig", "JambaForCausalLM"),
        {**MOE, "attn_layer_period": 4, "attn_layer_offset": 2, "mamba_d_state": 8},
    ),
    "granite-hybrid": (
        *("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM"),
        {
            **MOE,
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_expand": 2,
            "without": ("head_dim",),
        },
    ),
}
"""By family: class of transformers' configuration, architecture, and what differs.

Without GPT-NeoX: vLLM runs transformers' own class, and changes it for the whole process, where
other tests need it.
"""


@contextmanager
def one_rank(directory: Path, config: VllmConfig) -> Iterator[None]:
    """Groups of one process, as a worker has them; with those of experts if ``config`` has any."""
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{directory}/groups", 0, "gloo")
        initialize_model_parallel(1, 1)
        try:
            yield
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()


def make(directory: Path, family: str) -> Path:
    """Write the configuration of a model of this family; its directory."""
    return kinds.make(directory, family, FAMILIES)


def layers_of(config: VllmConfig) -> dict[str, KVCacheSpec]:
    """KV that each layer of the model keeps. Within :func:`one_rank`."""
    # The engine core asks workers for their layouts; bytes do not depend on it.
    config.cache_config.kv_cache_layout = "LBNHC"
    with set_current_vllm_config(config), torch.device("cpu"):
        initialize_model(vllm_config=config)
    modules = config.compilation_config.static_forward_context
    specs = {
        name: module.get_kv_cache_spec(config)
        for name, module in modules.items()
        if isinstance(module, AttentionLayerBase)
    }
    return {name: spec for name, spec in specs.items() if spec is not None}


def caches_of(config: VllmConfig, layers: dict[str, KVCacheSpec]) -> KVCacheConfig:
    """The KV cache of the engine."""
    return get_kv_cache_configs(config, [dict(layers)], [1 << 30])[0]
