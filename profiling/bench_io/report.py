"""Results: JSON for machines, tables for people."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_ssdkv.base.sizes import format_size
from vllm_ssdkv.profiling.bench_io.case import Case, Contender
from vllm_ssdkv.profiling.bench_io.rivals import REFERENCE
from vllm_ssdkv.profiling.bench_io.run import Result, ratio

SCHEMA = 1
"""Version of the JSON; a field that changes its meaning makes a new one."""


def machine() -> dict[str, Any]:
    """Processor, cores, kernel and present load, without anything that names the machine."""
    processor = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
            break
    return {
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "load": os.getloadavg()[0],
    }


def row(result: Result, reference: Result | None, ideal: float | None) -> dict[str, Any]:
    """One result as plain data; figures are medians, bytes and seconds unless named otherwise."""
    case = result.case
    plain: dict[str, Any] = {
        "op": case.op.name.lower(),
        "size": case.nbytes,
        "depth": case.depth,
        "devices": case.devices,
        "contender": result.contender,
        "refused": result.refused,
        "error": result.error,
    }
    if not result.measured:
        return plain
    rate = result.median(lambda sample: sample.bytes_per_s)
    return {
        **plain,
        "bytes_per_s": rate,
        "iops": result.median(lambda sample: sample.iops),
        "cpu_s_per_gb": result.median(lambda sample: sample.cpu_s_per_gb),
        "cpu_us_per_io": result.median(lambda sample: sample.cpu_us_per_io),
        "of_fio": ratio(result, reference),
        "of_model": None if ideal is None else rate / ideal,
        "samples_bytes_per_s": [sample.bytes_per_s for sample in result.samples],
    }


def reference_of(results: Sequence[Result]) -> Result | None:
    """fio's result among those of one case."""
    return next((result for result in results if result.contender == REFERENCE), None)


def document(
    settings: dict[str, Any],
    contenders: Sequence[Contender],
    absent: dict[str, str],
    left_out: Sequence[Case],
    rows: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """The whole run as plain data for JSON."""
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "settings": settings,
        "contenders": {contender.name: contender.detail for contender in contenders},
        "absent": absent,
        "left_out": [str(case) for case in left_out],
        "rows": list(rows),
    }


class _Column(NamedTuple):
    title: str
    field: str
    digits: int
    unit: float = 1.0


_COLUMNS: Final = (
    _Column("MB/s", "bytes_per_s", 0, 1e6),
    _Column("IOPS", "iops", 0),
    _Column("of fio", "of_fio", 2),
    _Column("of model", "of_model", 2),
    _Column("CPU s/GB", "cpu_s_per_gb", 3),
    _Column("CPU us/IO", "cpu_us_per_io", 1),
)


def _figure(value: float | None, digits: int, unit: float = 1.0) -> str:
    return "" if value is None else f"{value / unit:,.{digits}f}"


def print_case(console: Console, case: Case, rows: Sequence[dict[str, Any]]) -> None:
    """The rows of one case as a table, fastest first, and below it who has none and why.

    A column that nobody has a figure for is left out.
    """
    console.print(
        f"\n{case.op.name.lower()} {format_size(case.nbytes)}, depth {case.depth}, "
        f"{case.devices} device{'s' if case.devices > 1 else ''}"
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    measured = [entry for entry in rows if "bytes_per_s" in entry]
    columns = [c for c in _COLUMNS if any(entry[c.field] is not None for entry in measured)]
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    for entry in sorted(measured, key=lambda entry: -entry["bytes_per_s"]):
        cells = (_figure(entry[c.field], c.digits, c.unit) for c in columns)
        table.add_row(entry["contender"], *cells)
    console.print(table)
    for entry in rows:
        if "bytes_per_s" not in entry:
            what = "failed" if entry["error"] else "not run"
            why = entry["error"] or entry["refused"]
            console.print(Text(f"{entry['contender']}: {what}: {why}"))


def print_summary(console: Console, rows: Sequence[dict[str, Any]], absent: dict[str, str]) -> None:
    """Throughput over I/O sizes: as a share of fio's, of the model's, or without both in MB/s.

    Where fio is absent the last line says why there are no ratios to it.
    """
    measured = [entry for entry in rows if "bytes_per_s" in entry]
    for op, devices, depth in dict.fromkeys((e["op"], e["devices"], e["depth"]) for e in measured):
        here = [e for e in measured if (e["op"], e["devices"], e["depth"]) == (op, devices, depth)]
        unit = next(
            (unit for unit in ("of_fio", "of_model") if any(e[unit] is not None for e in here)),
            None,
        )
        console.print(
            f"\n{op}, {devices} device(s), depth {depth}: {(unit or 'MB/s').replace('_', ' ')}"
        )
        sizes = sorted({entry["size"] for entry in here})
        table = Table(box=None, pad_edge=False)
        table.add_column("", no_wrap=True)
        for size in sizes:
            table.add_column(format_size(size), justify="right", no_wrap=True)
        for name in dict.fromkeys(entry["contender"] for entry in here):
            found = {entry["size"]: entry for entry in here if entry["contender"] == name}
            cells = []
            for size in sizes:
                if size not in found:
                    cells.append("")
                elif unit is None:
                    cells.append(_figure(found[size]["bytes_per_s"] / 1e6, 0))
                else:
                    cells.append(_figure(found[size][unit], 2))
            table.add_row(name, *cells)
        console.print(table)
    if (reason := absent.get(REFERENCE)) is not None:
        console.print(Text(f"\nNo ratios to fio: {reason}."), soft_wrap=True)


def print_field(console: Console, contenders: Sequence[Contender], absent: dict[str, str]) -> None:
    """Print who takes part and who does not, with the reason."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for contender in contenders:
        table.add_row(Text(contender.name), Text(contender.detail))
    for name, reason in absent.items():
        table.add_row(Text(name), Text(f"absent: {reason}"))
    console.print(table)
