"""``ssdkv plan``: how to serve a workload on a machine, and what that will give."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from vllm_ssdkv.base.errors import ConfigError, SSDKVError
from vllm_ssdkv.base.host import default_root
from vllm_ssdkv.base.sizes import parse_size
from vllm_ssdkv.cli import arguments
from vllm_ssdkv.cli.bench.bench import PlotOption
from vllm_ssdkv.cli.bench.tables_output import print_tables
from vllm_ssdkv.profiling.simulation.model_shape import (
    ModelShape,
    bytes_of,
    find_model,
    model_id,
    stored_bytes,
)
from vllm_ssdkv.profiling.sizing.forecast import Sizing, Terms
from vllm_ssdkv.profiling.sizing.layout import BLOCK_TOKENS, CPU_BLOCK_TOKENS
from vllm_ssdkv.profiling.sizing.machine import SizedMachine, read_machine
from vllm_ssdkv.profiling.sizing.plan import SELECTORS, Plan, Wish, curves, make_plan
from vllm_ssdkv.profiling.sizing.serve import serve_command, transfer_config
from vllm_ssdkv.profiling.sizing.validate import validate_here, validation_table
from vllm_ssdkv.profiling.sizing.workload import Tokenize, Workload, of_lengths, of_prompts
from vllm_ssdkv.profiling.table import Table

FP8: Final = "fp8"
"""Weights that vLLM makes smaller when it loads them: its own name of the method."""


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Directory of the model, its config.json, or a name such as llama-3.1-8b.",
        ),
    ],
    workload: Annotated[
        Path | None,
        typer.Option(
            parser=arguments.file_to_read,
            metavar="FILE",
            help="Plan for these requests: JSON lines in OpenAI's batch form.",
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Plan for the requests that a running vLLM has counted."),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE|fp8",
            show_default="as the model's files say",
            help="Bytes of all weights; or fp8: vLLM stores those in layers in 8 bits.",
        ),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            show_default="that of the model",
            help="Type of KV, such as fp8. Answers may differ (docs/accuracy.md).",
        ),
    ] = None,
    prompt: Annotated[
        str,
        typer.Option(
            help="Tokens of a prompt, such as 32768 or 1024-65536; 128K is a context of 131,072 "
            "tokens with its answer."
        ),
    ] = "32768",
    output: Annotated[
        str, typer.Option(help="Tokens of an answer, such as 512 or 64-512.")
    ] = "512",
    at_a_time: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=4096,
            show_default="8, or what the server has",
            help="Number of concurrent requests.",
        ),
    ] = None,
    found: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Share of the prompt tokens that begin an earlier request, too."
        ),
    ] = 0.0,
    machine: Annotated[
        Path | None,
        typer.Option(
            parser=arguments.file_to_read,
            metavar="FILE",
            show_default="this machine, as detected",
            help="Plan for the machine that this YAML file describes (docs/sizing.md).",
        ),
    ] = None,
    device: Annotated[
        list[Path] | None,
        typer.Option(
            parser=arguments.directory_to_write,
            metavar="DIR",
            help="Directory on an SSD of this machine, which is measured for seconds; repeat it "
            "for more SSDs.",
        ),
    ] = None,
    io: Annotated[
        Path | None,
        typer.Option(
            "--io",
            parser=arguments.file_to_read,
            metavar="FILE",
            help="Take the rates of the drives from the output of `ssdkv lab bench io --json`.",
        ),
    ] = None,
    dram: Annotated[
        int | None,
        typer.Option(
            parser=arguments.size,
            metavar="SIZE",
            show_default="half of what is free; without a GPU a tenth",
            help="Memory of this machine for KV.",
        ),
    ] = None,
    endurance: Annotated[
        int | None,
        typer.Option(
            parser=arguments.size,
            metavar="SIZE",
            help="Rated write endurance of each drive (TBW).",
        ),
    ] = None,
    want_tokens: Annotated[
        float | None, typer.Option(help="Least output of all requests, in tokens/s.")
    ] = None,
    want_ttft: Annotated[
        float | None, typer.Option(help="Longest time to first token, in seconds.")
    ] = None,
    want_life: Annotated[
        float | None,
        typer.Option(
            show_default="5, where a limit of writes can keep it",
            help="Years that the drives must last.",
        ),
    ] = None,
    selectors: Annotated[
        str,
        typer.Option(
            help="Selectors to consider in mode page; exact alone keeps the tokens of stock vLLM."
        ),
    ] = ",".join(SELECTORS),
    budget: Annotated[
        float,
        typer.Option(min=0.001, max=1, help="Largest share of a context that a selector reads."),
    ] = 0.125,
    usd_per_kwh: Annotated[
        float, typer.Option(min=0, max=100, help="Price of energy in USD per kWh.")
    ] = 0.15,
    years: Annotated[
        float, typer.Option(min=0.1, max=50, help="Years until the machine is written off.")
    ] = 4.0,
    validate: Annotated[
        bool,
        typer.Option(
            "--validate",
            help="Also run the real engine on throttled drives here, minutes, and show what was "
            "predicted beside what was measured.",
        ),
    ] = False,
    as_json: arguments.Json = False,
    plot_file: PlotOption = None,
) -> None:
    """Find the fastest way to serve a model and a workload on a machine.

    The plan has mode, selector, concurrent requests and the division of DRAM. It also has
    throughput, time to first token, the data of each tier and drive, the life of the drives, watts,
    cost, the limit, and the gain of one more part. The last line is the command that starts vLLM.

    By default, ssdkv picks the fastest configuration that produces exactly the tokens of stock
    vLLM. Numbers are simulated; `docs/sizing.md` compares them with measurements. When no
    configuration meets a wish, the last line names the bound that fails, and by how much.
    """
    from vllm_ssdkv.profiling.rig.plot import require_plot

    chosen = arguments.names("--selectors", selectors, SELECTORS)
    console = Console(stderr=True)
    try:
        if plot_file is not None:
            require_plot(plot_file)
        _one_of(workload, server)
        wish = Wish(want_tokens, want_ttft, want_life)
        shape = read_model(model, weights, kv_dtype)
        asked = _workload(workload, server, model, (prompt, output), at_a_time, found)
        if server is not None and shape.positions is not None:
            asked = asked.at_most(shape.positions.tokens)
        on = _machine(machine, device or [], io, dram, endurance, console)
        block = CPU_BLOCK_TOKENS if on.cpu else BLOCK_TOKENS
        sizing = Sizing(shape, asked, on, terms=Terms(usd_per_kwh, years), block_tokens=block)
        made = make_plan(sizing, wish, selectors=chosen, budget=budget)
        if plot_file is not None:
            from vllm_ssdkv.cli.plan.plan_plot import plot

            plot(made, curves(sizing, chosen, budget), plot_file)
        table = validation_table(validate_here(console)) if validate else None
        quantization = weights if weights == FP8 else ""
        _show(made, served_model(model), quantization, table, as_json=as_json)
    except SSDKVError as error:
        typer.echo(f"ssdkv plan: {error}", err=True)
        raise typer.Exit(1) from error


def _show(
    made: Plan,
    model: str | None,
    quantization: str,
    validation: Table | None,
    *,
    as_json: bool,
) -> None:
    config = transfer_config(made.sizing, made.best)
    command = None
    if model is not None:
        command = serve_command(made.sizing, made.best, model, quantization=quantization)
    if as_json:
        shown = None if validation is None else asdict(validation)
        more = {"kv_transfer_config": config, "command": command, "validation": shown}
        arguments.print_json({**made.document(), **more})
        return
    print_tables([*made.tables(), *([] if validation is None else [validation])], as_json=False)
    if not made.sizing.machine.paths:
        typer.echo(
            "The machine names no paths of its drives: add devices to the command.", err=True
        )
    typer.echo(command or f"{made.sizing.model.name}: its weights are not published; no command")


def _one_of(workload: Path | None, server: str | None) -> None:
    """Raises ConfigError: both are given."""
    if workload is not None and server is not None:
        raise ConfigError("--server: --workload is given, too; give one of them")


def read_model(name: str, weights: str | None = None, kv_dtype: str | None = None) -> ModelShape:
    """The shape of a model directory, of a file, or of a model that is known by name.

    Raises:
        ConfigError: there is none, or a field of its config.json is missing or wrong.
    """
    stored = weights if weights in (None, FP8) else _size("--weights", str(weights))
    path = Path(name).expanduser()
    if path.is_dir():
        stored = stored or stored_bytes(path)
        shape = ModelShape.read(path / "config.json", name=path.resolve().name, stored=stored)
    elif path.is_file():
        shape = ModelShape.read(path, stored=stored)
    else:
        shape = find_model(name, stored)
    if kv_dtype is not None:
        bytes_of(kv_dtype)
    return replace(shape, kv_dtype=kv_dtype)


def _size(option: str, text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{option}: got {text!r}; fp8, or a size: {error}") from None


def served_model(name: str) -> str | None:
    """The model as vLLM takes it; None: it is known by name, and its weights are not published."""
    path = Path(name).expanduser()
    if path.is_file():
        path = path.parent
    return str(path) if path.is_dir() else model_id(name)


def _workload(
    file: Path | None,
    server: str | None,
    model: str,
    lengths: tuple[str, str],
    at_a_time: int | None,
    found: float,
) -> Workload:
    if server is not None:
        from vllm_ssdkv.cli.plan.server import of_server

        return of_server(server, at_a_time=at_a_time)
    if file is not None:
        return of_prompts(file, at_a_time=at_a_time or 8, tokenize=_tokenizer(model))
    return of_lengths(*lengths, at_a_time=at_a_time or 8, found=found)


def _tokenizer(model: str) -> Tokenize | None:
    """The model's own, where its directory has one."""
    file = Path(model).expanduser() / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    known = Tokenizer.from_file(str(file))
    return lambda text: known.encode(text).ids


def _machine(
    file: Path | None,
    devices: list[Path],
    io: Path | None,
    dram: int | None,
    endurance: int | None,
    console: Console,
) -> SizedMachine:
    """Raises ConfigError: options contradict each other, or a field is wrong."""
    if file is not None:
        for option, value in (
            ("--device", devices),
            ("--io", io),
            ("--dram", dram),
            ("--endurance", endurance),
        ):
            if value:
                raise ConfigError(f"{option}: --machine is given, which says it")
        return read_machine(file)
    from vllm_ssdkv.cli.plan.detect import detect, read_document

    document = None if io is None else read_document(io)
    places = devices or [_default_place()]
    return detect(places, document=document, dram=dram, endurance=endurance, console=console)


def _default_place() -> Path:
    """Place of the product's stores unless it is told. Made, as the engine would."""
    place = default_root()
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    return place
