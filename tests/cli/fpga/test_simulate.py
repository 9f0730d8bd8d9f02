"""``ssdkv lab fpga simulate``: the HLS kernels, the RTL where it is built, and wrong arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.fpga_offload.needs import needs_rtlsim
from vllm_ssdkv.cli.main import app


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["lab", "fpga", "simulate", *arguments])


def rows_of(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    rows: list[dict[str, Any]] = json.loads(result.stdout)["rows"]
    return rows


def test_the_hls_kernels_agree_with_float64_and_make_digests() -> None:
    shape = ("--head-size", "64", "--group", "5", "--dtype", "bfloat16")
    rows = rows_of(run(*shape, "--tokens", "1,77,300", "--checksum", "--json"))
    assert [row["tokens"] for row in rows] == [1, 77, 300]
    assert all(row["error"] < 1e-5 and row["holds"] for row in rows)
    assert {row["wrong_digests"] for row in rows} == {0}


@needs_rtlsim(64, 2)
def test_the_rtl_agrees_with_float64_and_counts_cycles() -> None:
    shape = ("--backend", "rtlsim", "--head-size", "64", "--group", "2")
    (row,) = rows_of(run(*shape, "--tokens", "256", "--json"))
    assert row["holds"]
    assert 0 < row["line_rate"] <= 1
    (stalled,) = rows_of(run(*shape, "--tokens", "256", "--stalls", "0.3", "--json"))
    assert stalled["holds"]
    assert stalled["cycles"] > row["cycles"]


def test_a_table_is_for_people() -> None:
    result = run("--tokens", "16", "--head-size", "64")
    assert result.exit_code == 0, result.output
    assert "csim, d = 64, G = 1, float16" in result.stdout


def test_missing_models_name_what_makes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSDKV_FPGA_BUILD", str(tmp_path))
    result = run("--backend", "rtlsim")
    assert result.exit_code == 1
    assert "make fpga" in result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--backend", "xrt"], ["--backend", "csim, rtlsim"]),
        (["--tokens", "0"], ["--tokens", "numbers from 1"]),
        (["--group", "3"], ["--group", "1, 2, 4, 5, 8"]),
        (["--dtype", "float32"], ["--dtype", "float16, bfloat16"]),
        (["--stalls", "0.5"], ["csim has no bus"]),
    ],
)
def test_wrong_options_are_named(options: list[str], words: list[str]) -> None:
    result = run(*options)
    assert result.exit_code == 2
    assert all(word in result.output for word in words), result.output
