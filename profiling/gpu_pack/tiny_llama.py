"""A tiny Llama with random weights, as a folder that vLLM loads like any other model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Final

import torch

_LAYERS: Final = 2
_HIDDEN: Final = 256
_HEADS: Final = 4
_KV_HEADS: Final = 2
_HEAD: Final = 64
_VOCABULARY: Final = 512

_CONFIG: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": _HIDDEN,
    "intermediate_size": 2 * _HIDDEN,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KV_HEADS,
    "head_dim": _HEAD,
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "dtype": "float32",
}

_GAINS: Final = {"q_proj": 1.6, "k_proj": 1.6, "v_proj": 2.0, "o_proj": 2.0, "lm_head": 3.0}
"""Standard deviation of outputs for inputs of unit variance. Scores have one of about 2.5, so that
attention spreads over some dozens of tokens and KV that is wrong changes the answer."""


def make(folder: Path, seed: int = 0) -> Path:
    """Write configuration and weights to ``folder``, which is returned."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
    draw = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in _shapes().items():
        noise = torch.randn(shape, generator=draw)
        if len(shape) == 1:
            weights[name] = 1 + 0.1 * noise
        elif "embed" in name:
            weights[name] = noise
        else:
            gain = next((gain for part, gain in _GAINS.items() if part in name), 1.4)
            weights[name] = noise * (gain / math.sqrt(shape[1]))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _shapes() -> dict[str, tuple[int, ...]]:
    """Names of parameters, as Transformers has them, and their shapes."""
    of_layer = {
        "input_layernorm": (_HIDDEN,),
        "post_attention_layernorm": (_HIDDEN,),
        "self_attn.q_proj": (_HEADS * _HEAD, _HIDDEN),
        "self_attn.k_proj": (_KV_HEADS * _HEAD, _HIDDEN),
        "self_attn.v_proj": (_KV_HEADS * _HEAD, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, _HEADS * _HEAD),
        "mlp.gate_proj": (2 * _HIDDEN, _HIDDEN),
        "mlp.up_proj": (2 * _HIDDEN, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, 2 * _HIDDEN),
    }
    shapes: dict[str, tuple[int, ...]] = {
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(_LAYERS)
        for name, shape in of_layer.items()
    }
    shapes["model.embed_tokens.weight"] = (_VOCABULARY, _HIDDEN)
    shapes["model.norm.weight"] = (_HIDDEN,)
    shapes["lm_head.weight"] = (_VOCABULARY, _HIDDEN)
    return shapes
