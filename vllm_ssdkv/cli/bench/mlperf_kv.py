"""``ssdkv lab bench mlperf-kv``: the store under the KV-cache workload of MLPerf Storage."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_ssdkv.base.errors import SSDKVError
from vllm_ssdkv.base.sizes import GIB
from vllm_ssdkv.cli import arguments
from vllm_ssdkv.cli.bench.tables_output import print_tables
from vllm_ssdkv.profiling.table import Table

if TYPE_CHECKING:
    from vllm_ssdkv.profiling.mlperf_kv.bench import Measured
    from vllm_ssdkv.profiling.simulation.model_shape import ModelShape


def mlperf_kv(
    directory: Annotated[
        list[Path],
        typer.Argument(
            parser=arguments.directory_to_write, metavar="DIR...", help="Directory on each SSD."
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            help="Name in `profiling/simulation/data/models.yaml`, or a directory with a "
            "config.json. The benchmark's own models are tiny-1b, llama-3.1-8b and llama-3.1-70b."
        ),
    ] = "tiny-1b",
    users: Annotated[int, typer.Option(min=1, max=1024, help="Number of concurrent users.")] = 4,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=86400, help="Duration of the run in seconds.")
    ] = 20.0,
    capacity: Annotated[
        int,
        typer.Option(
            parser=arguments.size,
            metavar="SIZE",
            help="Capacity of the store on each SSD; default: 8GiB.",
        ),
    ] = 8 * GIB,
    seed: Annotated[int, typer.Option(help="Seed of the random requests.")] = 42,
    scale: Annotated[
        float,
        typer.Option(
            min=0.001,
            max=1.0,
            help="Factor for the prompt lengths; use less than 1 for a trial only.",
        ),
    ] = 1.0,
    as_json: arguments.Json = False,
) -> None:
    """Run the store under the KV-cache workload of MLPerf Storage 3.0.

    Users chat, write code and read documents. Each prompt is written, and read again for every 32
    tokens of its answer. A turn reads the turn before, and some begin with a shared system prompt.
    The command computes nothing and has no DRAM tier, like `--gpu-mem-gb 0 --cpu-mem-gb 0
    --generation-mode none` of the benchmark. Its workload was written anew from its public
    description, so this is no MLPerf result, and must not be called one.

    Cached tokens/s are tokens whose KV was read from SSDs; latencies are of whole prompts. The
    store is made in the directories and removed.
    """
    from vllm_ssdkv.profiling.mlperf_kv.bench import Settings, run

    try:
        shape = _model(model)
        if len({path.resolve() for path in directory}) != len(directory):
            raise typer.BadParameter("a directory is named twice; name one on each SSD")
        measured = run(
            Settings(
                directories=tuple(directory),
                model=shape,
                capacity=capacity,
                users=users,
                seconds=seconds,
                seed=seed,
                scale=scale,
            )
        )
    except SSDKVError as error:
        typer.echo(f"ssdkv lab bench mlperf-kv: {error}", err=True)
        raise typer.Exit(1) from error
    if as_json:
        given = {"model": shape.name, "users": users, "seed": seed, "scale": scale}
        arguments.print_json({**given, "drives": len(directory), **figures(measured)})
        return
    print_tables([_table(measured, shape.name, users, scale)], as_json=False)


def _model(text: str) -> ModelShape:
    """A described model, or one of a directory.

    Raises:
        ConfigError: there is none.
    """
    from vllm_ssdkv.profiling.simulation.model_shape import ModelShape, find_model

    path = Path(text).expanduser()
    return ModelShape.read(path) if path.is_dir() else find_model(text)


def figures(measured: Measured) -> dict[str, Any]:
    """Results as JSON. Times in seconds; None: nothing of the kind happened."""
    from vllm_ssdkv.profiling.mlperf_kv.bench import latency

    return {
        "seconds": measured.seconds,
        "requests": measured.requests,
        "cached_tokens_per_s": measured.tokens_per_s,
        "read_gb_per_s": measured.read_bytes / measured.seconds / 1e9,
        "write_gb_per_s": measured.written_bytes / measured.seconds / 1e9,
        "read_p50_s": latency(measured.read_s, 0.5),
        "read_p95_s": latency(measured.read_s, 0.95),
        "read_p99_s": latency(measured.read_s, 0.99),
        "write_p95_s": latency(measured.write_s, 0.95),
        "hit_rate": measured.hit_rate,
        "from_drives": measured.device_share,
    }


def _table(measured: Measured, model: str, users: int, scale: float) -> Table:
    table = Table(
        f"KV-cache workload of MLPerf Storage 3.0, {model}, {users} users",
        ["figure", "value"],
        decimals=3,
        note="No MLPerf result. Latencies are of whole prompts, in seconds."
        + (f" Prompts have {scale:g} of their length." if scale < 1 else ""),
    )
    for name, value in figures(measured).items():
        table.add(name.replace("_", " "), value)
    return table
