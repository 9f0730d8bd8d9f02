"""Command line of the virtual SSDs: ``up``, ``down``, ``control`` and ``status``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.base.sizes import parse_size
from vllm_ssdkv.profiling.bench_io.model import GEN4, DeviceModel
from vllm_ssdkv.profiling.vssd.ssds import DEFAULT_FOLDER, Kind, Ssds

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)

_Folder = Annotated[Path, typer.Option(help="Directory of the virtual SSDs.")]


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: {error}", param_hint="--size") from error


@app.command()
def up(
    devices: Annotated[int, typer.Argument(min=1, max=64, help="Number of virtual SSDs.")],
    kind: Annotated[
        Kind, typer.Option(help="Kind: virtual SSDs, or throttled RAM disks.")
    ] = "fuse",
    size: Annotated[str, typer.Option(help="Capacity of each; it may become used memory.")] = (
        "1GiB"
    ),
    bandwidth: Annotated[
        float, typer.Option(min=1, help="Bandwidth of the real drive in MB/s.")
    ] = (GEN4.bandwidth / 1e6),
    latency: Annotated[
        float, typer.Option(min=0, help="Latency of the real drive in microseconds.")
    ] = GEN4.latency_s * 1e6,
    iops: Annotated[
        float, typer.Option(min=1, help="Requests per second of the real drive.")
    ] = GEN4.iops,
    dilation: Annotated[
        float, typer.Option(min=1, help="Factor by which each is slower than the real drive.")
    ] = GEN4.dilation,
    folder: _Folder = DEFAULT_FOLDER,
) -> None:
    """Make DEVICES of them and print a directory on each. What was there before goes down.

    Throttled RAM disks slow down the processes of one cgroup only, which is named on standard
    error; write a process id into its cgroup.procs.
    """
    model = DeviceModel(bandwidth * 1e6, latency / 1e6, iops, dilation)
    for directory in Ssds(folder).up(kind, devices, _size(size), model):
        typer.echo(directory)


@app.command()
def down(folder: _Folder = DEFAULT_FOLDER) -> None:
    """Remove them, also what a killed process left; there may be nothing."""
    Ssds(folder).down()


@app.command()
def control(line: list[str], folder: _Folder = DEFAULT_FOLDER) -> None:
    """Change a virtual SSD or inject a fault: DEVICE COMMAND ARGUMENTS, e.g. 3 stall 500.

    Commands: bandwidth MB/s, latency US, iops N, eio FILE OFFSET BYTES, corrupt FILE OFFSET BYTES,
    stall MS, hang, dead, full, heal.
    """
    Ssds(folder).command(" ".join(line))


@app.command()
def status(folder: _Folder = DEFAULT_FOLDER) -> None:
    """Counters of the virtual SSDs as JSON."""
    typer.echo(json.dumps(Ssds(folder).counters(), indent=1))


def main() -> None:
    """Run a command; errors end with one line."""
    try:
        app()
    except BenchError as error:
        typer.echo(f"vssd: {error}", err=True)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
