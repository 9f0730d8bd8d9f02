"""``ssdkv lab fpga synth``: which designs are asked for, what is written, and missing tools."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from vllm_ssdkv.cli.main import app
from vllm_ssdkv.fpga_offload import synth
from vllm_ssdkv.fpga_offload.results import Cells, read_synthesis


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["lab", "fpga", "synth", *arguments])


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts at once, in place of minutes of Yosys."""

    def synthesise(
        design: str, family: synth.Family, head_size: int, group: int, timeout_s: float
    ) -> Cells:
        assert timeout_s == 60
        return Cells(design, family, head_size, group, lut=52272, ff=10, dsp=73 * group)

    monkeypatch.setattr(synth, "synthesise", synthesise)
    monkeypatch.setattr(synth, "yosys_version", lambda: "0.70")


@pytest.mark.usefixtures("counted")
def test_each_design_and_group_is_counted_and_written(tmp_path: Path) -> None:
    path = tmp_path / "synthesis.json"
    options = ("--designs", "core,axi", "--families", "xcup,xc7", "--groups", "1,4")
    result = run(*options, "--timeout", "60", "--output", str(path), "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    found = [(row["design"], row["family"], row["group"]) for row in document["rows"]]
    once = [("core", 1), ("core", 4), ("axi", 1)]
    assert found == [(name, family, group) for family in ("xcup", "xc7") for name, group in once]
    assert len(read_synthesis(path).rows) == len(document["rows"])
    assert run("--groups", "4,8", "--timeout", "60", "--output", str(path)).exit_code == 0
    assert len(read_synthesis(path).rows) == len(document["rows"]) + 1
    assert read_synthesis(path).tools == {"yosys": "0.70"}
    _, shares = document["tables"]
    assert shares["rows"][0][:4] == ["core", 1, "smartssd", pytest.approx(10)]


def test_missing_tools_name_what_brings_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSDKV_FPGA_BUILD", str(tmp_path))
    result = run()
    assert result.exit_code == 1
    assert "make fpga" in result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--designs", "core,gpu"], ["--designs", "any of core"]),
        (["--families", "ecp5"], ["--families", "xcup, xc7"]),
        (["--groups", "3"], ["--groups", "1, 2, 4, 5, 8"]),
        (["--head-size", "96"], ["--head-size", "64, 128, 256"]),
    ],
)
def test_wrong_options_are_named(options: list[str], words: list[str]) -> None:
    result = run(*options)
    assert result.exit_code == 2
    assert all(word in result.output for word in words), result.output
