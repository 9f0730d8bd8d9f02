"""``ssdkv top`` against a server of recorded pages."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from itertools import islice

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from tests.cli.metric_pages import page, served
from tests.cli.monitor.test_metrics_sample import AFTER, BEFORE, THEIRS_AFTER, THEIRS_BEFORE, sample
from vllm_ssdkv.cli.main import app
from vllm_ssdkv.cli.monitor.metrics_sample import Sample
from vllm_ssdkv.cli.monitor.metrics_scrape import page_url
from vllm_ssdkv.cli.monitor.screen import screen
from vllm_ssdkv.cli.monitor.top import samples

PAGES = (page(BEFORE, THEIRS_BEFORE), page(AFTER, THEIRS_AFTER))
SHORT = ("--interval", "0.1")
PATIENCE_S = 120.0
HEEDING = """
import signal
from vllm_ssdkv.cli.main import app
signal.signal(signal.SIGINT, signal.default_int_handler)
app()
"""
"""The command, as from a terminal: what a shell starts in the background, the tests perhaps, has
its children ignore interrupts."""


def top(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["top", *SHORT, *arguments])


def shown(found: Sample, problem: str = "", width: int = 120) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(screen(found, problem))
    return console.export_text()


def test_one_sample_for_people() -> None:
    with served(*PAGES) as url:
        result = top(url, "--once")
    assert result.exit_code == 0, result.output
    for text in (
        "some/model  page, uring, exact",
        "3 running, 2 waiting",
        "85.0% now, 72.5% since the start",
        "ssd ",
        "70 of 80 blocks now, up to 100: 60 ready, 5 retained, 10 pinned, 30 free",
        "75.0% of 8 frames, 2 not yet written",
        "checksum_failures 2",
        "96 s, 3,150 prompt tokens not computed",
        " a day at this rate; drives last ",
    ):
        assert text in result.stdout
    (row,) = [line.split() for line in result.stdout.splitlines() if line.startswith("/a")]
    assert row[:3] + row[-1:] == ["/a", "in", "use", "4"]


def test_one_sample_as_json() -> None:
    with served(*PAGES) as url:
        result = top(url, "--once", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert set(found) == {field.name for field in dataclasses.fields(Sample)}
    assert found["url"] == f"{url}/metrics"
    assert found["restored_tokens"] == {"dram": 150, "ssd": 3000}
    assert found["prompt_tokens_per_s"] == pytest.approx(2000 / found["seconds"])
    assert [device["new_errors"] for device in found["devices"]] == [3]


@pytest.mark.parametrize("flags", [["--once"], ["--json"], []])
def test_without_a_server_it_fails(flags: list[str]) -> None:
    with served(404) as url:
        result = top(url, *flags)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"ssdkv top: {url}/metrics answers 404" in result.stderr
    result = top("file:///x", *flags)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "file:///x is not the URL of a server" in result.stderr


def test_a_server_that_goes_away_is_a_failure_of_one_sample() -> None:
    with served(PAGES[0], 503) as url:
        result = top(url, "--once", "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "answers 503" in result.stderr


def test_a_server_that_comes_back_is_watched_on() -> None:
    with served(PAGES[1], 503, PAGES[0], PAGES[1]) as url:
        found = list(islice(samples(page_url(url), 0.05), 3))
    assert found[0][0] is None
    assert "answers 503" in found[0][1]
    restarted, later = found[1][0], found[2][0]
    assert isinstance(restarted, Sample)
    assert isinstance(later, Sample)
    assert restarted.seconds * restarted.prompt_tokens_per_s == pytest.approx(2000), "counted anew"
    assert later.seconds * later.prompt_tokens_per_s == pytest.approx(2000)


def test_a_problem_is_shown_above_the_last_sample() -> None:
    text = shown(sample(), "the server is away")
    assert text.index("the server is away") < text.index("3 running, 2 waiting")
    assert "dram 0 pages/s, ssd 32 pages/s" in text


def test_eighty_columns_are_enough() -> None:
    """Nothing but paths is folded or cut; each of three devices has its numbers on one line."""
    fast = dataclasses.replace(
        sample().devices[0],
        device="/mnt/nvme0/kv",
        **{"reads_per_s": 1_234_567.0, "read_bytes_per_s": 14.2e9, "written_bytes_per_s": 99.94e6},
    )
    text = shown(dataclasses.replace(sample(), devices=(fast,) * 3), width=80)
    assert "…" not in text
    rows = [line.split()[-11:] for line in text.splitlines() if " in use " in line]
    assert [row[1:] for row in rows] == [
        ["use", "75.0%", "14k", "3.00", "1,235k", "99.9", "10.00", "10.0", "8.0", "4"]
    ] * 3


def test_names_from_the_server_are_no_markup() -> None:
    found = sample()
    device = dataclasses.replace(found.devices[0], device="/mnt/[bold]x", in_service=False)
    text = shown(dataclasses.replace(found, models=("[red]m",), devices=(device,)))
    assert "[red]m" in text
    assert "/mnt/[bold]x" in text
    assert "OUT" in text


def test_an_engine_says_whether_its_node_answers() -> None:
    assert "node" not in shown(sample())
    assert "slots" in shown(sample())
    for answers, text in ((True, "node      answers"), (False, "node      DOES NOT ANSWER")):
        found = shown(dataclasses.replace(sample(), node_answers=answers))
        assert text in found
        assert "slots" not in found, "how full it is, the node shows"


def test_without_failures_it_says_so() -> None:
    quiet = dataclasses.replace(sample(), troubles={"load_failures": 0})
    assert "no failures since the start" in shown(quiet)


def test_ctrl_c_ends_json_cleanly() -> None:
    command = [sys.executable, "-P", "-c", HEEDING, "top", "--json", *SHORT]
    with (
        served(*PAGES) as url,
        subprocess.Popen(
            [*command, url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(2)]
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert [json.loads(line)["slots"] for line in lines] == [100, 100]
    assert (process.returncode, errors) == (0, "")


def test_ctrl_c_gives_the_terminal_back() -> None:
    """On a terminal it takes the whole screen, and leaves it as it was."""
    ours, its = pty.openpty()
    command = [sys.executable, "-P", "-c", HEEDING, "top", *SHORT]
    with served(*PAGES) as url:
        process = subprocess.Popen(
            [*command, url],
            stdin=its,
            stdout=its,
            stderr=its,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"},
        )
        os.close(its)
        try:
            seen = _read_until(ours, b"72.5% since the start")
            process.send_signal(signal.SIGINT)
            seen += _read_until(ours, b"\x1b[?1049l")
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
            process.wait(PATIENCE_S)
            os.close(ours)
    assert b"\x1b[?1049h" in seen
    assert b"Aborted" not in seen


def _read_until(fd: int, text: bytes) -> bytes:
    seen = b""
    os.set_blocking(fd, False)
    deadline = time.monotonic() + PATIENCE_S
    while text not in seen:
        assert time.monotonic() < deadline, seen[-2000:]
        try:
            seen += os.read(fd, 1 << 16)
        except BlockingIOError:
            time.sleep(0.02)
    return seen
