"""Configurations of tiny models of many kinds, without weights: what a start looks at first."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import transformers
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.registry import ModelRegistry

from vllm_ssdkv.connector.names import CONNECTOR

_COMMON: Final[dict[str, Any]] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}

KINDS: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "large-heads": ("LlamaConfig", "LlamaForCausalLM", {"head_dim": 520}),
    "odd-heads": ("LlamaConfig", "LlamaForCausalLM", {"head_dim": 20}),
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {"intermediate_size_mlp": 64, "num_local_experts": 2, "attention_chunk_size": 128},
    ),
    "gemma4": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {"global_head_dim": 64, "sliding_window": 64, "num_kv_shared_layers": 0},
    ),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {"attn_logit_softcapping": 50.0}),
    "deepseek": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "q_lora_rank": None,
            "n_routed_experts": 2,
            "num_experts_per_tok": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "mamba": ("MambaConfig", "MambaForCausalLM", {"state_size": 8}),
    "qwen3-next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
        },
    ),
    "whisper": ("WhisperConfig", "WhisperForConditionalGeneration", {"d_model": 64}),
    "looping": ("LlamaConfig", "IQuestLoopCoderForCausalLM", {"loop_num": 2}),
}
"""By kind: class of transformers' configuration, architecture, and what differs. ``without``: what
of the rest is not there."""


def make(
    directory: Path, kind: str, known: Mapping[str, tuple[str, str, dict[str, Any]]] = KINDS
) -> Path:
    """Write the configuration of a model of this kind; its directory."""
    config_class, architecture, changes = known[kind]
    # In this process: vLLM would else start one to look at the model's class.
    lazy = ModelRegistry.models[architecture]
    if hasattr(lazy, "module_name"):
        module = importlib.import_module(lazy.module_name)
        ModelRegistry.register_model(architecture, getattr(module, lazy.class_name))
    path = directory / kind
    entries = {**_COMMON, **changes}
    for name in entries.pop("without", ()):
        del entries[name]
    config = getattr(transformers, config_class)(**entries)
    config.architectures = [architecture]
    config.save_pretrained(path)
    return path


def configuration(model: Path, **arguments: Any) -> VllmConfig:  # noqa: ANN401 - options of vLLM
    """vLLM's configuration for that model, which our connector is put into afterwards: vLLM would
    else have it refused."""
    given = {"dtype": "float32", "block_size": 32, "max_model_len": 256, **arguments}
    args = EngineArgs(model=str(model), skip_tokenizer_init=True, enforce_eager=True, **given)
    config = args.create_engine_config()
    config.kv_transfer_config = KVTransferConfig(kv_connector=CONNECTOR, kv_role="kv_both")
    return config
