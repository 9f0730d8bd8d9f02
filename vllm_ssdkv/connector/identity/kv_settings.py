"""Settings that change the KV of a prompt and are not seen in the weights in memory.

They are taken from vLLM's configuration and from the model's files, in the scheduler's process
alone, so nothing depends on what model classes write into their configuration when they are made.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import vllm
from transformers import PreTrainedConfig
from vllm.transformers_utils.repo_utils import try_get_local_file

from vllm_ssdkv.store.format.fingerprint import Fingerprint

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_CONFIGS: Final = ("config.json", "params.json")
_PROCESSORS: Final = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
_OF_MEDIA: Final = (
    "media_io_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_backend",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "mm_processor_kwargs",
    "video_pruning_method",
    "video_pruning_rate",
)
"""Fields of vLLM's multimodal configuration on which the KV of an image depends."""

_ENVIRONMENT: Final = (
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH",
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION",
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4",
)
"""Variables of vLLM's that quantise activations, or order a block's bytes in another way. Nothing
in the modules shows them. Those that choose between kernels of one precision change rounding."""

_WITHOUT_EFFECT: Final = frozenset(
    {
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "label2id",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Entries of ``config.json``, at any depth, that change no KV, or that the weights show."""


def kv_settings(vllm_config: VllmConfig, cache_layout: str, *, chooses: bool) -> Fingerprint:
    """Settings of an engine that change KV.

    Args:
        vllm_config: vLLM's.
        cache_layout: vLLM's, of a block.
        chooses: Its requests may decode tokens from a part of their context.
    """
    model = vllm_config.model_config
    device = str(vllm_config.device_config.device_type)
    if device == "cpu":
        device = f"cpu {torch.backends.cpu.get_cpu_capability()}"
    fields: dict[str, str | int] = {
        "vllm": vllm.__version__,
        "device": device,
        "cache_layout": cache_layout,
        "quantization": str(model.quantization),
        "config": _digest(json.dumps(_entries(model), sort_keys=True)),
        "hf_overrides": _overrides(model),
    }
    given = {name: os.environ[name] for name in _ENVIRONMENT if os.environ.get(name)}
    if given:
        fields["environment"] = _text(given)
    if vllm_config.additional_config:  # of platforms that are plugins
        fields["additional_config"] = _text(vllm_config.additional_config)
    if chooses:
        # Earlier stores have decoded blocks under the keys of prompts.
        fields["decoded"] = "by choice"
    media = model.multimodal_config
    if media is not None:
        fields["media"] = _text({name: getattr(media, name, None) for name in _OF_MEDIA})
        # vLLM reads processors from beside the weights, wherever the configuration is.
        fields["processor"] = _digest(*_contents(model.model, model.revision, _PROCESSORS))
    return Fingerprint(fields)


def _entries(model: ModelConfig) -> object:
    """The model's configuration files, else what vLLM made of them (GGUF), as far as they count.

    Of two vLLM reads one, which depends on ``--config-format`` and on the names of other files.
    """
    place, revision = model.hf_config_path or model.model, model.revision
    if model.hf_config_path:
        revision = model._hf_config_revision or revision
    found = _contents(place, revision, _CONFIGS)
    if not found:
        return _settled(model.hf_config.to_dict())
    first, *others = (entries_that_count(json.loads(c), type(model.hf_config)) for c in found)
    return [first, *others] if others else first


def _overrides(model: ModelConfig) -> str:
    """``--hf-overrides`` as text; of a function that makes them, the configuration that it made."""
    if callable(model.hf_overrides):
        made = json.dumps(_settled(model.hf_config.to_dict()), sort_keys=True, default=str)
        return f"function {_digest(made)}"
    return _text(model.hf_overrides)


def entries_that_count(entries: dict[str, Any], kind: type[PreTrainedConfig]) -> dict[str, Any]:
    """Entries of a configuration without those, at any depth, that change no KV.

    Versions of transformers save more or fewer defaults: an entry is left out, too, if the
    configuration that is made of the rest is the same. ``kind``: class of the configuration.
    """
    settled: dict[str, Any] = _settled(entries)
    whole = _parsed(settled, kind)
    if whole is None:
        return settled
    kept, said = copy.deepcopy(settled), whole.to_dict()
    # A part that is a configuration is looked at by itself: the whole takes longer to make.
    parts = {n: type(p) for n, p in vars(whole).items() if isinstance(p, PreTrainedConfig)}
    parts = {name: part for name, part in parts.items() if isinstance(kept.get(name), dict)}
    for name, part in parts.items():
        kept[name] = entries_that_count(kept[name], part)
    if not _says(kept, kind, said):
        kept = copy.deepcopy(settled)
    pending: list[tuple[dict[str, Any], str]] = [(kept, name) for name in sorted(kept)]
    for place, name in pending:  # grows
        value = place.pop(name)
        if not _says(kept, kind, said):
            place[name] = value
            if isinstance(value, dict) and name not in parts:
                pending += [(value, inner) for inner in sorted(value)]
    return kept


def _says(entries: dict[str, Any], kind: type[PreTrainedConfig], said: dict[str, Any]) -> bool:
    """Check whether the configuration that is made of these entries says just that."""
    made = _parsed(entries, kind)
    return made is not None and made.to_dict() == said


def _parsed(entries: dict[str, Any], kind: type[PreTrainedConfig]) -> PreTrainedConfig | None:
    """The configuration that is made of these entries; None: there is none."""
    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.CRITICAL)  # it tells of each entry that it misses
    try:
        return kind.from_dict(copy.deepcopy(entries))
    except Exception:  # noqa: BLE001 - of any model's code: what cannot be left out is kept
        return None
    finally:
        log.setLevel(level)


def _contents(place: str, revision: str | None, names: Iterable[str]) -> list[bytes]:
    """The files of these names of a model, as far as there are any, in this order."""
    found = []
    for name in names:
        path = try_get_local_file(place, name, revision)
        if isinstance(path, Path) and path.is_file():
            found.append(path.read_bytes())
    return found


def _settled(value: Any) -> Any:  # noqa: ANN401 - a JSON value
    """A JSON value without entries that have no effect."""
    if isinstance(value, dict):
        return {k: _settled(v) for k, v in value.items() if k not in _WITHOUT_EFFECT}
    return [_settled(one) for one in value] if isinstance(value, list) else value


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
