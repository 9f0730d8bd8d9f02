"""Llamas with random weights as folders that vLLM loads like any other model."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int

    def token_bytes(self, width: int) -> int:
        """Bytes of KV of a token, whose numbers have ``width`` bytes each."""
        return self.layers * self.kv_heads * self.head * 2 * width

    def describe(self, folder: Path) -> Path:
        """Write the configuration alone to ``folder``, which is returned: vLLM makes weights up."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 131072,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
            "dtype": "float32",
        }
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return folder


TINY: Final = Shape(2, 256, 512, 4, 2, 64, 512)
LLAMA_8B: Final = Shape(4, 4096, 14336, 32, 8, 128, 128256)
"""Shape of Llama 8B with 4 of its 32 layers."""

_GAINS: Final = {"q_proj": 1.6, "k_proj": 1.6, "v_proj": 2.0, "o_proj": 2.0, "lm_head": 3.0}
"""Standard deviation of outputs for inputs of unit variance. Scores have one of about 2.5, so that
attention spreads over some dozens of tokens and KV that is wrong changes the answer."""


def make_tiny(folder: Path, seed: int = 0) -> Path:
    """Write the tiny model with weights to ``folder``, which is returned."""
    from safetensors.torch import save_file

    TINY.describe(folder)
    draw = torch.Generator().manual_seed(seed)
    weights = {}
    for name, size in _parameters(TINY).items():
        noise = torch.randn(size, generator=draw)
        if len(size) == 1:
            weights[name] = 1 + 0.1 * noise
        elif "embed" in name:
            weights[name] = noise
        else:
            gain = next((gain for part, gain in _GAINS.items() if part in name), 1.4)
            weights[name] = noise * (gain / math.sqrt(size[1]))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _parameters(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Names of parameters, as Transformers has them, and their shapes."""
    of_layer = {
        "input_layernorm": (shape.hidden,),
        "post_attention_layernorm": (shape.hidden,),
        "self_attn.q_proj": (shape.heads * shape.head, shape.hidden),
        "self_attn.k_proj": (shape.kv_heads * shape.head, shape.hidden),
        "self_attn.v_proj": (shape.kv_heads * shape.head, shape.hidden),
        "self_attn.o_proj": (shape.hidden, shape.heads * shape.head),
        "mlp.gate_proj": (shape.intermediate, shape.hidden),
        "mlp.up_proj": (shape.intermediate, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.intermediate),
    }
    made: dict[str, tuple[int, ...]] = {
        f"model.layers.{layer}.{name}.weight": size
        for layer in range(shape.layers)
        for name, size in of_layer.items()
    }
    made["model.embed_tokens.weight"] = (shape.vocabulary, shape.hidden)
    made["model.norm.weight"] = (shape.hidden,)
    made["lm_head.weight"] = (shape.vocabulary, shape.hidden)
    return made
