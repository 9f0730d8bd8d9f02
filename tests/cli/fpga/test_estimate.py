"""``ssdkv lab fpga estimate``: outputs, constants of the command line, and wrong arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from vllm_ssdkv.cli.main import app
from vllm_ssdkv.fpga_offload.results import (
    CYCLES,
    SYNTHESIS,
    Cells,
    Cycles,
    Results,
    write_results,
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    runs = [
        Cycles(kernel, 128, group, "float16", tokens, tokens * 512, tokens * 9 + 50)
        for kernel, group in (
            ("attend", 4),
            ("sparf_first", 4),
            ("sparf_second", 4),
            ("sparf_second", 1),
        )
        for tokens in (128, 4096)
    ]
    write_results(Results("a test", {}, runs), folder / CYCLES)
    cells = [Cells("core", "xcup", 128, 1, 40_000, 30_000, 73)]
    write_results(Results("a test", {}, cells), folder / SYNTHESIS)
    return folder


def run(results: Path, *arguments: str) -> Result:
    return CliRunner().invoke(
        app, ["lab", "fpga", "estimate", "--results", str(results), *arguments]
    )


def rows_of(result: Result) -> list[dict[str, object]]:
    assert result.exit_code == 0, result.output
    rows: list[dict[str, object]] = json.loads(result.stdout)["rows"]
    return rows


def test_tables_plot_and_json(results: Path, tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    result = run(results, "--contexts", "1024,8192", "--json", "--plot", str(plot))
    rows = rows_of(result)
    assert [(row["card"], row["context"]) for row in rows] == [
        (card, tokens) for card in ("smartssd", "flash-controller") for tokens in (1024, 8192)
    ]
    assert {row["bound"] for row in rows} == {"flash"}
    document = json.loads(result.stdout)
    assert document["kernel"]["origin"] == "simulated"
    assert {card["clock"]["origin"] for card in document["cards"]} == {"published"}
    assert len(document["tables"]) == 3
    drawn = plot.read_text()
    assert drawn.count("<svg") == 1
    assert all(name in drawn for name in ("SSD alone", "DDR alone", "kernel alone"))


def test_tables_are_for_people(results: Path) -> None:
    result = run(results, "--contexts", "1024", "--cards", "smartssd")
    assert result.exit_code == 0, result.output
    assert all(word in result.stdout for word in ("calibrated", "LUT of core, G = 1"))


def test_constants_of_the_command_line_count(results: Path) -> None:
    one = ("--contexts", "65536", "--cards", "smartssd", "--json")
    (before,) = rows_of(run(results, *one))
    faster = run(results, *one, "--flash", "100", "--efficiency", "1", "--clock", "100")
    (after,) = rows_of(faster)
    assert after["bound"] == "kernel"
    assert float(str(after["total_s"])) < float(str(before["total_s"]))
    (card,) = json.loads(faster.stdout)["cards"]
    assert card["flash"]["origin"] == card["clock"]["origin"] == "assumed"
    (later,) = rows_of(run(results, *one, "--start", "1000", "--chunk", "1GiB"))
    assert later["chunks"] == 8
    assert later["start_s"] == pytest.approx(0.008)
    (shared,) = rows_of(run(results, *one, "--devices", "8"))
    assert float(str(shared["total_s"])) < float(str(before["total_s"])) / 7


def test_sparf_reads_less_and_hilos_has_its_own_cycles(results: Path) -> None:
    one = ("--contexts", "65536", "--cards", "flash-controller", "--json")
    (dense,) = rows_of(run(results, *one))
    (sparse,) = rows_of(run(results, *one, "--sparf", "0.0625", "--by-page"))
    assert float(str(sparse["read_bytes"])) < float(str(dense["read_bytes"])) / 4
    by_token = run(results, *one, "--sparf", "0.0625")
    kernel = json.loads(by_token.stdout)["kernel"]
    assert kernel["origin"] == "simulated"
    assert kernel["token"] == pytest.approx(9)
    assert "cycles of a token, to choose" in run(results, *one[:-1], "--sparf", "0.5").output
    assumed = run(results, *one, "--sparf", "0.0625", "--group", "1")
    assert json.loads(assumed.stdout)["kernel"]["origin"] == "assumed"
    assert "first step was not simulated" in assumed.output
    hilos = run(results, *one, "--kernel", "hilos")
    assert json.loads(hilos.stdout)["kernel"]["origin"] == "published"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--cards", "smartssd,u250"], ["--cards", "'smartssd,u250': any of smartssd"]),
        (["--group", "3"], ["--group", "1, 2, 4, 5, 8"]),
        (["--head-size", "96"], ["--head-size", "64, 128, 256"]),
        (["--dtype", "fp8"], ["--dtype", "float16, bfloat16"]),
        (["--kernel", "vitis"], ["--kernel", "simulated, hilos"]),
        (["--contexts", "0"], ["--contexts", "numbers from 1"]),
        (["--chunk", "0"], ["--chunk"]),
        (["--plot", "plot.txt"], [".png, .svg, .pdf"]),
        (["--head-size", "64"], ["d = 64, G = 4", "was not simulated"]),
        (["--kernel", "hilos", "--group", "2"], ["no kernel for groups of 2"]),
        (["--kernel", "hilos", "--sparf", "0.5"], ["whole contexts"]),
    ],
)
def test_wrong_options_are_named(results: Path, options: list[str], words: list[str]) -> None:
    result = run(results, *options)
    assert result.exit_code in (1, 2)
    assert all(word in result.output for word in words), result.output


def test_missing_results_are_named(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert result.exit_code == 1
    assert "cycles.json" in result.output
