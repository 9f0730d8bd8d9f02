"""Models of the harness: configurations, random weights made on the device, no download."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
)

from vllm_ssdkv.connector.identity.module_tree import TREE

SPREAD: Final = 0.3
"""Standard deviation of the small models' weights. With the usual 0.02 nothing but the last token
would count, and every attention would give the same tokens."""


def small_config(family: str, *, layers: int = 2, head_size: int = 16) -> PretrainedConfig:
    """A small model's configuration; ``family`` is ``llama``, ``qwen3`` or ``gpt_neox``.

    4 query heads; of KV heads 2, and 4 in GPT-NeoX, which has no grouped queries.
    """
    common: dict[str, Any] = {
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "hidden_size": 4 * head_size,
        "intermediate_size": 8 * head_size,
        "vocab_size": 256,
        "max_position_embeddings": 8192,
        "initializer_range": SPREAD,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    if family == "gpt_neox":
        return GPTNeoXConfig(**common)
    common |= {"num_key_value_heads": 2, "head_dim": head_size}
    return {"llama": LlamaConfig, "qwen3": Qwen3Config}[family](**common)


def llama_8b_config(layers: int = 32) -> PretrainedConfig:
    """Shape of Llama 3 8B."""
    return LlamaConfig(
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        hidden_size=4096,
        intermediate_size=14336,
        vocab_size=128256,
        max_position_embeddings=131072 + 4096,
        rope_theta=500000.0,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
    )


def make_model(
    config: PretrainedConfig, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> torch.nn.Module:
    """A causal language model with random weights, made on the device, for inference."""
    TREE.install()
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    made: torch.nn.Module = model.to(device).eval().requires_grad_(False)
    return made


def kv_heads(config: PretrainedConfig) -> int:
    """KV heads of each layer."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def head_size(config: PretrainedConfig) -> int:
    """Channels of a head."""
    given = getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)


def kv_bytes_per_token(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """K and V of one token, all layers."""
    layers = int(config.num_hidden_layers)
    return 2 * layers * kv_heads(config) * head_size(config) * dtype.itemsize


@contextmanager
def first_layers(model: Any, layers: int) -> Iterator[None]:  # noqa: ANN401 - transformers' model
    """Run only the first ``layers`` of a Llama model inside the block."""
    whole = model.config.num_hidden_layers
    model.config.num_hidden_layers = layers
    try:
        yield
    finally:
        model.config.num_hidden_layers = whole
