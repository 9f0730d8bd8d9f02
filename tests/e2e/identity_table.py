"""Ways to change the KV of a prompt, and ways not to: one table for every test of identity.

A case is two starts of an engine. Between them files may be replaced, so the second is made when
the first has run.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import torch
import vllm
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers import rotary_embedding

from tests.e2e.models import make_blip2, make_llama, make_longrope

RANK = 8
_ENDS = 64 * 1024


class Running(Protocol):
    """An engine, or as much of one as an identity needs."""

    def add_adapter(self, adapter: LoRARequest) -> None:
        """Load an adapter, as ``--lora-modules`` does."""

    def reload(self, weights: Path) -> None:
        """Load other weights, then reset vLLM's own prefix cache."""


@dataclass(frozen=True)
class Start:
    """One life of an engine.

    Attributes:
        model: Directory, as ``--model`` names it.
        options: Of the engine.
        adapter: For its requests.
        image: Whether its request has an image.
        version: In place of vLLM's.
        within: Happens in the engine before its first request.
    """

    model: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    adapter: LoRARequest | None = None
    image: bool = False
    version: str = ""
    within: Callable[[Running], object] = lambda running: None

    def given(self, **options: object) -> Start:
        """The same with more options."""
        return replace(self, options={**self.options, **options})


@contextmanager
def as_in_a_new_process(start: Start) -> Iterator[None]:
    """vLLM of the start's version, without tables of positions that were made for other starts."""
    version = start.version or vllm.__version__
    with (
        patch.object(vllm, "__version__", version),
        patch.object(rotary_embedding, "_ROPE_DICT", {}),
    ):
        yield


@dataclass(frozen=True)
class Case:
    """A way to change KV, or not to.

    Attributes:
        name: In a few words.
        changes: Whether the KV of the second start is other KV.
        start: Makes the first start, in an empty directory.
        then: Makes the second one, when the first has run.
    """

    name: str
    changes: bool
    start: Callable[[Path], Start]
    then: Callable[[Start], Start]


def llama(root: Path) -> Start:
    return Start(make_llama(root / "model"))


def longrope(root: Path) -> Start:
    return Start(make_longrope(root / "model"), {"max_model_len": 1024})


def with_image(root: Path) -> Start:
    return Start(make_blip2(root / "model"), image=True)


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file in place."""
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


# ---- weights ----


def in_the_middle(start: Start) -> Start:
    """Tensors are replaced where a look at size, times and both ends of the file sees nothing."""
    file = start.model / "model.safetensors"
    before, ends = file.stat(), _ends(file)
    weights = load_file(file)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    generator = torch.Generator().manual_seed(7)
    for name, tensor in weights.items():
        if "layers.1.mlp" in name:
            weights[name] = torch.randn(tensor.shape, generator=generator) * tensor.std()
    save_file(weights, file, metadata)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert _ends(file) == ends
    return start


def _ends(file: Path) -> tuple[bytes, bytes]:
    content = file.read_bytes()
    return content[:_ENDS], content[-_ENDS:]


def reloaded(root: Path) -> Start:
    other = make_llama(root / "other", seed=5)
    return replace(llama(root), within=lambda running: running.reload(other))


def quantised(start: Start) -> Start:
    """Make weights int8, with a scale for each output channel; activations are made so, too."""
    file = start.model / "model.safetensors"
    weights = load_file(file)
    for name in [name for name in weights if "_proj" in name]:
        weight = weights[name]
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        weights[name] = (weight / scale).round().to(torch.int8)
        weights[f"{name}_scale"] = scale
    save_file(weights, file, {"format": "pt"})
    number = {"num_bits": 8, "type": "int", "symmetric": True}
    groups = {
        "targets": ["Linear"],
        "weights": {**number, "strategy": "channel", "dynamic": False},
        "input_activations": {**number, "strategy": "token", "dynamic": True},
    }
    settings = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": groups},
    }
    edit(start.model / "config.json", lambda config: config.update(quantization_config=settings))
    return start


def in_shards(start: Start) -> Start:
    """Move the weights into two files."""
    file = start.model / "model.safetensors"
    weights = load_file(file)
    names = sorted(weights)
    places = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        shard = f"model-0000{number}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, start.model / shard, {"format": "pt"})
        places |= dict.fromkeys(part, shard)
    index = {"metadata": {}, "weight_map": places}
    (start.model / "model.safetensors.index.json").write_text(json.dumps(index))
    file.unlink()
    return start


# ---- adapters ----


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


def with_adapter(root: Path) -> Start:
    start = llama(root).given(enable_lora=True, max_loras=2, max_lora_rank=RANK)
    path = make_adapter(start.model, root / "adapter", seed=1)
    return replace(start, adapter=LoRARequest("helpful", 1, str(path)))


def replaced_before_its_first_request(root: Path) -> Start:
    start = with_adapter(root)
    adapter = start.adapter
    assert adapter is not None

    def within(running: Running) -> None:
        running.add_adapter(adapter)
        other_adapter(start)

    return replace(start, within=within)


def other_adapter(start: Start) -> Start:
    """Put another adapter in the place of the first."""
    assert start.adapter is not None
    path = Path(start.adapter.lora_path)
    shutil.rmtree(path)
    make_adapter(start.model, path, seed=2)
    return start


def renamed_adapter(start: Start) -> Start:
    assert start.adapter is not None
    path = Path(start.adapter.lora_path)
    elsewhere = path.rename(path.with_name("elsewhere"))
    adapter = LoRARequest("kind", 2, str(elsewhere))
    # As --lora-modules does: the first request for an adapter that vLLM loads for it finds nothing.
    return replace(start, adapter=adapter, within=lambda running: running.add_adapter(adapter))


# ---- settings ----


def edited_config(start: Start) -> Start:
    edit(start.model / "config.json", lambda config: config.update(rms_norm_eps=0.1))
    return start


def other_images(start: Start) -> Start:
    file = start.model / "preprocessor_config.json"
    edit(file, lambda settings: settings.update(image_mean=[0.1, 0.9, 0.2]))
    return start


def configured_elsewhere(root: Path) -> Start:
    """``config.json``, and processors that nobody reads, in another directory."""
    start = with_image(root)
    elsewhere = root / "elsewhere"
    elsewhere.mkdir()
    for name in ("config.json", "preprocessor_config.json"):
        shutil.copy(start.model / name, elsewhere)
    return start.given(hf_config_path=str(elsewhere))


def overridden(eps: float) -> Callable[[PreTrainedConfig], PreTrainedConfig]:
    """Overrides by a function, which has the same name whatever it does."""

    def override(config: PreTrainedConfig) -> PreTrainedConfig:
        config.rms_norm_eps = eps
        return config

    return override


def saved_again(start: Start) -> Start:
    """Save ``config.json`` as another version of transformers does."""
    added = {
        "output_attentions": False,
        "return_dict": True,
    }

    def change(config: dict[str, Any]) -> None:
        for name in ("attention_bias", "attention_dropout", "mlp_bias", "pretraining_tp"):
            del config[name]  # defaults
        config.update({**added, "transformers_version": "4.40.0", "torch_dtype": "float32"})
        reverse = dict(reversed(config.items()))
        config.clear()
        config.update(reverse)

    edit(start.model / "config.json", change)
    return start


def other_texts(start: Start) -> Start:
    """Change files that say how to sample and to write text, not which tokens there are."""
    GenerationConfig(do_sample=True, temperature=0.3, top_k=7).save_pretrained(start.model)
    tokenizer = AutoTokenizer.from_pretrained(start.model)
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(start.model)
    return start


# ---- places ----


def moved(start: Start) -> Start:
    """Give the directory another name, and its weights other files."""
    return in_shards(replace(start, model=start.model.rename(start.model.with_name("renamed"))))


def linked_copy(start: Start) -> Start:
    copy = Path(shutil.copytree(start.model, start.model.with_name("copy")))
    link = start.model.with_name("link")
    link.symlink_to(copy)
    return replace(start, model=link)


def copied(start: Start) -> Start:
    copy = Path(shutil.copytree(start.model, start.model.with_name("copy")))
    return replace(start, model=copy)


CASES = (
    Case("tensors in the middle of the file", True, llama, in_the_middle),
    Case(
        "dummy weights, then real ones",
        True,
        lambda root: llama(root).given(load_format="dummy"),
        lambda start: Start(start.model),
    ),
    Case("LongRoPE, longer", True, longrope, lambda start: start.given(max_model_len=2048)),
    Case(
        "adapter replaced before its first request",
        True,
        replaced_before_its_first_request,
        lambda start: replace(start, within=Start.within),
    ),
    Case("adapter replaced", True, with_adapter, other_adapter),
    Case("reloaded in the engine", True, reloaded, lambda start: Start(start.model)),
    Case("edited config.json", True, llama, edited_config),
    Case(
        "--hf-overrides",
        True,
        llama,
        lambda start: start.given(hf_overrides={"rms_norm_eps": 0.1}),
    ),
    Case(
        "--mm-processor-kwargs",
        True,
        with_image,
        lambda start: start.given(mm_processor_kwargs={"image_mean": [0.1, 0.9, 0.2]}),
    ),
    Case("preprocessor_config.json", True, with_image, other_images),
    Case(
        "preprocessor_config.json beside --hf-config-path",
        True,
        configured_elsewhere,
        other_images,
    ),
    Case(
        "--hf-overrides by a function",
        True,
        lambda root: llama(root).given(hf_overrides=overridden(1e-5)),
        lambda start: start.given(hf_overrides=overridden(0.1)),
    ),
    Case("quantised", True, lambda root: llama(root).given(dtype="bfloat16"), quantised),
    Case("vLLM's version", True, llama, lambda start: replace(start, version="0.32.9")),
    Case("moved, in two shards", False, llama, moved),
    Case("copied", False, llama, copied),
    Case("through a link", False, llama, linked_copy),
    Case("saved by another transformers", False, llama, saved_again),
    Case("longer", False, llama, lambda start: start.given(max_model_len=4096)),
    Case(
        "other name, seed and batches, with an image",
        False,
        with_image,
        lambda start: start.given(
            served_model_name="other", seed=9, max_num_seqs=3, max_num_batched_tokens=256
        ),
    ),
    Case("adapter of another name, number and place", False, with_adapter, renamed_adapter),
    Case("generation and tokenizer files", False, llama, other_texts),
)
