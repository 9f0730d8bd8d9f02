"""``ssdkv lab bench offload`` on small contexts: outputs, and wrong arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.cli.main import app
from vllm_ssdkv.profiling.offload import bench


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["lab", "bench", "offload", *arguments])


def test_tables_plot_and_json(tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    small = ("--contexts", "512", "--batch", "1", "--selectors", "exact", "--threads", "1")
    twins = ("--ways", "host,instinfer", "--drives", "1,2", "--intervals", "1,2", "--dilation", "1")
    result = run(*small, *twins, "--dir", str(tmp_path), "--json", "--plot", str(plot))
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [row["drives"] for row in document["rows"] if row["way"] == "instinfer"] == [1, 2, 2, 2]
    assert {"Decoding", "The papers' rows here"} <= {table["title"] for table in document["tables"]}
    assert plot.read_text().count("<svg") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["plot.svg"]
    # Before the tables each case has its line, beside the rate of the host and the projection.
    many = len(document["rows"]) + len(document["writes"]) + 2
    shown = [line.partition(": ")[0] for line in result.stderr.splitlines()]
    assert shown[:many] == [f"{number} of {many}" for number in range(1, many + 1)]
    assert "1 x 512 tokens, exact: instinfer, 2 x flash, a write every 2" in result.stderr


def test_a_quick_run_has_fewer_cases_and_asked_for_options_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[bench.Settings] = []

    def measure(settings: bench.Settings, *_: object) -> None:
        seen.append(settings)
        raise BenchError("it was seen")

    monkeypatch.setattr(bench, "run", measure)
    for options in ([], ["--quick"], ["--quick", "--drives", "2"]):
        assert run(*options, "--dir", str(tmp_path)).exit_code == 1
    whole, quick, asked = seen
    assert len(list(bench.cases(quick))) < len(list(bench.cases(whole))) / 2
    assert quick.contexts == [1024]
    assert quick.drives == [1, 4]
    assert (asked.contexts, asked.drives) == ([1024], [2])


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
