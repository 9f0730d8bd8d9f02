"""``ssdkv lab bench clusters`` on traces of no model: outputs, and wrong arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.profiling.clusters.synthetic import trace
from vllm_ssdkv.cli.main import app
from vllm_ssdkv.profiling.clusters.trace import Manifest


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of two traces."""
    directory = tmp_path_factory.mktemp("traces")
    made = [trace("a"), trace("b", seed=3)]
    Manifest({}, {one.name: one.write(directory) for one in made}).write(directory)
    return directory


def run(*arguments: str) -> Result:
    quick = ("--no-tokens", "--drives", "1,4", "--budgets", "0.1", "--heads", "1")
    return CliRunner().invoke(app, ["lab", "bench", "clusters", *arguments, *quick])


def test_tables_plot_and_json(traces: Path, tmp_path: Path) -> None:
    plot, text = tmp_path / "plot.svg", tmp_path / "tables.md"
    options = ("--json", "--plot", str(plot), "--markdown", str(text), "--only", "b")
    result = run(str(traces), *options)
    assert result.exit_code == 0, result.output
    tables = json.loads(result.stdout)["tables"]
    assert tables[0]["columns"] == ["method", "b"]
    assert [row[0] for row in tables[-1]["rows"]] == [f"P{n}" for n in range(9, 16)]
    assert all(f"### {table['title']}" in text.read_text() for table in tables)
    assert plot.read_text().count("<svg") == 1


def test_lengths_cut_contexts(traces: Path) -> None:
    result = run(str(traces), "--json", "--only", "a", "--lengths", "1024,1536")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["tables"][0]["columns"] == ["method", "a 1024", "a 1536"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--only", "c"], ["--only c", "a, b"]),
        (["--lengths", "64"], ["--lengths"]),
        (["--batches", "1.5"], ["--batches", "whole numbers"]),
        (["--plot", "plot.txt"], [".png, .svg, .pdf"]),
    ],
)
def test_wrong_options_are_named(traces: Path, options: list[str], words: list[str]) -> None:
    result = run(str(traces), *options)
    assert result.exit_code in (1, 2)
    assert all(word in result.output for word in words), result.output


def test_a_directory_without_traces_names_the_way(tmp_path: Path) -> None:
    result = run(str(tmp_path))
    assert result.exit_code == 1
    assert "ssdkv lab profile" in result.output
