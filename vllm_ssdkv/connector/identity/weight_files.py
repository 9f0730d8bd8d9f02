"""Files that a model was loaded from, for weights and code that cannot be seen in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import huggingface_hub
import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from vllm_ssdkv.kernels.tensor_digest import digest_tensors

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_PATTERNS: Final = ["*.safetensors", "*.bin", "*.pt", "*.gguf"]


def weight_files(
    model: str, revision: str | None = None, download_dir: str | None = None
) -> list[Path]:
    """Files of weights of a model, named as ``--model`` is, that are on this machine."""
    root = _place(model, revision, _PATTERNS, download_dir)
    if root is None:
        return []
    if root.is_file():
        return [root]
    return sorted({file for pattern in _PATTERNS for file in root.glob(pattern)})


def _place(
    model: str, revision: str | None, patterns: Sequence[str], download_dir: str | None = None
) -> Path | None:
    """The model's directory or file on this machine; None: it is not here."""
    root = Path(model)
    if root.exists():
        return root
    try:
        return Path(
            huggingface_hub.snapshot_download(
                model,
                revision=revision,
                cache_dir=download_dir,
                local_files_only=True,
                allow_patterns=list(patterns),
            )
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError):
        return None


def _models(vllm_config: VllmConfig) -> list[ModelConfig]:
    """The model, and its drafter where there is one."""
    drafter = getattr(vllm_config.speculative_config, "draft_model_config", None)
    return [vllm_config.model_config, *([] if drafter is None else [drafter])]


def digest_of_files(vllm_config: VllmConfig) -> str:
    """Digest of the whole content of the weight files of the model and its drafter.

    Reads them all, at the speed of their drive or of memory. Whatever their names. Empty where a
    model has no files here.

    Raises:
        OSError: one cannot be read.
    """
    digests = []
    for model in _models(vllm_config):
        files = weight_files(model.model, model.revision, vllm_config.load_config.download_dir)
        if not files:
            return ""
        digests += [_digest_of(file) for file in files]
    return " ".join(digests)


def digest_of_code(vllm_config: VllmConfig) -> str:
    """Digest of the Python files that come with models whose code is trusted
    (``--trust-remote-code``).

    Raises:
        OSError: one cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    for model in _models(vllm_config):
        if not model.trust_remote_code:
            continue
        # transformers keeps code in its own cache, wherever weights go. "REPOSITORY--module.Class"
        # names code that comes from elsewhere.
        named = (getattr(model.hf_config, "auto_map", None) or {}).values()
        others = {n.split("--")[0] for n in named if isinstance(n, str) and "--" in n}
        places = [(model.model, model.code_revision or model.revision)]
        places += [(other, model.code_revision) for other in sorted(others)]
        for name, revision in places:
            root = _place(name, revision, ["*.py"])
            if root is None:
                continue
            for file in sorted(root.rglob("*.py")):
                for part in (str(file.relative_to(root)).encode(), file.read_bytes()):
                    digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _digest_of(file: Path) -> str:
    size = file.stat().st_size
    content = torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
    return f"{size} {int(digest_tensors([content])[0]):016x}"
