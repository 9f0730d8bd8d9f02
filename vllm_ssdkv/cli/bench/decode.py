"""``ssdkv lab bench decode``: what sparse decode wins, on emulated devices under the real vLLM.

Every case, a selector at a length and a batch size, is an engine of its own, whose DRAM is the same
share of the contexts: no case can keep in DRAM what another must read. A prompt is computed once
for each kind of store; all its cases decode from what is stored.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.cli import arguments
from vllm_ssdkv.cli.bench.bench import PlotOption
from vllm_ssdkv.cli.bench.decode_plot import plot
from vllm_ssdkv.cli.bench.recall_options import (
    DirectoryOption,
    ReuseOption,
    SelectorsOption,
    SimilarityOption,
    WindowOption,
)
from vllm_ssdkv.kernels.step_clock import PARTS
from vllm_ssdkv.profiling.console import wide_console
from vllm_ssdkv.profiling.recall.bench import (
    SPARSE,
    WINDOW,
    RecallStores,
    Row,
    dram_share_plan,
    require_choices,
)
from vllm_ssdkv.profiling.recall.kv_size import bytes_per_token
from vllm_ssdkv.profiling.recall.recall import MAX_CONTEXT
from vllm_ssdkv.profiling.recall.run import Batch

_MIN_CONTEXT: Final = 512
_CONTEXTS: Final = "4096,16384,32768"
_BATCH: Final = "1,8"
_QUICK_CONTEXTS: Final = "2048,4096"
_QUICK_BATCH: Final = "1"


def decode(
    directory: DirectoryOption = None,
    contexts: Annotated[
        str | None, typer.Option(help=f"Prompt lengths in tokens; default: {_CONTEXTS}.")
    ] = None,
    batch: Annotated[
        str | None, typer.Option(help=f"Numbers of concurrent requests; default: {_BATCH}.")
    ] = None,
    selectors: SelectorsOption = "bounds",
    budget: Annotated[
        float, typer.Option(min=0.001, max=1, help="Share of the tokens that a query attends to.")
    ] = 0.125,
    window: WindowOption = WINDOW,
    reuse_steps: ReuseOption = 1,
    reuse_similarity: SimilarityOption = 0.8,
    tokens: Annotated[int, typer.Option(min=4, max=1024, help="Tokens per answer.")] = 34,
    dram: Annotated[
        float, typer.Option(min=0, max=4, help="DRAM, as a share of the contexts' KV.")
    ] = 0.2,
    devices: Annotated[int, typer.Option(min=1, max=16, help="Number of emulated devices.")] = 4,
    bandwidth: Annotated[
        int,
        typer.Option(
            parser=arguments.size,
            metavar="SIZE",
            show_default="16MiB",
            help="Bandwidth of each device, in bytes per second.",
        ),
    ] = 16 * MIB,
    iops: Annotated[float, typer.Option(min=1, help="Requests per second of each device.")] = 2500,
    latency: Annotated[
        float, typer.Option(min=0, max=1, help="Latency of each device, in seconds.")
    ] = 0.0005,
    repeats: Annotated[
        int, typer.Option(min=1, max=20, help="Runs of every case, in turn; the median counts.")
    ] = 1,
    longest: Annotated[
        int,
        typer.Option(
            max=MAX_CONTEXT,
            help="Minimum context length that every engine and its DRAM are sized for; 0: that of "
            "the case.",
        ),
    ] = 0,
    short_exact: Annotated[
        bool,
        typer.Option(
            "--short-exact",
            help="Let short requests attend to everything, by the default of sparse.exact_below; "
            "without it all of them choose.",
        ),
    ] = False,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="Print Python's share of a step, and with --json its time by function; this "
            "slows the run down.",
        ),
    ] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help=f"Finish within two minutes: --contexts {_QUICK_CONTEXTS} --batch {_QUICK_BATCH}.",
        ),
    ] = False,
    as_json: arguments.Json = False,
    plot_file: PlotOption = None,
) -> None:
    """Decode from contexts on slow emulated devices, and show tokens per second, bytes and times.

    The devices are slower than real ones by the same factor in bandwidth and requests, so ratios
    hold. `x` is the speed over that of exact attention in the same turn.

    The I/O time adds up, layer by layer, the time of the busiest device for all reads, prefetches
    included. `overlap` is the time of a step over the longer of that and of all that is not
    waiting.

    Each layer has to choose pages, look them up, check them, and wait for the latency of a device,
    in sequence. `const` is the sum of these for one layer, and `less` the overlap of a step without
    it.
    """
    from vllm_ssdkv.profiling.rig.plot import require_plot

    lengths = arguments.whole_numbers(
        "--contexts",
        contexts or (_QUICK_CONTEXTS if quick else _CONTEXTS),
        _MIN_CONTEXT,
        MAX_CONTEXT,
    )
    sizes = arguments.whole_numbers("--batch", batch or (_QUICK_BATCH if quick else _BATCH), 1, 64)
    chosen = arguments.names("--selectors", selectors, SPARSE)
    rule: dict[str, object] = {
        "bandwidth": bandwidth,
        "iops": iops,
        "latency": latency,
    }
    machine: Row = {
        "window_tokens": window,
        "devices": devices,
        "model": rule,
        "dram": dram,
        "budget": budget,
    }
    machine |= {"reuse_steps": reuse_steps, "reuse_similarity": reuse_similarity}
    machine |= {"short_exact": short_exact, "longest": longest}
    most = max(lengths) * max(sizes) * bytes_per_token()
    console, stores, rows = Console(stderr=True), RecallStores(directory, devices), []
    engines = len(lengths) * len(sizes) * repeats * (1 + len(chosen))
    numbers = itertools.count(1)
    try:
        if plot_file is not None:
            require_plot(plot_file)
        for length in lengths:
            for size in sizes:
                asked = Batch(length, size, ("copy",), tokens, stored=True)
                turns: list[list[Row]] = []
                for turn in range(repeats):
                    turns.append([])
                    for name in ("exact", *chosen):
                        plan = dram_share_plan(
                            stores.places(name), name, asked, machine, most * len(lengths)
                        )
                        what = f"{name}, {size} x {length} tokens, turn {turn + 1} of {repeats}"
                        what = f"{next(numbers)} of {engines}: {what}"
                        (found,) = stores.run(replace(plan, profile=profile), what, console)
                        require_choices([found], what)
                        turns[-1].append({"selector": name, **_figures(found, machine)})
                rows += _medians(turns)
        document = {**machine, "rows": rows}
        if as_json:
            arguments.print_json(document)
        if plot_file is not None:
            plot(document, plot_file)
    except BenchError as error:
        typer.echo(f"ssdkv lab bench decode: {error}", err=True)
        raise typer.Exit(1) from error
    finally:
        stores.remove()
    wide_console(stderr=as_json).print(_table(rows))
    for name in chosen:
        typer.echo(_advice(rows, name), err=as_json)
    if profile:
        for line in _python(rows):
            typer.echo(line, err=as_json)


def _medians(turns: list[list[Row]]) -> list[Row]:
    """Pick for each case the turn of median speed, with its ratio to the first case: the median of
    those of all turns, since what slows a machine down for a while slows both."""
    found = []
    for case, rows in enumerate(zip(*turns, strict=True)):
        speeds = [row["tokens_per_s"] for row in rows]
        ratios = [turn[case]["tokens_per_s"] / turn[0]["tokens_per_s"] for turn in turns]
        row = rows[speeds.index(statistics.median_low(speeds))]
        found.append({**row, "ratio": statistics.median(ratios), "ratios": ratios})
    return found


def _python(rows: list[Row]) -> Iterator[str]:
    """Format the share of a step that is Python's."""
    for row in rows:
        split = ", ".join(f"{whose} {1000 * s:.2f} ms" for whose, s in row["whose_s"].items())
        yield (
            f"{row['selector']}, {row['requests']} x {row['context']} tokens: our Python takes "
            f"{row['python_share']:.1%} of a step ({split}; {row['native_calls']:.0f} native calls)"
        )


def _figures(found: Row, machine: Row) -> Row:
    """Figures of a case, per step and per token. Times are in seconds."""
    counted, steps = found["decoding"], max(1, found["decoding_steps"])
    parts = {part: counted.get(f"attention_seconds.{part}", 0.0) / steps for part in PARTS}
    step = found["decoding_s"] / steps
    read, requests = counted.get("bytes_read", 0.0), counted.get("read_requests", 0.0)
    layers = counted.get("layers", 0.0) / steps
    own = constant = 0.0
    if parts["select"]:
        own = parts["select"] + parts["fetch"]
        constant = float(machine["model"]["latency"]) + own / layers
    io = counted.get("device_seconds.busiest", 0.0) / steps
    computing = step - parts["wait"]
    tokens = max(1, found["decoded_tokens"])
    return {
        **found,
        "tokens_per_s": tokens / found["decoding_s"],
        "read_per_token": read / tokens,
        "requests_per_token": requests / tokens,
        "step_s": step,
        "parts_s": {**parts, "other": max(0.0, step - sum(parts.values()))},
        "io_s": io,
        "io_even_s": counted.get("device_seconds.even", 0.0) / steps,
        "constant_s": constant,
        "overlap": step / max(io, computing),
        # What is in the constant is no computing that could have been hidden.
        "overlap_less_constant": (step - layers * constant) / max(io, computing - own),
    }


def _advice(rows: list[Row], selector: str) -> str:
    """Length from which a selector is worth its while, whatever the batch."""
    least: int | None = None
    for length in sorted({row["context"] for row in rows}, reverse=True):
        mine = [r for r in rows if (r["selector"], r["context"]) == (selector, length)]
        if any(row["ratio"] < 1 for row in mine):
            break
        least = length
    if least is None:
        return f"{selector} was slower than exact at the longest context"
    return (
        f"{selector} was never slower than exact from {least} tokens on: set sparse.exact_below "
        "so that shorter requests attend to everything"
    )


def _table(rows: list[Row]) -> Table:
    """Times are milliseconds of a step, merging is with attending; the constant is that of a layer.
    The last column is the overlap without it."""
    parts = (*(part for part in PARTS if part != "merge"), "other")
    table = Table(
        "tokens", "batch", "selector", "tok/s", "x", "KiB/tok", box=None, padding=(0, 1, 0, 0)
    )
    for column in ("step", *parts, "I/O", "const", "overlap", "less"):
        table.add_column(column, justify="right")
    for row in rows:
        split = dict(row["parts_s"])
        split["attend"] += split["merge"]
        io = (row["io_s"], row["constant_s"])
        table.add_row(
            str(row["context"]),
            str(row["requests"]),
            row["selector"],
            f"{row['tokens_per_s']:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['read_per_token'] / 1024:.0f}",
            *(f"{1000 * s:.1f}" for s in (row["step_s"], *(split[part] for part in parts), *io)),
            f"{row['overlap']:.2f}",
            f"{row['overlap_less_constant']:.2f}",
        )
    return table
