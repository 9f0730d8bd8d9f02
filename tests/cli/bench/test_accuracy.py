"""The accuracy of sparse decode: what the bench runs, and what it makes of it, with no engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from vllm_ssdkv.cli.main import app
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.profiling.recall import bench
from vllm_ssdkv.profiling.recall.bench import SPARSE
from vllm_ssdkv.profiling.recall.kv_size import bytes_per_token
from vllm_ssdkv.profiling.recall.recall import TASKS
from vllm_ssdkv.profiling.recall.run import Batch, RecallRun
from vllm_ssdkv.profiling.rig.child_process import PhaseError

Runs = list[RecallRun]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """What was run; every answer is right but those of the window."""
    seen: Runs = []

    def run(module: str, given: list[str], *_: Any) -> dict[str, Any]:  # noqa: ANN401 - of run_module
        plan = RecallRun.from_json(given[0])
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
                    "rows_exact": 3.0 if plan.selector == "adaptive" else 0.0,
                    "deviation": [
                        {"layer": layer, "relative_l2": layer / 4, "mass": 0.9, "recall": 0.8}
                        for layer in range(3 if plan.compare_every else 0)
                    ],
                }
                for batch in plan.batches
            ]
        }

    monkeypatch.setattr(bench, "run_module", run)
    return seen


def ask(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ["lab", "bench", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result


def test_every_selector_and_budget_is_an_engine(runs: Runs, tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    options = ["--contexts", "2048,4096", "--selectors", "bounds,window", "--budgets", "0.25,0.125"]
    options += ["--window", "128", "--json", "--plot", str(picture)]
    result = ask("accuracy", *options, "--questions", "3,2", "--dir", str(tmp_path))
    text = result.stderr
    cases = [(run.selector, run.sparse["budget"]) for run in runs]
    pairs = [(name, share) for name in ("bounds", "window") for share in (0.25, 0.125)]
    assert cases == [("exact", 1.0), *pairs]
    assert all(run.batches == (Batch(2048, 3), Batch(4096, 2)) for run in runs)
    assert {run.window for run in runs} == {128}
    assert [run.compare_every > 0 for run in runs] == [False, True, True, True, True]
    # Sparse engines share a store, exact has its own; all are gone.
    assert len({run.stores for run in runs[1:]}) == 1
    assert runs[0].stores != runs[1].stores
    assert set(tmp_path.iterdir()) == {picture}
    assert picture.stat().st_size > 10_000
    document = json.loads(result.stdout)
    assert [row["context"] for row in document["rows"]] == [2048, 4096] * 5
    assert document["seconds"] >= 0
    lines = [line.split() for line in text.split("4096 tokens")[1].splitlines()[2:]]
    deviation = ["0.250", "90.0%", "80.0%"]
    assert lines == [
        ["exact", "-", "100.0%", *["2/2"] * 4, "100.0%", "-", "-", "-"],
        ["bounds", "1/4", "12.5%", *["2/2"] * 4, "100.0%", *deviation],
        ["bounds", "1/8", "12.5%", *["2/2"] * 4, "100.0%", *deviation],
        ["window", "1/4", "12.5%", *["0/2"] * 4, "0.0%", *deviation],
        ["window", "1/8", "12.5%", *["0/2"] * 4, "0.0%", *deviation],
    ]
    assert max(map(len, text.splitlines())) <= 80


def test_the_quick_form_is_one_budget_at_short_lengths(runs: Runs, tmp_path: Path) -> None:
    options = [
        "--selectors",
        "bounds,sparf,window",
        "--reuse-steps",
        "4",
        "--reuse-similarity",
        "0.5",
    ]
    ask("accuracy", "--quick", *options, "--dir", str(tmp_path))
    assert {run.sparse["reuse_steps"] for run in runs} == {4}
    assert {run.sparse["reuse_similarity"] for run in runs} == {0.5}
    assert [run.selector for run in runs] == ["exact", "bounds", "sparf", "window"]
    assert {run.sparse["budget"] for run in runs[1:]} == {1 / 8}
    assert all(run.batches == (Batch(2048, 4), Batch(4096, 4)) for run in runs)
    assert runs[1].stores == runs[3].stores != runs[2].stores
    # K a second time is half of the KV.
    held = [int(str(run.sparse["summaries"])) for run in runs[1:]]
    assert min(held) > 4 * len(TASKS) * 4096 * bytes_per_token() // 2
    assert all(run.dram_bytes > held[0] for run in runs)


def test_rows_that_attended_to_everything_are_no_result(runs: Runs, tmp_path: Path) -> None:
    arguments = [
        "lab",
        "bench",
        "accuracy",
        "--quick",
        "--selectors",
        "adaptive",
        "--dir",
        str(tmp_path),
    ]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "adaptive at 0.125 (2 of 2): DRAM had no room" in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["accuracy", "--dir", "/no/such/folder"], "/no/such/folder is not a directory"),
        (["accuracy", "--contexts", "12"], "numbers from 1024 to 32768"),
        (["accuracy", "--budgets", "x"], "numbers from 0.001 to 1"),
        (["accuracy", "--selectors", "bounds,best"], f"any of {', '.join(SPARSE)}"),
        (["accuracy", "--questions", "4,4"], "as many as --contexts has (5)"),
        (["accuracy", "--plot", "/no/such/place/a.png"], "/no/such/place is not a directory"),
    ],
)
def test_nonsense_is_refused(runs: Runs, arguments: list[str], text: str) -> None:
    result = CliRunner().invoke(app, ["lab", "bench", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert text in result.output
    assert runs == []


def test_an_engine_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(module: str, given: object, log: Path, *_: object) -> dict[str, Any]:
        log.write_text("the last words\n")
        raise PhaseError("failed with exit code 3")

    monkeypatch.setattr(bench, "run_module", fail)
    result = CliRunner().invoke(app, ["lab", "bench", "accuracy", "--dir", str(tmp_path)])
    assert result.exit_code == 1
    assert "failed with exit code 3" in result.output
    assert "the last words" in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("selector", ["exact", *SPARSE])
def test_a_run_is_carried_over_and_its_options_are_valid(selector: str, tmp_path: Path) -> None:
    batches = (Batch(4096, 2), Batch(2048, 1, ("copy",), 24))
    sparse: dict[str, object] = {"budget": 0.125, "page_cache": 1 << 20}
    plan = RecallRun(
        (str(tmp_path),), selector, batches, 64, 64 << 20, 64 << 20, sparse, ({"iops": 5.0},), 4
    )
    again = RecallRun.from_json(plan.to_json())
    assert again == plan
    config = SSDKVConfig.from_extra_config(again.options())
    assert (config.selector, config.exact_below, config.sparse.budget) == (selector, 0, 0.125)
    assert len(batches[0].questions()) == 2 * len(TASKS)
    assert again.engine_settings()["max_num_seqs"] == 8
