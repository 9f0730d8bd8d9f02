"""Random weights, by which a token depends on all before it: a load format for vLLM."""

from __future__ import annotations

import hashlib
import math
from typing import Any, Final

import torch
from torch import nn
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

FORMAT: Final = "ssdkv_random"
GAIN: Final = 1.5
"""Standard deviation of what a matrix makes of inputs of unit variance."""


@register_model_loader(FORMAT)
class RandomWeights(DummyModelLoader):  # type: ignore[misc]  # vLLM's
    """vLLM's own dummy weights are so small that every answer is the same token."""

    def load_weights(self, model: nn.Module, model_config: Any) -> None:  # noqa: ANN401 - vLLM's
        """Draw each parameter by its name."""
        super().load_weights(model, model_config)
        for name, parameter in model.named_parameters():
            if parameter.dtype in (torch.float32, torch.bfloat16, torch.float16):
                draw(name, parameter.data)


def draw(name: str, values: torch.Tensor) -> None:
    """Fill a parameter: matrices so that they keep the variance of their input, scales about 1."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "little")
    source = torch.Generator().manual_seed(seed)
    drawn = torch.randn(values.shape, generator=source)
    if values.ndim >= 2:
        drawn *= GAIN / math.sqrt(values.shape[-1])
    elif name.endswith("weight"):
        drawn = 1 + 0.1 * drawn
    else:
        drawn *= 0.1
    values.copy_(drawn)
