"""Identity of the chunks that an engine stores: whose KV they are, and in which shape.

vLLM hands a tier neither its configuration nor its requests. Both are local variables of callers of
the tier (tests/contract/test_secondary_tier.py), and are read there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from vllm import envs
from vllm.v1.kv_offload.file_mapper import FileMapper

from vllm_ssdkv.base.errors import UnsupportedError
from vllm_ssdkv.config.secondary_tier import SecondaryTierConfig
from vllm_ssdkv.connector.identity.weight_files import digest_of_code, digest_of_files
from vllm_ssdkv.store.format.fingerprint import Fingerprint

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_FROM_FILES: Final = frozenset(
    {"auto", "hf", "safetensors", "pt", "npcache", "mistral", "fastsafetensors", "instanttensor"}
    | {"bitsandbytes", "gguf"}
)
"""Values of ``--load-format`` with which the weights are those of the model's files."""

_NAME_IT: Final = "name the weights in the tier's option weights_id, and change it with them"


def settings_in_sight() -> VllmConfig:
    """The configuration of the engine that makes a tier.

    Raises:
        UnsupportedError: no caller has it.
    """
    from vllm.config import VllmConfig

    found = _in_callers("vllm_config", VllmConfig)
    if found is None:
        raise UnsupportedError(
            "SSDKVTier cannot see the settings of its engine: this release of vLLM makes tiers in "
            "another way; use a release that ssdkv is tested with (`ssdkv doctor`)"
        )
    return found


def request_in_sight(request_id: str) -> Request | None:
    """The request of this id that a caller has just been given; None: no caller has it."""
    from vllm.v1.request import Request

    found = _in_callers("request", Request)
    return found if found is not None and found.request_id == request_id else None


def _in_callers(name: str, kind: type[Any]) -> Any:  # noqa: ANN401 - of any type
    """The nearest caller's local variable of this name and type."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        found = frame.f_locals.get(name)
        if isinstance(found, kind):
            return found
        frame = frame.f_back
    return None


def chunk_identity(
    spec: OffloadingSpec, nbytes: int, *, encrypted: bool
) -> tuple[Fingerprint, dict[str, str | int]]:
    """Shape of a chunk, and the settings of vLLM's that name its model.

    vLLM's own file tier names its files by the same fields.
    """
    mapper = FileMapper.from_offloading_spec(
        root_dir="/",
        offloading_spec=spec,
        blocks_per_file=spec.blocks_per_chunk,
        parallel_agnostic=True,
    )
    fields = dict(mapper.get_run_config())
    settings: dict[str, str | int] = {"model": str(fields.pop("model_name"))}
    groups = json.dumps(fields.pop("kv_cache_groups"), sort_keys=True)
    shape: dict[str, str | int] = {name: str(value) for name, value in sorted(fields.items())}
    shape["groups"] = hashlib.blake2b(groups.encode(), digest_size=16).hexdigest()
    shape["slot"] = "a chunk of vLLM's offloading"
    shape["chunk_bytes"] = nbytes
    shape["encrypted"] = int(encrypted)
    return Fingerprint(shape), settings


def model_settings(vllm_config: VllmConfig) -> dict[str, str | int]:
    """Settings of vLLM's that change KV, and that only the model in memory would show.

    Models choose tables of positions by ``--max-model-len`` (LongRoPE, Llama 4). Where vLLM finds
    it out itself, it does so after it has made the model of what the model's files say.

    Raises:
        UnsupportedError: the model's code cannot be read.
    """
    model = vllm_config.model_config
    try:
        code = digest_of_code(vllm_config)
    except OSError as error:
        raise UnsupportedError(
            f"SSDKVTier: the model's code cannot be read: {error}: repair its files"
        ) from error
    return {
        "max_model_len": 0 if model.original_max_model_len == -1 else model.max_model_len,
        "compute_dtype": str(model.dtype),
        "architectures": " ".join(model.architectures),
        "model_impl": str(model.model_impl),
        "code": code,
    }


def weights_digest(config: SecondaryTierConfig, vllm_config: VllmConfig) -> bytes:
    """Digest of the weights, 32 bytes. Reads all weight files, unless they have a name.

    Raises:
        UnsupportedError: nothing says what the weights are.
    """
    if config.weights_id is not None:
        return hashlib.blake2b(
            config.weights_id.encode(), digest_size=32, person=b"weights_id"
        ).digest()
    load_format = str(vllm_config.load_config.load_format)
    if load_format not in _FROM_FILES:
        raise UnsupportedError(
            f"SSDKVTier: with --load-format {load_format} the model's files do not say what its "
            f"weights are: {_NAME_IT}"
        )
    if envs.VLLM_USE_MODELSCOPE and not Path(vllm_config.model_config.model).exists():
        raise UnsupportedError(
            "SSDKVTier: with VLLM_USE_MODELSCOPE vLLM has the weights from files that ssdkv does "
            f"not know: {_NAME_IT}"
        )
    begin = time.monotonic()
    try:
        found = digest_of_files(vllm_config)
    except OSError as error:
        raise UnsupportedError(
            f"SSDKVTier: the weight files cannot be read: {error}: {_NAME_IT}"
        ) from error
    if not found:
        raise UnsupportedError(
            f"SSDKVTier: no weight files of {vllm_config.model_config.model} are on this machine: "
            f"{_NAME_IT}"
        )
    logger.info("ssdkv: weight files digested in %.1f s", time.monotonic() - begin)
    return hashlib.blake2b(found.encode(), digest_size=32, person=b"weight files").digest()
