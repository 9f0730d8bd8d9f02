"""``ssdkv top``: a running server, live, from its ``/metrics``."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Final

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vllm_ssdkv.cli.monitor.metrics_sample import DeviceSample, Sample, compare
from vllm_ssdkv.cli.monitor.metrics_scrape import Scrape, ScrapeError, fetch, page_url

FAILED: Final = 1
_URL: Final = "http://127.0.0.1:8000"
_BAD: Final = "bold red"


def screen(sample: Sample, problem: str = "") -> Group:
    """The sample for people; ``problem``: why it is not the newest, empty when it is."""
    at = datetime.fromtimestamp(sample.time).astimezone()
    head = Text.assemble(
        (f"{', '.join(sample.models) or 'no model yet'}", "bold"),
        f"  {'; '.join(sample.in_force)}  {at:%H:%M:%S}, over {sample.seconds:.1f} s",
    )
    trouble = {name: count for name, count in sample.troubles.items() if count}
    lines = [head]
    if problem:
        lines.append(Text(problem, _BAD))
    bottom = (
        Text(", ".join(f"{name} {count}" for name, count in trouble.items()), _BAD)
        if trouble
        else Text("no failures since the start", "green")
    )
    return Group(*lines, Text(), _server(sample), Text(), _devices(sample.devices), Text(), bottom)


def _server(sample: Sample) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    per_second = sample.restored_tokens_per_s
    used = sample.slots - sample.slots_free
    rows = [
        ("requests", f"{sample.requests_running} running, {sample.requests_waiting} waiting"),
        (
            "tokens/s",
            f"{sample.prompt_tokens_per_s:,.0f} prompt, "
            f"{sample.generation_tokens_per_s:,.1f} generated",
        ),
        (
            "hit rate",
            f"{_percent(sample.hit_rate)} now, {_percent(sample.hit_rate_since_start)} "
            "since the start",
        ),
        (
            "restored",
            "; ".join(
                f"{tier} {per_second[tier]:,.0f} tokens/s, {count:,} since the start"
                for tier, count in sample.restored_tokens.items()
            ),
        ),
        (
            "slots",
            f"{_percent(_part(used, sample.slots))} of {sample.slots:,}: "
            f"{sample.slots_ready:,} ready, {sample.slots_pinned:,} pinned, "
            f"{sample.slots_free:,} free",
        ),
        (
            "DRAM",
            f"{_percent(_part(sample.dram_frames_used, sample.dram_frames))} of "
            f"{sample.dram_frames:,} frames, {sample.dram_frames_dirty:,} not yet written",
        ),
        ("HBM", _percent(sample.hbm_used)),
    ]
    if any(sample.context_pages_per_s.values()):
        pages = sample.context_pages_per_s.items()
        rows.append(("context", ", ".join(f"{tier} {n:,.0f} pages/s" for tier, n in pages)))
    for name, value in rows:
        table.add_row(name, value)
    return table


def _devices(devices: tuple[DeviceSample, ...]) -> Table:
    """On 80 columns only the paths are folded."""
    table = Table(box=None, pad_edge=False)
    table.add_column("\nDevice", overflow="fold")
    table.add_column("\nState", no_wrap=True)
    work = [f"{past}\n{unit}" for past in ("Read", "Write") for unit in ("MB/s", "ms", "IOPS")]
    for name in ("\nShare", *work, "\nQueue", "\nErrors"):
        table.add_column(name, justify="right", no_wrap=True)
    for device in devices:
        table.add_row(
            Text(device.device),
            _state(device),
            _percent(device.share),
            _short(device.read_bytes_per_s / 1e6),
            _milliseconds(device.read_latency_s),
            _short(device.reads_per_s),
            _short(device.written_bytes_per_s / 1e6),
            _milliseconds(device.write_latency_s),
            _short(device.writes_per_s),
            "-" if device.queue_depth is None else f"{device.queue_depth:.1f}",
            Text(f"{device.errors}", _BAD if device.new_errors else ""),
        )
    return table


def _state(device: DeviceSample) -> Text:
    if device.in_service is None:
        return Text("unknown")
    return Text("in use", "green") if device.in_service else Text("OUT", _BAD)


def _part(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _short(number: float) -> str:
    """At most five characters up to 10 million."""
    if number < 100:
        return f"{number:.1f}"
    return f"{number:,.0f}" if number < 10_000 else f"{number / 1000:,.0f}k"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"


def samples(url: str, interval_s: float) -> Iterator[tuple[Sample | None, str]]:
    """A sample after each interval, without end, and the problem of the last scrape or nothing.

    A server that goes away later is tried again; meanwhile there are no samples, only problems.
    The next one then covers the whole gap.

    Raises:
        ScrapeError: the first scrape failed.
    """
    older = fetch(url)
    due = older.at
    while True:
        due = max(due + interval_s, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
        newer, problem = _try(url)
        if newer is None:
            yield None, problem
        else:
            yield compare(older, newer, url, time.time()), ""
            older = newer


def _try(url: str) -> tuple[Scrape | None, str]:
    try:
        return fetch(url), ""
    except ScrapeError as error:
        return None, str(error)


def _print(url: str, interval_s: float, console: Console, *, as_json: bool, once: bool) -> None:
    """One sample after the other.

    Raises:
        ScrapeError: the server is not there; later only where one sample is wanted.
    """
    for sample, problem in samples(url, interval_s):
        if sample is None:
            if once:
                raise ScrapeError(problem)
            typer.echo(problem, err=True)
        elif as_json:
            typer.echo(json.dumps(dataclasses.asdict(sample)))
        else:
            console.print(screen(sample))
        if once:
            return


def _watch(url: str, interval_s: float, console: Console) -> None:
    """The newest sample, on the whole screen."""
    waiting = Text(f"{url}: the first rates come in {interval_s:g} s")
    last: Sample | None = None
    stream = samples(url, interval_s)
    with Live(waiting, console=console, screen=True, auto_refresh=False) as live:
        for sample, problem in stream:
            last = sample or last
            shown = Text(problem, _BAD) if last is None else screen(last, problem)
            live.update(shown, refresh=True)


def top(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Address of vllm serve.", show_default=True)
    ] = _URL,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds between two looks.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="One sample, after one interval.")] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object per line and interval, nothing else."),
    ] = False,
) -> None:
    """Watch a running server: requests, hits, tiers, and each SSD. Ctrl-C ends it.

    Rates are means over the interval. An idle engine does not report: its numbers stand still.
    """
    console = Console()
    try:
        page = page_url(url)
        if console.is_terminal and not (once or as_json):
            _watch(page, interval, console)
        else:
            _print(page, interval, console, as_json=as_json, once=once)
    except ScrapeError as error:
        typer.echo(f"ssdkv top: {error}", err=True)
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        return
