"""``ssdkv config``: check options, show what is in force, or what there is to give."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.base.sizes import format_size
from vllm_ssdkv.cli import arguments
from vllm_ssdkv.config.effects import without_effect
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.secondary_tier import (
    OF_THE_STORE,
    OFFLOADING_FIELDS,
    TIER_NAMES,
    SecondaryTierConfig,
    tier_entries,
    tier_options,
)

app = typer.Typer(
    no_args_is_help=True, help="Check options, show those in force, or print their schema."
)

EXTRA: Final = "kv_connector_extra_config"
_MODEL_KEY: Final = "MODEL"
"""Stands for the model's fingerprint, which is known only with a model."""


def read_options(text: str) -> dict[str, object]:
    """The options in a JSON text: the object itself, or a whole ``--kv-transfer-config``.

    Raises:
        ConfigError: not JSON, or not an object.
    """
    try:
        value: object = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"not JSON: {error.msg} at {where}") from None
    if isinstance(value, dict) and (EXTRA in value or "kv_connector" in value):
        value = value.get(EXTRA, {})
    if not isinstance(value, dict):
        raise ConfigError("not a JSON object")
    return {str(name): inner for name, inner in value.items()}


def _load(file: str) -> dict[str, object]:
    try:
        path = Path(file).expanduser()
        text = sys.stdin.read() if file == "-" else path.read_text(encoding="utf-8")
        return read_options(text)
    except (OSError, RuntimeError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"{file}: {error}") from error


class _Options(NamedTuple):
    """Options of the connector, or of one of our tiers behind vLLM's own connector."""

    given: Mapping[str, object]
    config: SSDKVConfig
    tier: SecondaryTierConfig | None = None


def _checked(given: Mapping[str, object]) -> list[_Options]:
    """Options that are right.

    Raises:
        ConfigError: one line per problem.
    """
    if given.get("type") == TIER_NAMES["type"]:  # an entry of secondary_tiers
        tiers = [given]
    elif not OFFLOADING_FIELDS.intersection(given):
        return [_Options(given, SSDKVConfig.from_extra_config(given))]
    else:
        tiers = [*tier_entries(given)]
    if not tiers:
        raise ConfigError(f"secondary_tiers: no entry is ours; add {json.dumps(TIER_NAMES)}")
    pairs = [tier_options(entry) for entry in tiers]
    return [
        _Options(entry, config, tier) for entry, (tier, config) in zip(tiers, pairs, strict=True)
    ]


class Row(NamedTuple):
    """An option, its value in force as JSON holds it, and where that comes from."""

    option: str
    value: object
    source: Literal["given", "default"]


def _rows(model: BaseModel, given: Mapping[str, object], prefix: str = "") -> list[Row]:
    rows: list[Row] = []
    dumped = model.model_dump(mode="json")
    for name in type(model).model_fields:
        value = getattr(model, name)
        inner = given.get(name)
        if isinstance(value, BaseModel):
            rows += _rows(value, inner if isinstance(inner, Mapping) else {}, f"{prefix}{name}.")
        else:
            source: Literal["given", "default"] = "given" if name in given else "default"
            rows.append(Row(f"{prefix}{name}", dumped[name], source))
    return rows


def _all_rows(options: _Options) -> list[Row]:
    """Options with the value in force; of a tier those that it has."""
    rows = _rows(options.config, options.given)
    if options.tier is None:
        return rows
    has = [row for row in rows if row.option.partition(".")[0] in OF_THE_STORE]
    return [*_rows(options.tier, options.given), *has]


def _on_this_machine(config: SSDKVConfig) -> list[tuple[str, str]]:
    paths = config.device_paths(_MODEL_KEY)
    capacities = config.device_capacities(_MODEL_KEY)
    given = config.device_weights()
    weights = [f"{w:g}" for w in given] if given else ["measured at start"] * len(paths)
    rows = [
        (f"device {path}", f"{format_size(capacity // 2**20 * 2**20)}, weight {weight}")
        for path, capacity, weight in zip(paths, capacities, weights, strict=True)
    ]
    rows.append(("state directory", str(config.state_path(_MODEL_KEY))))
    rows.append(("DRAM of a single worker", format_size(config.dram_bytes(1) // 2**20 * 2**20)))
    return rows


_File = Annotated[
    str,
    typer.Argument(
        metavar="FILE", help=f"JSON file with the options or with {EXTRA}; - is standard input."
    ),
]


@app.command()
def check(file: _File, as_json: arguments.Json = False) -> None:
    """Check the options in FILE. Exits with 1 and a line per problem when they are wrong.

    An option that has no effect is a warning, which names the missing condition. Drives and key
    files are not checked; `ssdkv doctor --device` checks drives.
    """
    problem, warnings = "", list[str]()
    try:
        warnings = [line for one in _checked(_load(file)) for line in _warnings(one.config)]
    except ConfigError as error:
        problem = str(error)
    if as_json:
        found = {"ok": not problem, "problems": problem.splitlines(), "warnings": warnings}
        arguments.print_json(found)
    else:
        _warn(warnings)
        typer.echo(problem or "ok", err=bool(problem))
    if problem:
        raise typer.Exit(1)


def _warnings(config: SSDKVConfig) -> list[str]:
    return [str(vain) for vain in without_effect(config)]


def _warn(lines: list[str]) -> None:
    for line in lines:
        typer.echo(f"warning: {line}", err=True)


@app.command()
def show(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE]", help="File as for `config check`; default: the default options."
        ),
    ] = None,
    as_json: arguments.Json = False,
) -> None:
    """Print every option with the value in force, and its meaning for this machine."""
    try:
        found = _checked({} if file is None else _load(file))
        here = [line for one in found for line in _on_this_machine(one.config)]
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    rows = [row for one in found for row in _all_rows(one)]
    warnings = [line for one in found for line in _warnings(one.config)]
    if as_json:
        content = {
            "options": [row._asdict() for row in rows],
            "on_this_machine": dict(here),
            "warnings": warnings,
        }
        arguments.print_json(content)
        return
    console = Console()
    options = Table("Option", "Value", "From", box=None, pad_edge=False)
    for row in rows:
        cells = (row.option, json.dumps(row.value), row.source)
        options.add_row(*(Text(cell, overflow="fold") for cell in cells))
    console.print(options)
    console.print()
    machine = Table("On this machine", "", box=None, pad_edge=False)
    for name, value in here:
        machine.add_row(Text(name, overflow="fold"), Text(value))
    console.print(machine)
    _warn(warnings)


@app.command()
def schema() -> None:
    """Print the JSON Schema of the options, for editors and other programs."""
    arguments.print_json(SSDKVConfig.model_json_schema())
