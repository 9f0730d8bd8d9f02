"""``ssdkv lab bench io`` without its command line: files, contenders, run, report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from vllm_ssdkv.profiling.bench_io import report
from vllm_ssdkv.profiling.bench_io.case import MEMORY_BYTES, plan
from vllm_ssdkv.profiling.bench_io.files import bench_files
from vllm_ssdkv.profiling.bench_io.model import DeviceModel
from vllm_ssdkv.profiling.bench_io.rivals import gather
from vllm_ssdkv.profiling.bench_io.run import run_case
from vllm_ssdkv.store.io.engines.protocol import Op
from vllm_ssdkv.store.memory.arena import Arena


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a measurement. Sizes in bytes.

    Attributes:
        directories: One per device; with ``model``, places for the files of emulated ones.
        devices: Number of devices.
        ops: Directions.
        sizes: I/O sizes.
        depths: Requests in flight per device.
        repeats: Runs of each contender in each case.
        seconds: Of one run.
        region_bytes: Of each device's file, once for reads and once for writes.
        contenders: Names of those that shall take part.
        model: What each device is slowed down to, inside our engines.
    """

    directories: tuple[Path, ...]
    devices: int
    ops: tuple[Op, ...]
    sizes: tuple[int, ...]
    depths: tuple[int, ...]
    repeats: int
    seconds: float
    region_bytes: int
    contenders: tuple[str, ...]
    model: DeviceModel | None = None

    def plain(self) -> dict[str, Any]:
        """Values for JSON; directories are left out, because they name the machine."""
        return {
            "devices": self.devices,
            "ops": [op.name.lower() for op in self.ops],
            "sizes": list(self.sizes),
            "depths": list(self.depths),
            "repeats": self.repeats,
            "seconds": self.seconds,
            "region_bytes": self.region_bytes,
            "model": None if self.model is None else self.model.plain(),
        }


def run_bench(settings: Settings, console: Console) -> dict[str, Any]:
    """Measure everything, print a table per case, return the JSON document.

    Blocks for about cases x contenders x repeats x seconds, and while the files are written.

    Raises:
        BenchError: a directory cannot be used, or nobody can run.
    """
    cases, left_out = plan(settings.ops, settings.sizes, settings.depths, settings.devices)
    arena = Arena(MEMORY_BYTES)
    try:
        with bench_files(settings.directories, settings.devices, settings.region_bytes) as files:
            model = settings.model
            rule = None if model is None else model.rule()
            field = gather(files, arena, settings.contenders, rule)
            report.print_field(console, field.contenders, field.absent)
            rows: list[dict[str, Any]] = []
            with Progress(console=console, transient=True) as progress:
                task = progress.add_task("measuring", total=len(cases))
                for case in cases:
                    results = run_case(case, field.contenders, settings.repeats, settings.seconds)
                    reference = report.reference_of(results)
                    # The twin's clock starts when a batch is submitted: its queue is never empty.
                    ideal = None if model is None else case.devices * model.bytes_per_s(case.nbytes)
                    new = [report.row(result, reference, ideal) for result in results]
                    report.print_case(progress.console, case, new)
                    rows += new
                    progress.advance(task)
            report.print_summary(console, rows, field.absent)
    finally:
        arena.close()
    return report.document(settings.plain(), field.contenders, field.absent, left_out, rows)


def failures(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One line per contender and case that ended with an error."""
    return [
        f"{row['contender']}, {row['op']} {row['size']} depth {row['depth']}: {row['error']}"
        for row in rows
        if row["error"]
    ]
