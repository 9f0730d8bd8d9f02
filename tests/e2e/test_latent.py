"""Latent attention (MLA) on a CPU without AMX, where vLLM finds no prefixes: nor does the store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.connector.kinds import KINDS, make
from tests.e2e.models import prompts
from tests.e2e.workload import reuse_mode
from tests.kit.engine import Engine
from vllm_ssdkv.cli.explain.catalog import entry_for


def test_nothing_is_found_where_vllm_finds_nothing(
    devices: Callable[..., list[dict[str, object]]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its attention there computes all of a prompt in one step, and takes a hit for nothing."""
    config, architecture, entries = KINDS["deepseek"]
    dense = {"deepseek": (config, architecture, {**entries, "first_k_dense_replace": 4})}
    model, (prompt,) = make(tmp_path, "deepseek", dense), prompts((300,), seed=3)
    with Engine(
        model,
        ssdkv=reuse_mode(devices(1)),
        kv_tokens=8192,
        load_format="dummy",
        max_model_len=512,
        skip_tokenizer_init=True,
        attention_backend="CPU_MLA",
        block_size=16,
    ) as engine:
        (cold,), (warm,) = (engine.answers([prompt], logprobs=1) for _ in range(2))
        engine.settle()
        index = engine.scheduler.connector.scheduler.index
        assert (cold.cached, warm.cached) == (0, 0)
        assert (cold.tokens, cold.logprobs) == (warm.tokens, warm.logprobs)
        assert index.gauges()["ready"] == 0, "a restart has nothing to find"
    (told,) = [r.getMessage() for r in caplog.records if "finds no prefixes" in r.getMessage()]
    assert "without AMX" in told
    entry_for(told)
