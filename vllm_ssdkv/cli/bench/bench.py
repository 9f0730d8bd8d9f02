"""``ssdkv lab bench``: how fast the SSDs are through our engines, fio and others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NoReturn, TypeVar

import typer
from rich.console import Console

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.base.sizes import GIB, KIB, MIB, format_size, parse_size
from vllm_ssdkv.cli import arguments

# The bench needs the native module. It is imported by those who run it, so that `ssdkv doctor` can
# say that the module is missing.
if TYPE_CHECKING:
    from vllm_ssdkv.store.io.engines.protocol import Op

app = typer.Typer(no_args_is_help=True, help="Measure SSDs, I/O engines, and vLLM on them.")

SIZES: Final = (4 * KIB, 8 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB)
DEPTHS: Final = (1, 16, 64)
_MAX_SIZE: Final = 64 * MIB
_MAX_DEPTH: Final = 1024
_MAX_DEVICES: Final = 64
_REGION_STEP: Final = 4 * MIB
_Value = TypeVar("_Value")


def _refuse(option: str, text: str) -> NoReturn:
    raise typer.BadParameter(text, param_hint=option)


def _list(option: str, text: str, one: Callable[[str], _Value]) -> tuple[_Value, ...]:
    parts = [part.strip() for part in text.split(",")]
    try:
        return tuple(dict.fromkeys(one(part) for part in parts))
    except ValueError as error:
        _refuse(option, f"{text!r}: {error}")


def _io_size(text: str) -> int:
    nbytes = parse_size(text)
    if not 4096 <= nbytes <= _MAX_SIZE or nbytes % 4096:
        raise ValueError(f"{text} is not a multiple of 4 KiB up to {format_size(_MAX_SIZE)}")
    return nbytes


def _depth(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= _MAX_DEPTH:
        raise ValueError(f"{text!r} is not a whole number in 1..{_MAX_DEPTH}")
    return int(text)


def _op(text: str) -> Op:
    from vllm_ssdkv.store.io.engines.protocol import Op

    try:
        return {"read": Op.READ, "write": Op.WRITE}[text]
    except KeyError:
        raise ValueError(f"{text!r} is neither read nor write") from None


def _contender(text: str) -> str:
    from vllm_ssdkv.profiling.bench_io.rivals import contender_names

    if text not in contender_names():
        raise ValueError(f"{text!r} is not one of {', '.join(contender_names())}")
    return text


def _directories(paths: Sequence[Path]) -> tuple[Path, ...]:
    if len({path.resolve() for path in paths}) != len(paths):
        _refuse("DIR", "a directory is named twice; name one on each SSD")
    return tuple(paths)


def _region(nbytes: int, largest: int) -> int:
    region = nbytes // 2 // _REGION_STEP * _REGION_STEP
    if region < max(_REGION_STEP, largest):
        least = 2 * max(_REGION_STEP, -(-largest // _REGION_STEP) * _REGION_STEP)
        text = f"{format_size(nbytes)} is too small for these I/O sizes: {format_size(least)}"
        _refuse("--file-size", text)
    return region


PlotOption = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        parser=arguments.file_to_write,
        metavar="FILE",
        help="File for the charts: .png, .svg or .pdf.",
    ),
]


@app.command()
def io(
    directory: Annotated[
        list[Path],
        typer.Argument(
            parser=arguments.directory_to_write, metavar="DIR...", help="Directory on each SSD."
        ),
    ],
    size: Annotated[
        str | None, typer.Option(help="I/O sizes, such as 4KiB,1MiB; default: 4KiB to 4MiB.")
    ] = None,
    depths: Annotated[
        str | None,
        typer.Option(help="Requests in flight per SSD, such as 1,64; default: 1,16,64."),
    ] = None,
    ops: Annotated[
        str, typer.Option(help="Operations to measure: read, write or both.")
    ] = "read,write",
    repeats: Annotated[
        int, typer.Option(min=1, max=100, help="Number of runs; the table shows medians.")
    ] = 3,
    seconds: Annotated[
        float | None,
        typer.Option(min=0.01, max=60, help="Duration of each run in seconds; default: 1."),
    ] = None,
    file_size: Annotated[
        int | None,
        typer.Option(
            parser=arguments.size,
            metavar="SIZE",
            help="Size of the test file on each SSD; default: 1GiB.",
        ),
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Contenders to measure, such as 'fio,ssdkv threads'.")
    ] = None,
    emulate: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=_MAX_DEVICES,
            help="Number of SSDs to emulate inside our engines, with files in the directories.",
        ),
    ] = None,
    as_json: arguments.Json = False,
    plot_file: PlotOption = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Measure two sizes at one depth with 64 MiB and 0.2 s a run."),
    ] = False,
) -> None:
    """Read and write test files with our engines, fio and others, in turns on the same files.

    Every SSD gets a file that is written once, used by all contenders, and removed. All buffers are
    on huge pages. Exits with 1 when a contender fails.
    """
    from vllm_ssdkv.profiling.bench_io.bench import Settings, failures, run_bench
    from vllm_ssdkv.profiling.bench_io.model import GEN4
    from vllm_ssdkv.profiling.bench_io.plot import plot
    from vllm_ssdkv.profiling.bench_io.rivals import contender_names
    from vllm_ssdkv.profiling.rig.plot import require_plot

    directories = _directories(directory)
    default_sizes = (8 * KIB, MIB) if quick else SIZES
    sizes = default_sizes if size is None else _list("--size", size, _io_size)
    default_depths = (16,) if quick else DEPTHS
    everybody = tuple(contender_names())
    region = _region(file_size or (64 * MIB if quick else GIB), max(sizes))
    settings = Settings(
        directories=directories,
        devices=emulate or len(directories),
        ops=_list("--ops", ops, _op),
        sizes=sizes,
        depths=default_depths if depths is None else _list("--depths", depths, _depth),
        repeats=repeats,
        seconds=seconds or (0.2 if quick else 1.0),
        region_bytes=region,
        contenders=everybody if only is None else _list("--only", only, _contender),
        model=None if emulate is None else GEN4,
    )
    console = Console(stderr=as_json)
    try:
        if plot_file is not None:
            require_plot(plot_file)
        found = run_bench(settings, console)
        if as_json:
            arguments.print_json(found)
        if plot_file is not None:
            plot(found["rows"], plot_file)
    except BenchError as error:
        typer.echo(f"ssdkv lab bench io: {error}", err=True)
        raise typer.Exit(1) from error
    for case in found["left_out"]:
        typer.echo(f"left out, its buffers would not fit: {case}", err=as_json)
    failed = failures(found["rows"])
    for line in failed:
        typer.echo(f"failed: {line}", err=True)
    if failed or not found["rows"]:
        raise typer.Exit(1)
