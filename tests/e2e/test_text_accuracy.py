"""The text model loses what the prototype of sparse decode lost, in `make soak` only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_ssdkv.cli.main import app
from vllm_ssdkv.profiling.text_model.fetch import text_model

MODEL = Path(__file__).parent.parent.parent / "build" / "text-model"


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_window_alone_diverges_and_sparf_hardly_does(tmp_path: Path) -> None:
    """At 5 % of the last 255 tokens of documents of 8,192. Downloads the model where it is not."""
    command = ["lab", "bench", "accuracy", "--suite", "text", "--model", str(text_model(MODEL))]
    command += ["--selectors", "window,sparf", "--budgets", "0.05", "--block-tokens", "128"]
    result = CliRunner().invoke(app, [*command, "--json", "--dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    exact, window, sparf = json.loads(result.stdout)["rows"]
    assert all(request["steps"] == 255 for request in exact["requests"])
    means = [
        sum(request["kl"] for request in row["requests"]) / len(row["requests"])
        for row in (exact, window, sparf)
    ]
    assert means[0] == 0
    assert 0.1 < means[1] < 0.3
    assert means[2] < means[1] / 3
