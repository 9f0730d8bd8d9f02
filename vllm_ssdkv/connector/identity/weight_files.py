"""Files that a model's weights were loaded from, for weights that cannot be seen in memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import huggingface_hub
import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from vllm_ssdkv.kernels.tensor_digest import digest_tensors

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_PATTERNS: Final = ["*.safetensors", "*.bin", "*.pt", "*.gguf"]


def weight_files(model: str, revision: str | None = None) -> list[Path]:
    """Files of weights of a model, named as ``--model`` is, that are on this machine."""
    root = Path(model)
    if not root.exists():
        try:
            root = Path(
                huggingface_hub.snapshot_download(
                    model, revision=revision, local_files_only=True, allow_patterns=_PATTERNS
                )
            )
        except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError):
            return []
    if root.is_file():
        return [root]
    return sorted({file for pattern in _PATTERNS for file in root.glob(pattern)})


def digest_of_files(vllm_config: VllmConfig) -> str:
    """Digest of the whole content of the weight files of the model and its drafter.

    Reads them all, at the speed of their drive or of memory. Whatever their names. Empty where a
    model has no files here.

    Raises:
        OSError: one cannot be read.
    """
    models = [vllm_config.model_config]
    drafter = getattr(vllm_config.speculative_config, "draft_model_config", None)
    if drafter is not None:
        models.append(drafter)
    digests = []
    for model in models:
        files = weight_files(model.model, model.revision)
        if not files:
            return ""
        digests += [_digest_of(file) for file in files]
    return " ".join(digests)


def _digest_of(file: Path) -> str:
    size = file.stat().st_size
    content = torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
    return f"{size} {int(digest_tensors([content])[0]):016x}"
