"""A measurement in another process: its rows come back, and so does what went wrong."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling import measuring_process
from vllm_ssdkv.profiling.measuring_process import add_hidden_options, measured, run_measurement


def twice(job: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"value": 2 * job["value"]}]


def parse(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    add_hidden_options(parser, {"twice": twice})
    return parser.parse_args(options)


def test_hidden_options_say_what_to_measure(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    asked = parse("--measure", "twice", "--job", '{"value": 21}', "--json", str(out))
    assert measured(asked, {"twice": twice})
    assert json.loads(out.read_text()) == [{"value": 42}]


def test_without_them_nothing_is_measured() -> None:
    assert not measured(parse(), {"twice": twice})


def test_a_failure_says_which_measurement_and_why() -> None:
    with pytest.raises(BenchError, match=r"(?s)bench_ttft: no_such failed.*invalid choice"):
        run_measurement("bench_ttft", "no_such", {})


def test_a_measurement_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, timeout: float, **__: object) -> None:
        raise subprocess.TimeoutExpired("python", timeout)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(BenchError, match="bench_ttft: fill did not end in 900 s"):
        run_measurement("bench_ttft", "fill", {})


def test_the_model_is_that_of_the_package() -> None:
    assert (measuring_process.MODEL / "config.json").is_file()
