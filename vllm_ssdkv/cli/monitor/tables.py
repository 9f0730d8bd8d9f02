"""Tables of ``ssdkv top`` that engines and nodes have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Final

from rich.table import Table
from rich.text import Text

from vllm_ssdkv.cli.monitor.metrics_sample import DeviceSample

BAD: Final = "bold red"


def head(title: str, rest: str, at: float, seconds: float) -> Text:
    """The first line.

    Args:
        title: What is watched.
        rest: More about it.
        at: Seconds since 1970.
        seconds: Time of the rates.
    """
    when = datetime.fromtimestamp(at).astimezone()
    return Text.assemble((title, "bold"), f"  {rest}  {when:%H:%M:%S}, over {seconds:.1f} s")


def named_rows(rows: Iterable[tuple[str, str | Text]]) -> Table:
    """A line for each name and what is to be said of it."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def troubles_line(troubles: Mapping[str, int]) -> Text:
    """The last line: counters that are above 0."""
    found = [f"{name} {count}" for name, count in troubles.items() if count]
    if found:
        return Text(", ".join(found), BAD)
    return Text("no failures since the start", "green")


def devices_table(devices: tuple[DeviceSample, ...]) -> Table:
    """Each SSD on a line. On 80 columns only the paths are folded."""
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
            percent(device.share),
            short(device.read_bytes_per_s / 1e6),
            milliseconds(device.read_latency_s),
            short(device.reads_per_s),
            short(device.written_bytes_per_s / 1e6),
            milliseconds(device.write_latency_s),
            short(device.writes_per_s),
            "-" if device.queue_depth is None else f"{device.queue_depth:.1f}",
            Text(f"{device.errors}", BAD if device.new_errors else ""),
        )
    return table


def _state(device: DeviceSample) -> Text:
    if device.in_service is None:
        return Text("unknown")
    return Text("in use", "green") if device.in_service else Text("OUT", BAD)


def share_of(part: int, whole: int) -> float | None:
    """``part / whole``; None where there is nothing."""
    return part / whole if whole else None


def short(number: float) -> str:
    """A number of at most five characters up to 10 million."""
    if number < 100:
        return f"{number:.1f}"
    return f"{number:,.0f}" if number < 10_000 else f"{number / 1000:,.0f}k"


def percent(share: float | None) -> str:
    """Percentage with one decimal; a dash for None."""
    return "-" if share is None else f"{share:.1%}"


def milliseconds(seconds: float | None) -> str:
    """Milliseconds with two decimals; a dash for None."""
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"
