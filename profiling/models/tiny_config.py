"""Configurations of tiny models: those of transformers, with smaller sizes by their names."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

LAYERS: Final = 4
HEADS: Final = 4
KV_HEADS: Final = 2
HEAD: Final = 32
HIDDEN: Final = HEADS * HEAD
VOCABULARY: Final = 512
EXPERTS: Final = 4
POSITIONS: Final = 8192

_SMALL: Final[Mapping[str, int]] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd"), HIDDEN),
    **dict.fromkeys(
        (
            *("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "feed_forward_length"),
            *("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"),
            *("intermediate_size_mlp", "shared_intermediate_size", "block_ff_dim"),
            *("moe_shared_expert_intermediate_size", "moe_latent_size"),
        ),
        HIDDEN,
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), KV_HEADS),
    **dict.fromkeys(("head_dim", "attention_head_dim", "swa_head_dim"), HEAD),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), POSITIONS),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS
    ),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "sliding_window": 64,
    # Latent attention: vLLM's CPU backend knows heads of 512 + 64 channels.
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": HEAD,
    "v_head_dim": HEAD,
    "q_lora_rank": HIDDEN,
    # Layers with a state.
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), HIDDEN * 2 // 8),
    "mamba_d_ssm": HIDDEN * 2,
    **dict.fromkeys(("linear_num_key_heads",), 2),
    **dict.fromkeys(("linear_num_value_heads",), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), HEAD),
    **dict.fromkeys(("bos_token_id",), 0),
    **dict.fromkeys(("eos_token_id",), 1),
    **dict.fromkeys(("pad_token_id",), 2),
}
"""Sizes by the names that configurations give them."""


def family_of(architecture: str) -> str:
    """Type of a model's configuration in transformers; empty where that has no such model."""
    import transformers

    config_class = getattr(getattr(transformers, architecture, None), "config_class", None)
    return str(getattr(config_class, "model_type", ""))


def make_tiny(architecture: str, folder: Path) -> None:
    """Write the configuration of a tiny model of this architecture into ``folder``.

    Raises:
        ValueError: its sizes cannot be made to fit.
    """
    import transformers
    from vllm.model_executor.models.registry import ModelRegistry

    config_class: Any = getattr(transformers, architecture).config_class
    # In this process: vLLM would else start one to look at the model's class.
    lazy = ModelRegistry.models[architecture]
    if hasattr(lazy, "module_name"):
        module = importlib.import_module(lazy.module_name)
        ModelRegistry.register_model(architecture, getattr(module, lazy.class_name))
    config = config_class(**small_entries(config_class))
    config.architectures = [architecture]
    config.save_pretrained(folder)


def small_entries(config_class: Any) -> dict[str, Any]:  # noqa: ANN401 - a class of transformers
    """Entries of a tiny model's configuration: those of the default one that are sizes."""
    known = set(inspect.signature(config_class).parameters) | set(config_class().to_dict())
    return {name: size for name, size in _SMALL.items() if name in known}
