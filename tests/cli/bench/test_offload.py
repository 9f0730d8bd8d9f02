"""``ssdkv bench offload`` on small contexts: outputs, and wrong arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from vllm_ssdkv.cli.main import app


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "offload", *arguments])


def test_tables_plot_and_json(tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    small = ("--contexts", "512", "--batch", "1", "--selectors", "exact", "--threads", "1")
    twins = ("--ways", "host,instinfer", "--drives", "1,2", "--intervals", "1,2", "--dilation", "1")
    result = run(*small, *twins, "--dir", str(tmp_path), "--json", "--plot", str(plot))
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [row["drives"] for row in document["rows"] if row["way"] == "instinfer"] == [1, 2, 2, 2]
    assert {"Decoding", "Published figures"} <= {table["title"] for table in document["tables"]}
    assert plot.read_text().count("<svg") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["plot.svg"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ways", "host,fpga"], ["--ways", "'host,fpga': any of none,"]),
        (["--selectors", "exact,quest"], ["--selectors", "'exact,quest'"]),
        (["--drives", "1.5"], ["--drives", "whole numbers"]),
        (["--intervals", "1,3"], ["--intervals", "3 is no power of two"]),
        (["--threads", "100000"], ["--threads", "CPUs"]),
        (["--plot", "plot.txt"], [".png, .svg, .pdf"]),
    ],
)
def test_wrong_options_are_named(options: list[str], words: list[str]) -> None:
    result = run(*options)
    assert result.exit_code in (1, 2)
    assert all(word in result.output for word in words), result.output
