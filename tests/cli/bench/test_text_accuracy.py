"""Suites of real text in ``ssdkv lab bench accuracy``: what is run and shown, with no engine."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from vllm_ssdkv.cli.main import app
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.profiling.accuracy.run import AccuracyRun
from vllm_ssdkv.profiling.recall import bench
from vllm_ssdkv.profiling.recall.bench import SPARSE
from vllm_ssdkv.profiling.recall.run import RecallRun

Runs = list[AccuracyRun | RecallRun]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's directory; all that is read of it is its size."""
    place = tmp_path / "model"
    place.mkdir()
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    config = {**heads, "num_hidden_layers": 30, "max_position_embeddings": 8192}
    (place / "config.json").write_text(json.dumps(config))
    return place


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """What was run. The window is far from dense attention, and others are the nearer to it the
    larger their budget."""
    seen: Runs = []

    def of_recall(plan: RecallRun) -> dict[str, Any]:
        counted = {"sparse_pages_in_context": 4.0, "sparse_pages_selected": 1.0}
        batch = plan.batches[0]
        right = dict.fromkeys(batch.tasks, 1)
        figures = {"context": batch.context, "asked": batch.count, "right": right}
        return {"batches": [{**figures, "rows_exact": 0.0, "decoding": counted}]}

    def of_text(plan: AccuracyRun) -> dict[str, Any]:
        assert Path(plan.dense).is_dir()
        exact, passes = plan.selector == "exact", []
        for suite, tokens in plan.suites:
            for share in plan.budgets:
                kl = 0.0 if exact else 0.2 if plan.selector == "window" else 0.01 / share
                parts = {"text": 0, "needles": 1, "json": 4}[suite]
                right = min(parts, parts if exact else 1)
                one = {"kl": kl, "loss": 1.5 + kl / 2, "same": 1 - kl, "steps": 255}
                two = {**one, "kl": 3 * kl, "loss": 2.5}
                rows = [
                    {"name": name, **figures, "parts": parts, "right": right}
                    for name, figures in (("licences", one), ("inspect", two))
                ]
                chosen = 0.0 if exact else 100 * share
                counted = {"sparse_pages_in_context": 100.0, "sparse_pages_selected": chosen}
                figures = {"suite": suite, "context": tokens, "budget": share, "requests": rows}
                lost = 1.0 if plan.selector == "adaptive" else 0.0
                masses = {"mass": 0.9, "estimated_mass": None if exact else 0.8}
                compared = [{"layer": 0, **masses}] * bool(plan.compare_every and not exact)
                counts = {"rows_exact": lost, "decoding": counted, "deviation": compared}
                # KV of this model has 23,040 bytes a token.
                passes.append({**figures, **counts, "summary_bytes": 0 if exact else 2304})
        return {"passes": passes}

    def run(module: str, given: list[str], *_: Any) -> dict[str, Any]:  # noqa: ANN401 - of run_module
        plan: AccuracyRun | RecallRun
        if module == "vllm_ssdkv.profiling.recall.run":
            plan = RecallRun.from_json(given[0])
        else:
            plan = AccuracyRun.from_json(given[0])
        seen.append(plan)
        return of_recall(plan) if isinstance(plan, RecallRun) else of_text(plan)

    monkeypatch.setattr(bench, "run_module", run)
    return seen


def ask(*arguments: str) -> Result:
    command = ["lab", "bench", "accuracy", *arguments]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result


def lines(text: str, title: str) -> list[list[str]]:
    """Cells of a table's rows."""
    cells = [line.split() for line in text.splitlines()]
    below = cells[cells.index(title.split()) + 2 :]
    return list(itertools.takewhile(lambda row: row[0] in ("exact", *SPARSE), below))


def test_every_selector_is_an_engine_with_all_budgets(
    runs: Runs, model: Path, tmp_path: Path
) -> None:
    options = ["--suite", "text", "--selectors", "bounds,window,sparf", "--budgets", "0.05,0.02"]
    options += ["--compare-every", "16"]
    result = ask(*options, "--model", str(model), "--json", "--dir", str(tmp_path))
    assert [(run.selector, getattr(run, "budgets", ())) for run in runs] == [
        ("exact", (1.0,)),
        *((name, (0.05, 0.02)) for name in ("bounds", "window", "sparf")),
    ]
    exact, bounds, window, sparf = runs
    assert exact.stores != bounds.stores == window.stores != sparf.stores
    assert {run.window for run in runs} == {256}
    assert {getattr(run, "compare_every", 0) for run in runs} == {16}
    assert list(tmp_path.iterdir()) == [model]
    rows = json.loads(result.stdout)["rows"]
    assert [row["suite"] for row in rows] == ["text"] * 7
    shown = [" ".join(row) for row in lines(result.stderr, "text, 8192 tokens")]
    assert max(map(len, result.stderr.splitlines())) <= 80
    assert shown[:3] == [
        "exact - 100.0% 188.7 MB 0.0% 0.0000 2.000 100.0% - -",
        "bounds 5 % 5.0% 9.4 MB 10.0% 0.4000 +0.050 80.0% 90.0% 80.0%",
        "bounds 2 % 2.0% 3.8 MB 10.0% 1.0000 +0.125 50.0% 90.0% 80.0%",
    ]


def test_suites_run_together_each_by_its_defaults(runs: Runs, model: Path, tmp_path: Path) -> None:
    options = ["--suite", "json,recall,needles", "--selectors", "bounds", "--block-tokens", "128"]
    options += ["--contexts", "4096", "--budgets", "0.1", "--questions", "2"]
    text = ask(*options, "--model", str(model), "--dir", str(tmp_path)).output
    assert [type(run) for run in runs] == [RecallRun] * 2 + [AccuracyRun] * 2
    assert {run.block_tokens for run in runs} == {128}
    assert [run.window for run in runs] == [64, 64, 256, 256]
    last = runs[-1]
    assert isinstance(last, AccuracyRun)
    assert (last.suites, last.questions) == ((("needles", 4096), ("json", 4096)), 2)
    assert lines(text, "needles, 4096 tokens") == [
        ["exact", "-", "100.0%", "94.4", "MB", "0.0%", "2/2", "100.0%", "0.0000"],
        ["bounds", "10", "%", "10.0%", "9.4", "MB", "10.0%", "2/2", "100.0%", "0.2000"],
    ]
    assert lines(text, "json, 4096 tokens")[1][-3:] == ["2/8", "25.0%", "0.2000"]
    assert lines(text, "4096 tokens")[0][:2] == ["exact", "-"]


def test_any_option_of_sparse_reaches_the_engines(runs: Runs, model: Path, tmp_path: Path) -> None:
    given = [
        "--sparse",
        "page_policy=frequency",
        "--sparse",
        "mass=0.8",
        "--sparse",
        "prefetch=false",
    ]
    ask("--suite", "recall,text", "--quick", "--selectors", "window", "--model", str(model), *given)
    assert len(runs) == 4
    for run in runs:
        made = run.options() if isinstance(run, RecallRun) else run.engine().options()
        sparse = SSDKVConfig.from_extra_config(made).sparse
        assert (sparse.page_policy, sparse.mass, sparse.prefetch) == ("frequency", 0.8, False)


def test_budgets_may_come_on_top_of_the_window(runs: Runs, model: Path) -> None:
    ask("--suite", "text", "--selectors", "window", "--beside-window", "--model", str(model))
    assert [getattr(run, "beside_window", False) for run in runs] == [True, True]


def test_rows_that_attended_to_everything_are_no_result(runs: Runs, model: Path) -> None:
    arguments = ["lab", "bench", "accuracy", "--suite", "text", "--selectors", "adaptive"]
    result = CliRunner().invoke(app, [*arguments, "--model", str(model)], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "adaptive on text (2 of 2): some rows attended to everything" in result.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--suite", "prose"], "any of recall, text, needles, json"),
        (["--suite", "text", "--model", ""], "make text-model"),
        (["--suite", "text", "--contexts", "9000"], "numbers from 1024 to 8192"),
        (["--suite", "json", "--questions", "17"], "numbers from 1 to 16"),
        (["--suite", "json", "--questions", "2,3"], "one number"),
        (["--suite", "recall,text", "--beside-window"], "not for suite recall"),
        (["--sparse", "mass"], "NAME=VALUE"),
        (["--sparse", "mas=1"], "sparse.mas"),
        (["--sparse", "mass=high"], "sparse.mass"),
        (["--sparse", "budget=0.5"], "budget is set by --budgets"),
    ],
)
def test_nonsense_is_refused(runs: Runs, model: Path, arguments: list[str], text: str) -> None:
    if "--model" in arguments:
        arguments = arguments[: arguments.index("--model")]
    else:
        arguments = [*arguments, "--model", str(model)]
    result = CliRunner().invoke(
        app, ["lab", "bench", "accuracy", *arguments], env={"COLUMNS": "200"}
    )
    assert result.exit_code == 2
    assert text in result.output
    assert runs == []


def test_a_model_that_does_not_tell_its_size_is_refused(runs: Runs, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    del config["max_position_embeddings"]
    (model / "config.json").write_text(json.dumps(config))
    command = ["lab", "bench", "accuracy", "--suite", "text", "--model", str(model)]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "does not tell max_position_embeddings" in result.output
