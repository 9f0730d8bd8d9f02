"""Size of a model's KV, by its ``config.json``: benchmarks size their memory with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.recall.recall import MODEL_DIR

DTYPE_BYTES: Final = 2
"""vLLM's KV cache has the dtype of the model, and it runs those in float32 in 16 bits, too."""


def bytes_per_token(model: Path = MODEL_DIR) -> int:
    """K and V of one token, all layers.

    Raises:
        BenchError: ``config.json`` is missing or does not tell the layers and heads of a decoder.
    """
    path = model / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        heads = int(config["num_attention_heads"])
        size = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
        layers = int(config["num_hidden_layers"])
        return 2 * DTYPE_BYTES * layers * size * int(config.get("num_key_value_heads") or heads)
    except OSError as error:
        raise BenchError(f"--model: {path} cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BenchError(
            f"--model: {path} does not tell layers, heads and hidden size ({error!r}); "
            "give a model with KV of one size per layer"
        ) from error
