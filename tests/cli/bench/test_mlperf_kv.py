"""``ssdkv lab bench mlperf-kv``: the workload by its description, and a short run on a store."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.cli.main import app
from vllm_ssdkv.profiling.mlperf_kv.bench import Settings, geometry_of, latency, run
from vllm_ssdkv.profiling.mlperf_kv.workload import PERSONAS, TURNS, turns
from vllm_ssdkv.profiling.simulation.model_shape import ModelShape, find_model

TINY = find_model("tiny-1b")


@pytest.mark.parametrize("user", [0, 1, 2, 3])
def test_turns_are_those_of_the_users_kind(user: int) -> None:
    persona = PERSONAS[user % 3]
    found = list(itertools.islice(turns(user, 42), 200))
    assert found == list(itertools.islice(turns(user, 42), 200))
    assert found != list(itertools.islice(turns(user, 43), 200))
    for turn in found:
        assert persona.prompt[0] <= turn.tokens <= persona.prompt[1]
        assert persona.pause_s[0] <= turn.pause_s <= persona.pause_s[1]
        # Prompts of 10,000 tokens are written only; others read for every 32 tokens answered.
        assert (turn.reads == 0) == (turn.tokens >= 10_000)
        if turn.reads:
            assert -(-persona.answer[0] // 32) <= turn.reads <= -(-persona.answer[1] // 32)
    assert [turn.first for turn in found[:TURNS]] == [True, *[False] * (TURNS - 1)]
    assert {turn.system for turn in found} == {None, 0, 1, 2}
    short = next(turns(user, 42, 0.1))
    assert short.tokens == max(1, round(found[0].tokens * 0.1))


def test_bytes_of_a_token_are_those_of_the_benchmarks_table() -> None:
    assert TINY.kv_bytes_per_token() == 24_576
    assert find_model("llama-3.1-8b").kv_bytes_per_token() == 131_072
    assert find_model("llama-3.1-70b").kv_bytes_per_token() == 327_680
    assert geometry_of(TINY).payload_bytes * 12 == 16 * 24_576
    state = ModelShape.of(
        {
            "model_type": "mamba",
            "hidden_size": 64,
            "state_size": 8,
            "num_hidden_layers": 2,
            "vocab_size": 1,
        },
        name="state",
    )
    with pytest.raises(BenchError, match="--model state: no layer has KV"):
        geometry_of(state)


def test_latencies() -> None:
    assert latency([], 0.95) is None
    assert latency([1.0], 0.5) == 1.0
    assert latency([float(n) for n in range(1, 101)], 0.95) == 95.0


def test_a_short_run_reads_from_the_drives_what_it_wrote(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    measured = run(
        Settings(
            [tmp_path / "a", tmp_path / "b"],
            TINY,
            256 * MIB,
            users=3,
            seconds=1.5,
            scale=0.02,
            dram=64 * MIB,
        )
    )
    assert measured.requests > 0
    assert measured.cached_tokens > 0
    assert measured.written_bytes > 0
    assert measured.device_share == pytest.approx(1, abs=0.02), "DRAM is no tier"
    assert 0 < measured.hit_rate <= 1
    assert len(measured.read_s) > measured.requests / 2
    assert list(measured.read_s) == sorted(measured.read_s)
    assert list((tmp_path / "a").iterdir()) == list((tmp_path / "b").iterdir()) == []


def test_the_command_prints_json_and_refuses_what_cannot_be(tmp_path: Path) -> None:
    runner = CliRunner()
    common = ["lab", "bench", "mlperf-kv", str(tmp_path), "--capacity", "256MiB"]
    small = ["--users", "1", "--seconds", "0.5", "--scale", "0.01"]
    result = runner.invoke(app, [*common, *small, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["model"] == "tiny-1b"
    assert found["read_gb_per_s"] >= 0
    assert {"cached_tokens_per_s", "write_gb_per_s", "read_p95_s"} <= set(found)
    result = runner.invoke(app, [*common, *small])
    assert "No MLPerf result" in result.stdout
    for arguments, text in (
        (["--users", "64"], "--capacity: the store has"),
        (["--model", "nothing"], "nothing"),
    ):
        result = runner.invoke(app, [*common, *arguments])
        assert (result.exit_code, text in result.stderr) == (1, True)
    result = runner.invoke(app, [*common, str(tmp_path)])
    assert result.exit_code == 2
