"""Forced decoding in the real engine, and the suites of real text from end to end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.e2e.models import VOCAB, prompts
from tests.e2e.workload import ROOMY_DRAM, kv_tokens, page_mode
from tests.kit.engine import Engine
from vllm_ssdkv.cli.main import app
from vllm_ssdkv.profiling.forced_decode import FORCED, FORCINGS, ForcedDecode, Record

WINDOW, CHUNK, STEPS = 128, 512, 6


def test_rows_are_the_log_probabilities_that_vllm_gives(
    models: dict[str, Path], devices: Callable[..., list[dict[str, Any]]]
) -> None:
    """Of a batch in which one request is not forced, and prompts are computed in chunks."""
    sparse = {"exact_below": 0, "budget": 0.3}
    ssdkv = page_mode(devices(2), dram=ROOMY_DRAM, selector="window", sparse=sparse)
    asked = dict(zip("abc", prompts((1300, 40, 700), seed=5), strict=True))
    forced = {name: tuple(range(7 + i, 7 + i + STEPS)) for i, name in enumerate("ab")}
    records = {name: Record(tokens) for name, tokens in forced.items()}
    FORCINGS.update(records)
    with Engine(
        models["llama"],
        ssdkv=ssdkv,
        kv_tokens=4 * kv_tokens(WINDOW, CHUNK, 32),
        logits_processors=[ForcedDecode],
        max_logprobs=-1,
    ) as engine:
        for name, prompt in asked.items():
            extra = {FORCED: name} if name in forced else None
            sampling = engine.sampling(STEPS, logprobs=-1, extra_args=extra)
            engine.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        done = {}
        while engine.llm.llm_engine.has_unfinished_requests():
            done |= {o.request_id: o.outputs[0] for o in engine.llm.llm_engine.step()}
        engine.settle()
    for name, tokens in forced.items():
        rows = records[name].whole(name, done[name].token_ids)
        theirs = torch.tensor([[p[i].logprob for i in range(VOCAB)] for p in done[name].logprobs])
        torch.testing.assert_close(rows, theirs)
        assert done[name].token_ids == list(tokens)
    assert len(set(done["c"].token_ids) - {1, 2}) > 1


@pytest.mark.timeout(300)
def test_a_budget_of_all_pages_is_dense_and_less_is_not(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """The command, its two engines in processes of their own."""
    command = ["lab", "bench", "accuracy", "--suite", "text,json", "--model", str(models["llama"])]
    command += ["--contexts", "2048", "--questions", "1", "--selectors", "bounds"]
    command += ["--budgets", "1,0.1", "--window", "64", "--json", "--dir", str(tmp_path)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [(row["selector"], row["suite"], row["budget"]) for row in rows] == [
        *(("exact", suite, 1.0) for suite in ("text", "json")),
        *(("bounds", suite, share) for suite in ("text", "json") for share in (1.0, 0.1)),
    ]
    for row in rows:
        steps = 255 if row["suite"] == "text" else 30
        assert all(request["steps"] >= steps for request in row["requests"])
    kl = [[request["kl"] for request in row["requests"]] for row in rows]
    assert max(kl[0] + kl[1]) == 0
    for whole, some in ((kl[2], kl[3]), (kl[4], kl[5])):
        assert max(whole) < min(some) / 10
    assert list(tmp_path.iterdir()) == []
