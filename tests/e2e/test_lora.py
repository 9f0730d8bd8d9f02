"""Adapters: KV of an adapter serves that adapter's weights only, whatever its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from tests.e2e.engine import Engine
from tests.e2e.models import prompts
from tests.e2e.workload import kv_tokens, page_mode, reuse_mode

RANK = 8
PROMPT = prompts((700,), seed=12)[0]
HIT = (len(PROMPT) - 1) // 32 * 32


def make_adapter(model: Path, path: Path, seed: int) -> Path:
    """A random adapter for the query and value projections, loud enough to change answers."""
    config = json.loads((model / "config.json").read_text())
    heads, head_dim = config["num_attention_heads"], config["head_dim"]
    outputs = {
        "q_proj": heads * head_dim,
        "v_proj": config["num_key_value_heads"] * head_dim,
    }
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in outputs.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            hidden = config["hidden_size"]
            down = torch.randn(RANK, hidden, generator=generator) / hidden**0.5
            up = torch.randn(size, RANK, generator=generator) / RANK**0.5
            weights[f"{prefix}.lora_A.weight"], weights[f"{prefix}.lora_B.weight"] = down, up
    path.mkdir()
    save_file(weights, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "r": RANK,
                "lora_alpha": RANK,
                "target_modules": list(outputs),
                "bias": "none",
                "base_model_name_or_path": str(model),
            }
        )
    )
    return path


@pytest.mark.parametrize("mode", ["reuse", "page"])
def test_adapters_do_not_share_kv(
    mode: str,
    models: dict[str, Path],
    devices: Callable[..., list[dict[str, str]]],
    tmp_path: Path,
) -> None:
    adapters = {
        seed: make_adapter(models["llama"], tmp_path / f"adapter{seed}", seed) for seed in (1, 2)
    }
    one, two = (LoRARequest("helpful", i, str(path)) for i, path in adapters.items())
    options = {
        "max_num_batched_tokens": 256,
        "enable_lora": True,
        "max_loras": 2,
        "max_lora_rank": RANK,
        "enable_prefix_caching": False,
    }
    kinds = (None, one, two)
    with Engine(models["llama"], kv_tokens=8192, **options) as engine:
        wanted = [engine.answers([PROMPT], lora=kind)[0].tokens for kind in kinds]
    assert len(set(wanted)) == len(kinds)

    place = devices()
    store = reuse_mode(place) if mode == "reuse" else page_mode(place)
    size = 8192 if mode == "reuse" else kv_tokens(128, 256)
    with Engine(models["llama"], ssdkv=store, kv_tokens=size, **options) as engine:
        for cached in (0, HIT):
            got = [engine.answers([PROMPT], lora=kind)[0] for kind in kinds]
            assert [a.tokens for a in got] == wanted
            assert [a.cached for a in got] == [cached] * len(kinds)
