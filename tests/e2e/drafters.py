"""Small drafters for speculative decoding, beside the models that they draft for."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"
DRAFTS = 3


def draft_model(model: Path, path: Path, noise: float = 0.05) -> dict[str, Any]:
    """The same model with noise in its weights, which is right now and then, as an option of
    vLLM."""
    shutil.copytree(model, path)
    weights = load_file(path / WEIGHTS)
    generator = torch.Generator().manual_seed(1)
    for name in sorted(weights):
        weight = weights[name]
        blur = torch.randn(weight.shape, generator=generator) * weight.std()
        weights[name] = weight + noise * blur
    save_file(weights, path / WEIGHTS, metadata={"format": "pt"})
    return _option(path, "draft_model")


def eagle(model: Path, path: Path) -> dict[str, Any]:
    """An EAGLE head of one layer, hardly ever right, as an option of vLLM: what it drafts depends
    on hidden states of the model and on its own KV."""
    path.mkdir()
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    first = "model.layers.0."
    weights = {
        name.removeprefix("model."): weight.clone()
        for name, weight in load_file(model / WEIGHTS).items()
        if name.startswith(first) and "input_layernorm" not in name
    }
    width = config["hidden_size"]
    generator = torch.Generator().manual_seed(3)
    joined = torch.randn(width, 2 * width, generator=generator)
    weights["fc.weight"] = joined / math.sqrt(2 * width)
    save_file(weights, path / WEIGHTS, metadata={"format": "pt"})
    return _option(path, "eagle")


def ngram() -> dict[str, Any]:
    """Drafts from the prompt itself, without KV of its own."""
    return {
        "method": "ngram",
        "num_speculative_tokens": DRAFTS,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }


def _option(path: Path, method: str) -> dict[str, Any]:
    return {"model": str(path), "method": method, "num_speculative_tokens": DRAFTS}
