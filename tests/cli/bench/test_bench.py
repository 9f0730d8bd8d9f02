"""``ssdkv lab bench io``: a whole run in miniature, and what it refuses."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from vllm_ssdkv.cli.main import app
from vllm_ssdkv.profiling.bench_io import fio, plot
from vllm_ssdkv.profiling.bench_io.rivals import contender_names

TINY = ["--quick", "--seconds", "0.01", "--repeats", "1", "--file-size", "8MiB"]


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["lab", "bench", "io", *arguments])


def test_a_quick_run_measures_everybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    monkeypatch.chdir(tmp_path)
    result = bench("a", "./b", *TINY, "--size", "64KiB", "--depths", "2", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["schema"] == 1
    assert set(found) == {
        "schema", "date", "machine", "settings", "contenders", "absent", "left_out", "rows",
    }  # fmt: skip
    assert set(found["contenders"]) | set(found["absent"]) == set(contender_names())
    assert {"ssdkv threads", "vllm fs", "preadv threads", "executor map"} <= set(
        found["contenders"]
    )
    assert found["left_out"] == []
    assert str(tmp_path) not in result.stdout
    cases = {(row["op"], row["size"], row["depth"], row["devices"]) for row in found["rows"]}
    assert cases == {(op, 65536, 2, n) for op in ("read", "write") for n in (1, 2)}
    assert len(found["rows"]) == 4 * len(found["contenders"])
    for row in found["rows"]:
        assert row["error"] is None
        if row["refused"] is not None:  # one directory is all it takes
            assert (row["contender"], row["devices"]) == ("lmcache", 2)
            continue
        assert row["bytes_per_s"] == pytest.approx(row["iops"] * row["size"])
        assert len(row["samples_bytes_per_s"]) == 1
        assert (row["of_fio"] is None) == ("fio" not in found["contenders"])
        if row["contender"] == "fio":
            assert row["of_fio"] == 1
    assert "read 64 KiB, depth 2, 2 devices" in result.stderr
    assert all(list(directory.iterdir()) == [] for directory in directories)


def test_emulated_devices_run_inside_our_engines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        result = bench(str(tmp_path), *TINY, "--size", "8KiB", "--emulate", "3", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["settings"]["model"]["dilation"] == 47
    assert {row["devices"] for row in found["rows"]} == {1, 2, 3}
    assert all(name.startswith("ssdkv ") for name in found["contenders"])
    assert "emulated" in found["absent"]["fio"]
    # The model is a limit: nobody is faster than the drive that is emulated.
    assert all(0 < row["of_model"] < 1.05 for row in found["rows"])
    assert not caplog.records
    assert list(tmp_path.iterdir()) == []


def test_without_fio_no_column_is_empty_and_the_last_line_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fio.shutil, "which", lambda _name: None)
    options = ["--size", "8KiB", "--ops", "read", "--only", "fio,preadv threads"]
    result = bench(str(tmp_path), *TINY, *options)
    assert result.exit_code == 0, result.output
    *_, last = result.stdout.strip().splitlines()
    assert last == (
        "No ratios to fio: fio is not installed (`apt install fio` or `dnf install fio`)."
    )
    (columns,) = (line for line in result.stdout.splitlines() if "MB/s" in line and "IOPS" in line)
    assert columns.split() == ["MB/s", "IOPS", "CPU", "s/GB", "CPU", "us/IO"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{dir}", "{dir}"], ["DIR", "twice"]),
        (["{dir}/missing"], ["DIR", "not a directory"]),
        (["{dir}", "--size", "5000B"], ["--size", "multiple of 4 KiB"]),
        (["{dir}", "--size", "4"], ["--size", "multiple of 4 KiB"]),
        (["{dir}", "--size", "1GiB"], ["--size", "64 MiB"]),
        (["{dir}", "--depths", "0"], ["--depths", "1..1024"]),
        (["{dir}", "--depths", "1,x"], ["--depths", "'x'"]),
        (["{dir}", "--ops", "readwrite"], ["--ops", "neither read nor write"]),
        (["{dir}", "--only", "dd"], ["--only", "ssdkv threads"]),
        (["{dir}", "--repeats", "0"], ["--repeats"]),
        (["{dir}", "--seconds", "0"], ["--seconds"]),
        (["{dir}", "--emulate", "65"], ["--emulate"]),
        (["{dir}", "--file-size", "16MiB", "--size", "16MiB"], ["--file-size", "32 MiB"]),
        (["{dir}", "--file-size", "1,5GiB"], ["--file-size", "a comma may begin decimals"]),
        (["{dir}", "--plot", "{dir}/no/x.png"], ["--plot", "not a directory"]),
        ([], ["DIR"]),
    ],
)  # fmt: skip
def test_bad_options_are_named(tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    result = bench(*(text.format(dir=tmp_path) for text in arguments))
    assert result.exit_code == 2
    text = " ".join(result.output.replace("│", " ").split())
    assert [word for word in words if word not in text] == []
    assert list(tmp_path.iterdir()) == []


def test_a_plot_that_cannot_be_drawn_stops_the_run_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = bench(str(tmp_path), "--plot", str(tmp_path / "x.txt"))
    assert (result.exit_code, ".svg" in result.stderr) == (1, True)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    result = bench(str(tmp_path), "--plot", str(tmp_path / "x.png"))
    assert (result.exit_code, "pip install matplotlib" in result.stderr) == (1, True)
    assert list(tmp_path.iterdir()) == []


def test_a_plot_has_a_panel_per_direction(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        {"op": op, "size": size, "depth": 1, "devices": 1, "contender": name, "bytes_per_s": 1e9}
        for op in ("read", "write")
        for size in (4096, 65536)
        for name in ("fio", "ssdkv threads")
    ]
    plot.plot(rows, tmp_path / "x.svg")
    text = (tmp_path / "x.svg").read_text()
    assert text.count('id="axes_') == 2
