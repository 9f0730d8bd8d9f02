"""``ssdkv lab bench ttft``: time to first token of a hit, against that of computing the prompt."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.cli import arguments
from vllm_ssdkv.profiling.console import progress, wide_console
from vllm_ssdkv.profiling.recall.recall import MODEL_DIR


def _table(rows: list[dict[str, Any]]) -> Table:
    """Times in milliseconds; load, report, vLLM: what those of hits on SSD consist of; loaded: the
    part of the prompt that was not computed. How fast it was loaded from SSD, as a share of what
    the I/O engine alone reads: of one batch, as large; of bench io, with full queues."""
    table = Table("drive", "load", box=None, pad_edge=False)
    for name in (
        "tokens",
        "computed ms",
        "SSD ms",
        "load",
        "report",
        "vLLM",
        "loaded",
        "ratio",
        "DRAM ms",
        "loaded",
        "ratio",
        "MB/s",
        "of one batch",
        "of bench io",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        cells = [row["drive"], row["load"], str(row["tokens"]), f"{1e3 * row['ttft_computed']:.1f}"]
        for tier in ("ssd", "dram"):
            cells.append(f"{1e3 * row[f'ttft_{tier}']:.1f}")
            if tier == "ssd":
                cells += [f"{1e3 * part:.1f}" for part in row["hit_parts_s"]] or ["-"] * 3
            cells.append(f"{row[f'loaded_{tier}']:.0%}")
            cells.append(f"{row[f'ratio_{tier}']:.2f}")
        if row["load_bytes_per_s"] is None:
            cells += ["-"] * 3
        else:
            cells.append(f"{row['load_bytes_per_s'] / 1e6:.0f}")
            cells += [f"{row[f'load_per_{name}']:.2f}" for name in ("batch", "engine")]
        table.add_row(*cells)
    return table


def ttft(
    directory: Annotated[
        list[Path] | None,
        typer.Option(
            "--dir",
            parser=arguments.directory_to_write,
            metavar="DIR",
            help="Directory for the store; repeat it for several drives. Default: the working "
            "directory.",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            parser=arguments.directory,
            metavar="DIR",
            help="Model directory; default: the demo's model.",
        ),
    ] = None,
    bandwidth: Annotated[
        int,
        typer.Option(
            parser=arguments.size,
            metavar="SIZE",
            show_default="2MiB",
            help="Bandwidth of the slowed drive, in bytes per second.",
        ),
    ] = 2 * MIB,
    latency: Annotated[
        float, typer.Option(min=0, max=1, help="Latency of the slowed drive, in seconds.")
    ] = 0.02,
    repeats: Annotated[
        int, typer.Option(min=1, max=1000, help="Number of prompts of each length.")
    ] = 5,
    as_json: arguments.Json = False,
) -> None:
    """Measure the time to first token of hits on SSD and in DRAM, on real vLLM in mode reuse.

    The command also compares the load rate from SSD with the rate of the I/O engine alone on the
    same drives, with requests of the same size: as many in one batch, and with full queues. The
    time of a hit on SSD consists of `load` (the store), `report` (until vLLM steps again) and the
    rest (vLLM).

    It measures the drives as they are and slowed down, with `load: always` and `load: auto`. It
    takes minutes: five engines run one after the other.
    """
    from vllm_ssdkv.profiling.bench_ttft import run_bench

    slow: dict[str, float] = {"bandwidth": bandwidth, "latency": latency}
    console = Console(stderr=True)
    folders: list[tempfile.TemporaryDirectory[str]] = []
    try:
        for parent in directory or [Path.cwd()]:
            folders.append(tempfile.TemporaryDirectory(prefix="ssdkv-bench-", dir=parent))
        places = [Path(folder.name) for folder in folders]
        with progress(console) as note:
            rows = run_bench(model or MODEL_DIR, places, slow, repeats, note)
        if as_json:
            arguments.print_json(rows)
    except (BenchError, OSError) as error:
        typer.echo(f"ssdkv lab bench ttft: {error}", err=True)
        raise typer.Exit(1) from error
    finally:
        for folder in folders:
            folder.cleanup()
    table, console = _table(rows), wide_console(stderr=as_json)
    console.width = max(console.width, console.measure(table).maximum)
    console.print(table)
