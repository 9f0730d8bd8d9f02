"""The speed of sparse decode: what the bench runs, and what it makes of it, with no engine."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.kit.waiting import until
from vllm_ssdkv.cli.bench import decode
from vllm_ssdkv.cli.main import app
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.profiling.recall import bench
from vllm_ssdkv.profiling.recall.kv_size import bytes_per_token
from vllm_ssdkv.profiling.recall.run import Batch, RecallRun

Runs = list[RecallRun]

DEADLINE_S = 60.0


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """What was run: 10 steps of 0.2 s, of which a quarter is waiting; sparse in half the time."""
    seen: Runs = []

    def run(module: str, given: list[str], *_: Any) -> dict[str, Any]:  # noqa: ANN401 - of run_module
        plan = RecallRun.from_json(given[0])
        seen.append(plan)
        (batch,) = plan.batches
        exact = plan.selector == "exact"
        found = {
            "context": batch.context,
            "requests": batch.count,
            "decoded_tokens": 10 * batch.count,
            "rows_exact": 0.0,
            "decoding_steps": 10,
            "decoding_s": 2.0 if exact else 1.0,
            "decoding": {
                "bytes_read": (3 << 20) * 2.0 if exact else 4096.0 * 20,
                "read_requests": 60.0,
                "device_seconds.busiest": 2.0 if exact else 0.4,
                "device_seconds.even": 1.9 if exact else 0.3,
                "layers": 20.0,
                "attention_seconds.wait": 0.5,
                "attention_seconds.select": 0.0 if exact else 0.02,
                "attention_seconds.fetch": 0.0 if exact else 0.04,
            },
        }
        return {"batches": [found]}

    monkeypatch.setattr(bench, "run_module", run)
    return seen


def test_every_case_is_an_engine_with_its_share_of_dram(runs: Runs, tmp_path: Path) -> None:
    picture = tmp_path / "d.png"
    options = ["--contexts", "512,4096", "--batch", "1,8", "--devices", "3", "--bandwidth", "1MiB"]
    options += ["--reuse-steps", "2"]
    files = ["--json", "--plot", str(picture)]
    result = CliRunner().invoke(
        app,
        ["lab", "bench", "decode", *options, "--dir", str(tmp_path), *files],
        env={"COLUMNS": "80"},
    )
    assert result.exit_code == 0, result.output
    assert [run.selector for run in runs] == ["exact", "bounds"] * 4
    assert all(len(run.stores) == 3 for run in runs)
    assert {run.sparse["reuse_steps"] for run in runs} == {2}
    assert {run.sparse["reuse_similarity"] for run in runs} == {0.8}
    assert runs[0].throttle == ({"bandwidth": 1 << 20, "iops": 2500.0, "latency": 0.0005},)
    assert [run.batches for run in runs[::2]] == [run.batches for run in runs[1::2]]
    assert [run.dram_bytes for run in runs[::2]] == [run.dram_bytes for run in runs[1::2]]
    assert runs[0].dram_bytes < runs[-1].dram_bytes
    assert set(tmp_path.iterdir()) == {picture}
    assert picture.stat().st_size > 10_000
    exact, sparse = json.loads(result.stdout)["rows"][-2:]
    assert (exact["tokens_per_s"], sparse["tokens_per_s"]) == (40, 80)
    assert exact["parts_s"]["wait"] == pytest.approx(0.05)
    assert exact["parts_s"]["other"] == pytest.approx(0.15)
    assert (exact["io_s"], exact["io_even_s"]) == pytest.approx((0.2, 0.19))
    assert exact["overlap"] == exact["overlap_less_constant"] == pytest.approx(1.0)
    # Computing, 50 ms, takes longer than the devices. Of each of a step's two layers the latency,
    # 0.5 ms, and 3 ms to choose and to look up and check cannot be hidden.
    assert sparse["overlap"] == pytest.approx(0.1 / 0.05)
    assert sparse["constant_s"] == pytest.approx(0.0035)
    assert sparse["overlap_less_constant"] == pytest.approx(0.093 / 0.044)
    *_, line, advice = [text for text in result.output.splitlines() if "bounds" in text]
    assert "never slower than exact from 512 tokens on" in advice
    assert line.split()[:8] == ["4096", "8", "bounds", "80.0", "2.00", "1", "100.0", "2.0"]
    assert line.split()[-3:] == ["3.5", "2.00", "2.11"]


def test_cases_are_repeated_in_turn_and_compared_within_a_turn(runs: Runs, tmp_path: Path) -> None:
    options = ["--contexts", "512", "--batch", "1", "--repeats", "2", "--dir", str(tmp_path)]
    result = CliRunner().invoke(app, ["lab", "bench", "decode", *options])
    assert result.exit_code == 0, result.output
    assert [run.selector for run in runs] == ["exact", "bounds"] * 2


def test_a_quick_run_shows_each_engine_and_how_many_are_left(runs: Runs, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["lab", "bench", "decode", "--quick", "--dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert [run.batches[0].context for run in runs] == [2048, 2048, 4096, 4096]
    assert result.stderr.splitlines() == [
        "1 of 4: exact, 1 x 2048 tokens, turn 1 of 1",
        "2 of 4: bounds, 1 x 2048 tokens, turn 1 of 1",
        "3 of 4: exact, 1 x 4096 tokens, turn 1 of 1",
        "4 of 4: bounds, 1 x 4096 tokens, turn 1 of 1",
    ]


def test_of_repeats_the_medians_count() -> None:
    def turn(exact: float, sparse: float) -> list[dict[str, Any]]:
        return [{"tokens_per_s": exact}, {"tokens_per_s": sparse}]

    # Everything was slow in the last turn, which says nothing about the selector.
    exact, sparse = decode._medians([turn(10, 20), turn(12, 30), turn(2, 5)])
    assert (exact["tokens_per_s"], exact["ratio"]) == (10, 1)
    assert (sparse["tokens_per_s"], sparse["ratio"]) == (20, 2.5)
    assert sparse["ratios"] == [2, 2.5, 2.5]


def test_short_requests_are_exact_if_asked_for(runs: Runs, tmp_path: Path) -> None:
    options = ["--contexts", "512,4096", "--batch", "1", "--short-exact", "--dir", str(tmp_path)]
    options += ["--selectors", "sparf"]
    result = CliRunner().invoke(app, ["lab", "bench", "decode", *options])
    assert result.exit_code == 0, result.output
    configs = [SSDKVConfig.from_extra_config(run.options()) for run in runs]
    assert {config.exact_below for config in configs} == {4096}
    # Channels are on top where they are looked at, and nowhere else.
    assert runs[1].dram_bytes == runs[0].dram_bytes
    channels = 4096 * bytes_per_token() * 9 / 16
    assert runs[3].dram_bytes - runs[2].dram_bytes == pytest.approx(channels, rel=0.02)


def test_engines_may_be_for_longer_contexts(runs: Runs, tmp_path: Path) -> None:
    options = ["--contexts", "512,4096", "--batch", "2", "--dir", str(tmp_path)]
    options += ["--longest", "8192", "--window", "256", "--short-exact"]
    result = CliRunner().invoke(app, ["lab", "bench", "decode", *options])
    assert result.exit_code == 0, result.output
    assert {run.dram_bytes for run in runs} == {runs[0].dram_bytes}
    assert runs[0].dram_bytes > 0.2 * 2 * 8192 * bytes_per_token()
    assert all(run.engine_settings()["max_model_len"] >= 8192 for run in runs)
    configs = [SSDKVConfig.from_extra_config(run.options()) for run in runs]
    # As engines are that nobody tells anything.
    assert {config.window_tokens for config in configs} == {256}
    assert {config.exact_below for config in configs} == {4096}


def test_it_says_whose_time_a_step_takes() -> None:
    split = {"vllm": 0.001, "python": 0.0005, "native": 0.0005}
    row = {"selector": "bounds", "requests": 1, "context": 512, "whose_s": split}
    (line,) = decode._python([{**row, "python_share": 0.25, "native_calls": 40.0}])
    assert "bounds, 1 x 512 tokens: our Python takes 25.0% of a step" in line
    assert "python 0.50 ms" in line


def test_the_length_from_which_on_it_pays() -> None:
    def row(selector: str, context: int, requests: int, speed: float) -> dict[str, Any]:
        return {
            "selector": selector,
            "context": context,
            "requests": requests,
            "ratio": speed / 10,
        }

    rows = [row("exact", length, n, 10.0) for length in (512, 1024, 2048) for n in (1, 8)]
    rows += [row("bounds", 512, 1, 12.0), row("bounds", 512, 8, 20.0), row("bounds", 1024, 1, 9.0)]
    rows += [row("bounds", 1024, 8, 20.0), row("bounds", 2048, 1, 10.0), row("bounds", 2048, 8, 50)]
    assert "from 2048 tokens on" in decode._advice(rows, "bounds")
    rows[-1]["ratio"] = 0.1
    assert "slower than exact at the longest" in decode._advice(rows, "bounds")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--dir", "/no/such/folder"], "/no/such/folder is not a directory"),
        (["--contexts", "12"], "numbers from 512 to 32768"),
        (["--selectors", "best"], f"any of {', '.join(bench.SPARSE)}"),
        (["--plot", "/no/such/place/d.png"], "/no/such/place is not a directory"),
        (["--bandwidth", "10XB"], "'10XB': unknown unit 'XB'; known: KiB"),
    ],
)
def test_nonsense_is_refused(runs: Runs, arguments: list[str], text: str) -> None:
    result = CliRunner().invoke(app, ["lab", "bench", "decode", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert text in result.output
    assert runs == []


def _processes(directory: Path) -> list[Path]:
    """Those that have a directory in their command lines: the bench, and its engine."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found += [file] * (str(directory).encode() in file.read_bytes())
    return found


@pytest.mark.engine
def test_who_is_told_to_end_leaves_nothing(tmp_path: Path) -> None:
    """Neither an engine nor its stores, which are gigabytes."""
    command = [sys.executable, "-P", "-m", "vllm_ssdkv.cli.main", "lab", "bench", "decode"]
    process = subprocess.Popen([*command, "--dir", str(tmp_path), "--contexts", "512"])
    logs = tmp_path.glob
    until(lambda: any(f.stat().st_size for f in logs("*/engine.log")), "the engine's start")
    assert len(_processes(tmp_path)) == 2
    process.terminate()
    assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
    assert _processes(tmp_path) == []


def test_a_file_that_is_no_picture_is_refused(runs: Runs, tmp_path: Path) -> None:
    arguments = [
        "lab",
        "bench",
        "decode",
        "--dir",
        str(tmp_path),
        "--plot",
        str(tmp_path / "x.doc"),
    ]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert ".png" in result.output
    assert runs == []
    assert list(tmp_path.iterdir()) == []


def test_short_contexts_and_stored_prompts_are_carried_over(tmp_path: Path) -> None:
    batch = Batch(512, 3, ("copy",), 10, stored=True)
    plan = RecallRun((str(tmp_path),), "bounds", (batch,), 64, 64 << 20, 64 << 20)
    again = RecallRun.from_json(plan.to_json())
    assert again == plan
    assert SSDKVConfig.from_extra_config(again.options()).exact_below == 0
    assert [len(question.prompt) for question in batch.questions()] == [512] * 3
