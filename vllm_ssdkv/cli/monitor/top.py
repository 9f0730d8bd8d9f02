"""``ssdkv top``: a running server or node, live, from its ``/metrics``."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from typing import Annotated, Final, TypeAlias

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from vllm_ssdkv.cli.monitor.metrics_sample import Sample, compare
from vllm_ssdkv.cli.monitor.metrics_scrape import Scrape, ScrapeError, fetch, page_url
from vllm_ssdkv.cli.monitor.node_sample import NodeSample, compare_node, is_node
from vllm_ssdkv.cli.monitor.screen import screen
from vllm_ssdkv.cli.monitor.tables import BAD

FAILED: Final = 1
_URL: Final = "http://127.0.0.1:8000"

AnySample: TypeAlias = Sample | NodeSample


def samples(url: str, interval_s: float) -> Iterator[tuple[AnySample | None, str]]:
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
            of_page = compare_node if is_node(newer) else compare
            yield of_page(older, newer, url, time.time()), ""
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
    last: AnySample | None = None
    stream = samples(url, interval_s)
    with Live(waiting, console=console, screen=True, auto_refresh=False) as live:
        for sample, problem in stream:
            last = sample or last
            shown = Text(problem, BAD) if last is None else screen(last, problem)
            live.update(shown, refresh=True)


def top(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Address of vllm serve, or of a node's metrics.")
    ] = _URL,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds between two samples.")
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one sample after one interval.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print one JSON object per interval and line, and nothing else."
        ),
    ] = False,
) -> None:
    """Watch a running server or node: requests, hits, tiers, and each SSD. Ctrl-C ends it.

    A node shows engines, calls, bytes, stores, and each SSD. Rates are means over the interval. An
    idle engine does not report: its numbers stand still.
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
