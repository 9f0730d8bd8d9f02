"""The benches of sparse decode: what they run, and what they make of it; engines are stood for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vllm_ssdkv.cli import bench_sparse
from vllm_ssdkv.cli.demo_child import PhaseError
from vllm_ssdkv.cli.main import app
from vllm_ssdkv.cli.recall import TASKS
from vllm_ssdkv.cli.recall_run import Batch, RecallRun
from vllm_ssdkv.config import SSDKVConfig

Runs = list[RecallRun]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """What was run; every answer is right but those of the window."""
    seen: Runs = []

    def run(command: list[str], *_: Any) -> dict[str, Any]:  # noqa: ANN401 - arguments of run_process
        plan = RecallRun.from_json(command[-1])
        seen.append(plan)
        assert all(Path(store).is_dir() for store in plan.stores)
        metrics = {
            "sparse_pages_in_context": 0.0 if plan.selector == "exact" else 400.0,
            "sparse_pages_selected": 0.0 if plan.selector == "exact" else 50.0,
            "bytes_read": 4096.0 * (800 if plan.selector == "exact" else 80),
            "attention_seconds.wait": 0.4,
        }
        return {
            "batches": [
                {
                    "context": batch.context,
                    "requests": batch.count * len(batch.tasks),
                    "asked": batch.count,
                    "right": dict.fromkeys(batch.tasks, batch.count * (plan.selector != "window")),
                    "decoded_tokens": 80,
                    "decoding_s": 2.0,
                    "decoding": metrics,
                }
                for batch in plan.batches
            ]
        }

    monkeypatch.setattr(bench_sparse, "run_process", run)
    return seen


def ask(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


def test_accuracy(runs: Runs, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    options = ["--contexts", "2048,4096", "--selectors", "bounds,window", "--budgets", "0.25,0.125"]
    text = ask("accuracy", *options, "--dir", str(tmp_path), "--json", str(file))
    cases = [(run.selector, run.sparse["budget"]) for run in runs]
    pairs = [(name, share) for name in ("bounds", "window") for share in (0.25, 0.125)]
    assert cases == [("exact", 1.0), *pairs]
    # Sparse engines share a store, exact has its own; all are gone.
    assert len({run.stores for run in runs[1:]}) == 1
    assert runs[0].stores != runs[1].stores
    assert list(tmp_path.iterdir()) == [file]
    document = json.loads(file.read_text())
    assert [row["context"] for row in document["rows"]] == [2048, 4096] * 5
    lines = [line for line in text.splitlines() if "4096" in line]
    assert ["12.5 %" in line for line in lines] == [False, True, True, True, True]
    assert [line.count("100 %") for line in lines] == [4, 4, 4, 0, 0]


def test_decode(runs: Runs, tmp_path: Path) -> None:
    file = tmp_path / "d.json"
    options = ["--contexts", "4096", "--batch", "1,8", "--devices", "3", "--bandwidth", "1MiB"]
    text = ask("decode", *options, "--dir", str(tmp_path), "--json", str(file))
    assert [run.selector for run in runs] == ["exact", "bounds"]
    assert all(len(run.stores) == 3 for run in runs)
    assert runs[0].throttle == ({"bandwidth": 1 << 20, "iops": 20000.0, "latency": 0.0005},)
    lines = [line for line in text.splitlines() if "4096" in line]
    assert ["40 KiB" in line for line in lines] == [True, True, False, False]
    assert all("40.0" in line and "5.00 ms" in line for line in lines)
    assert len(json.loads(file.read_text())["rows"]) == 4


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["accuracy", "--contexts", "12"], "numbers from 1024 to 32768"),
        (["accuracy", "--budgets", "x"], "numbers from 0.001 to 1"),
        (["decode", "--selectors", "bounds,best"], "any of bounds, adaptive, window"),
    ],
)
def test_nonsense_is_refused(runs: Runs, arguments: list[str], text: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert text in result.output
    assert runs == []


def test_an_engine_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(command: list[str], variables: object, log: Path, *_: object) -> dict[str, Any]:
        log.write_text("the last words\n")
        raise PhaseError("failed with exit code 3")

    monkeypatch.setattr(bench_sparse, "run_process", fail)
    result = CliRunner().invoke(app, ["bench", "decode", "--dir", str(tmp_path)])
    assert result.exit_code == 1
    assert "failed with exit code 3" in result.output
    assert "the last words" in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("selector", ["exact", "bounds", "adaptive", "window"])
def test_a_run_is_carried_over_and_its_options_are_valid(selector: str, tmp_path: Path) -> None:
    batches = (Batch(4096, 2), Batch(2048, 1, ("copy",), 24))
    sparse: dict[str, object] = {"budget": 0.125, "page_cache": 1 << 20}
    plan = RecallRun(
        (str(tmp_path),), selector, batches, 64, 64 << 20, 64 << 20, sparse, ({"iops": 5.0},)
    )
    again = RecallRun.from_json(plan.to_json())
    assert again == plan
    config = SSDKVConfig.from_extra_config(again.options())
    assert (config.selector, config.exact_below, config.sparse.budget) == (selector, 0, 0.125)
    assert len(batches[0].questions()) == 2 * len(TASKS)
    assert again.engine_settings()["max_num_seqs"] == 8
