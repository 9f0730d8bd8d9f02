"""``ssdkv lab reproduce``: tables, JSON, Markdown and figures."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner, Result

from tests.profiling.clusters.synthetic import trace
from vllm_ssdkv.cli.docs.papers_page import papers_page
from vllm_ssdkv.cli.main import app
from vllm_ssdkv.profiling.clusters.trace import Manifest


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["lab", "reproduce", *arguments])


def test_rows_are_printed_with_their_verdicts() -> None:
    result = run("--rows", "P2,P17")
    assert result.exit_code == 0
    assert "(s + 1) / 2" in result.stdout
    assert "miss" in result.stdout, "as it is"
    assert "FlexGen (ICML 2023)" not in result.stdout
    assert "Of 7 predicted rows" in result.stdout


def test_json_is_all_that_is_printed() -> None:
    result = run("--json", "--rows", "P26")
    found = json.loads(result.stdout)
    assert [one["row"] for one in found["results"]] == ["P26"]
    assert found["results"][0]["verdict"] == "pass"
    assert found["results"][0]["kind"] == "arithmetic"
    assert found["verdicts"]["P19"] == "miss"


def test_markdown_and_figures_are_written(tmp_path: Path) -> None:
    page, picture = tmp_path / "papers.md", tmp_path / "devices.png"
    assert run("--markdown", str(page)).exit_code == 0
    assert page.read_text().count("\n### ") == 8
    assert run("--figure", "instinfer-devices", "--plot", str(picture)).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_arguments_that_are_wrong(tmp_path: Path) -> None:
    picture = str(tmp_path / "p.png")
    for arguments, text in (
        (["--rows", "P99"], "any of P1, P2"),
        (["--figure", "swarm-entries"], "belong together"),
        (["--plot", picture], "belong together"),
        (["--figure", "nothing", "--plot", picture], "any of instinfer-devices"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2
        assert text in " ".join(result.output.replace("│", " ").split())
    result = run("--figure", "swarm-entries", "--plot", str(tmp_path / "p.txt"))
    assert (result.exit_code, "does not end in" in result.output) == (1, True)


def test_the_page_tells_misses_and_the_command_constants() -> None:
    page = papers_page()
    assert "| P17 |" in page
    assert "Misses: P7, P8, P17" in " ".join(page.split())
    assert "## Constants" not in page
    assert "host_flop_per_byte" in run("--rows", "P23").stdout


def test_traces_answer_the_rows_that_need_them(tmp_path: Path) -> None:
    made = trace("a", tokens=1024)
    Manifest({}, {"a": made.write(tmp_path)}).write(tmp_path)
    result = run("--traces", str(tmp_path), "--json", "--rows", "P13")
    assert result.exit_code == 0, result.output
    (table,) = json.loads(result.stdout)["of_traces"]
    found = {row[0]: row[3] for row in table["rows"]}
    assert list(found) == [f"P{number}" for number in range(9, 16)]
    assert ";" in found["P13"]
    assert "not measured" in found["P12"]
    (tmp_path / "manifest.json").unlink()
    result = run("--traces", str(tmp_path))
    assert (result.exit_code, "ssdkv lab reproduce:" in result.output) == (1, True)
