"""``ssdkv lab bench ttft``: what it asks for and what it prints; engines are stood for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.cli.main import app
from vllm_ssdkv.profiling import bench_ttft
from vllm_ssdkv.profiling.recall.recall import MODEL_DIR

Jobs = list[tuple[str, dict[str, Any]]]


def ttft(*arguments: object) -> Result:
    command = ["lab", "bench", "ttft", *map(str, arguments)]
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, command)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    """What engines were started for; a hit takes half as long as computing."""
    seen: Jobs = []

    def run(
        measure: Callable[..., object], job: dict[str, Any], environment: dict[str, str]
    ) -> list[dict[str, Any]]:
        measurement = measure.__name__
        assert environment["OMP_NUM_THREADS"] == "1"
        seen.append((measurement, job))
        assert all(Path(device["path"]).is_dir() for device in job["devices"])
        if measurement == "fill":
            return []
        row = {"drive": job["drive"], "load": job["load"], "tokens": 512}
        times = {"ttft_computed": 0.1, "ttft_ssd": 0.05, "ttft_dram": 0.01}
        ratios = {"ratio_ssd": 0.5, "ratio_dram": 0.1, "loaded_ssd": 1.0, "loaded_dram": 1.0}
        speed = {"load_bytes_per_s": None, "load_per_engine": None, "load_per_batch": None}
        parts = []
        if job["load"] == "always":
            speed = {"load_bytes_per_s": 1.5e9, "load_per_engine": 0.75, "load_per_batch": 0.93}
            parts = [0.02, 0.001, 0.029]
        return [{**row, **times, **ratios, **speed, "hit_parts_s": parts}]

    monkeypatch.setattr(bench_ttft, "run_measurement", run)
    return seen


def test_one_store_is_measured_in_every_way(jobs: Jobs, tmp_path: Path) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    given = [word for place in places for word in ("--dir", place)]
    result = ttft(*given, "--json", "--repeats", "3", "--bandwidth", "1MiB")
    assert result.exit_code == 0, result.output
    assert [name for name, _ in jobs] == ["fill"] + ["measure"] * 4
    assert len({json.dumps(job["devices"]) for _, job in jobs}) == 1, "the same store"
    assert {(job["model"], job["repeats"]) for _, job in jobs} == {(str(MODEL_DIR), 3)}
    slow = [{"bandwidth": 1 << 20, "latency": 0.02}]
    assert [job["throttle"] for _, job in jobs] == [[], [], [], slow, slow]
    assert [row["load"] for row in json.loads(result.stdout)] == ["always", "auto"] * 2
    (first, *_) = [
        line.split() for line in result.stderr.splitlines() if "throttled" in line and "%" in line
    ]
    parts = ["20.0", "1.0", "29.0"]
    times = ["100.0", "50.0", *parts, "100%", "0.50", "10.0", "100%", "0.10"]
    assert first[1:] == ["always", "512", *times, "1500", "0.93", "0.75"]
    assert "0.10     -             -            -" in result.stderr, "nothing was loaded"
    assert [list(place.iterdir()) for place in places] == [[], []], "nothing is left"


def test_an_engine_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(*_: object, **__: object) -> list[dict[str, Any]]:
        raise BenchError("fill failed:\nno memory")

    monkeypatch.setattr(bench_ttft, "run_measurement", run)
    result = ttft("--dir", tmp_path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "ssdkv lab bench ttft: fill failed:\nno memory" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_memory_and_disk_grow_with_the_models_kv(jobs: Jobs, tmp_path: Path) -> None:
    """Llama 3.1 8B: 128 KiB per token; the longest hit is 8,192 tokens."""
    large = {"num_hidden_layers": 32, "num_key_value_heads": 8, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps({**large, "num_attention_heads": 32}))
    fast = ("--bandwidth", "40MiB")
    result = ttft("--dir", tmp_path, "--model", tmp_path, "--repeats", "1", *fast)
    assert result.exit_code == 0, result.output
    ((_, job), *_) = jobs
    hit = 8192 * 128 << 10
    assert min(job["hbm_bytes"], job["dram_bytes"]) > hit
    assert job["devices"][0]["capacity"] > 5 * 16_320 * 128 << 10
    jobs.clear()
    assert ttft("--dir", tmp_path).exit_code == 0
    assert jobs[0][1]["hbm_bytes"] == 128 << 20, "the demo's model is small"
    assert max(bench_ttft.WARM_UP) == bench_ttft.WARM_UP[0] == max(bench_ttft.LENGTHS)


def test_a_drive_too_slow_for_the_models_kv_is_told_at_once(jobs: Jobs, tmp_path: Path) -> None:
    large = {"num_hidden_layers": 32, "num_key_value_heads": 8, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps({**large, "num_attention_heads": 32}))
    result = ttft("--dir", tmp_path, "--model", tmp_path)
    assert result.exit_code == 1
    text = "the longest hit, 1 GiB, would take 512 s, and has 60 s: give 35 MiB at least"
    assert f"--bandwidth: {text}" in result.stderr
    assert jobs == []


def test_a_model_without_config_is_told(jobs: Jobs, tmp_path: Path) -> None:
    result = ttft("--dir", tmp_path, "--model", tmp_path)
    assert result.exit_code == 1
    assert f"--model: {tmp_path / 'config.json'} cannot be read: No such file" in result.stderr
    (tmp_path / "config.json").write_text("[]")
    assert "does not tell layers" in ttft("--dir", tmp_path, "--model", tmp_path).stderr
    assert jobs == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--bandwidth", "fast"), "--bandwidth"),
        (("--dir", "/no/such/folder"), "/no/such/folder is not a directory"),
        (("--model", "/no/such/model"), "--model"),
    ],
)
def test_wrong_arguments_are_refused_at_once(
    jobs: Jobs, arguments: tuple[str, ...], text: str
) -> None:
    result = ttft(*arguments)
    assert result.exit_code == 2
    assert text in result.stderr
    assert jobs == []
