"""Models of vLLM's registry, and what came of starting one of them."""

from __future__ import annotations

import importlib
import re
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from vllm_ssdkv.profiling.models.engine_start import PROMPTS, start
from vllm_ssdkv.profiling.models.rows import FAILED, MODES, NO_STOCK, REFUSED, SERVED, Row
from vllm_ssdkv.profiling.models.tiny_config import family_of

_PRELOADED: Final = (
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.llama",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.worker.cpu_worker",
    "vllm_ssdkv.connector.connector",
)


def preload() -> None:
    """Import what engines need, once for all processes that are forked from this one."""
    for name in _PRELOADED:
        importlib.import_module(name)


def architectures() -> list[str]:
    """Decoders of text that vLLM serves and transformers can describe, by name."""
    from vllm.model_executor.models.registry import ModelRegistry

    return sorted(
        name
        for name in ModelRegistry.get_supported_archs()
        if name.endswith(("ForCausalLM", "LMHeadModel")) and family_of(name)
    )


def try_model(architecture: str, modes: Sequence[str] = MODES) -> list[Row]:
    """Start stock vLLM with a tiny model of this architecture, then ours; a row for each mode."""
    import vllm

    family = family_of(architecture)
    with tempfile.TemporaryDirectory(prefix="ssdkv-models-") as place:
        stock = start(architecture, "", Path(place))
        rows = []
        for mode in modes:
            result, detail = (
                (NO_STOCK, _first_line(stock["error"]))
                if "error" in stock
                else judged(stock, start(architecture, mode, Path(place)))
            )
            date = datetime.now(UTC).date().isoformat()
            rows.append(Row(family, architecture, mode, vllm.__version__, date, result, detail))
        return rows


def judged(stock: Mapping[str, Any], ours: Mapping[str, Any]) -> tuple[str, str]:
    """Result and detail of one start beside that of stock vLLM."""
    if error := str(ours.get("error", "")):
        refused = re.findall(r"^  - (.*)$", error, re.MULTILINE)
        if "SSDKVConnector cannot start in mode" in error and refused:
            return REFUSED, "; ".join(refused)
        return FAILED, _first_line(error)
    if ours["first"] != stock["first"]:
        return FAILED, "other tokens than stock vLLM"
    if ours["again"] != stock["first"]:
        return FAILED, "other tokens than stock vLLM once KV was stored"
    return SERVED, f"{ours['cached']} of {sum(map(len, PROMPTS))} tokens found"


def _first_line(error: str) -> str:
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    return lines[0][:200] if lines else "no reason given"
