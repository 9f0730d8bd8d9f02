"""``ssdkv serve``: vLLM's server with this package's connector, for the options that most need."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.cli import arguments
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.connector.names import transfer_config


def serve(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Name or directory of the model for vLLM.")
    ],
    vllm_arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGUMENTS]", help="Arguments of `vllm serve`."),
    ] = None,
    page: Annotated[
        bool, typer.Option("--page", help="Serve contexts larger than the KV cache.")
    ] = False,
    selector: Annotated[
        str | None,
        typer.Option(
            help="Decode from the pages that this selector chooses. Needs --page; answers may "
            "differ (docs/accuracy.md)."
        ),
    ] = None,
    device: Annotated[
        list[Path] | None,
        typer.Option(
            parser=arguments.place,
            metavar="DIR",
            show_default="a directory in ~/.cache/ssdkv",
            help="Keep the store in this directory; repeat it for more SSDs.",
        ),
    ] = None,
    capacity: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE",
            show_default="a quarter of the free space, 64GiB at most",
            help="Limit the store on the device before it; give it for each device or for none.",
        ),
    ] = None,
) -> None:
    """Start `vllm serve` with KV on SSDs: mode reuse, or with --page mode page.

    Checks the options, prints the command, then becomes it, so that signals and exit codes are
    vLLM's. Other options: `docs/options.md`.
    """
    given = vllm_arguments or []
    try:
        options = _options(page, selector, device or [], capacity or [])
        _check_vllm(given)
        program = _program()
    except ConfigError as error:
        typer.echo(f"ssdkv serve: {error}", err=True)
        raise typer.Exit(1) from None
    words = ["vllm", "serve", model, *given]
    if page and shutil.which("nvidia-smi") and "--attention-backend" not in _names(given):
        words += ["--attention-backend", "CUSTOM"]
    words += ["--kv-transfer-config", json.dumps(transfer_config(options))]
    typer.echo(shlex.join(words))
    sys.stdout.flush()
    os.execv(program, words)


def _program() -> Path:
    """The command of vLLM. Raises ConfigError: this environment has none."""
    program = Path(sys.executable).with_name("vllm")
    if not program.is_file():
        raise ConfigError(f"vLLM is not installed in this environment: there is no {program}")
    return program


def _options(
    page: bool, selector: str | None, devices: Sequence[Path], capacities: Sequence[str]
) -> dict[str, Any]:
    """Options of the plugin. Raises ConfigError: they contradict each other, or one is wrong."""
    if selector is not None and not page:
        raise ConfigError("--selector: it chooses pages, which mode reuse has not; give --page")
    if capacities and len(capacities) != len(devices):
        raise ConfigError(
            f"--capacity: {len(capacities)} given, --device: {len(devices)}; give a capacity "
            "behind each device, or none"
        )
    options: dict[str, Any] = {"mode": "page"} if page else {}
    if selector is not None:
        options["selector"] = selector
    if devices:
        entries = [{"path": str(path)} for path in devices]
        for entry, size in zip(entries, capacities, strict=False):
            entry["capacity"] = size
        options["devices"] = entries
    SSDKVConfig.from_extra_config(options)
    return options


def _check_vllm(given: Sequence[str]) -> None:
    """Raises ConfigError: vLLM's arguments name a connector of their own."""
    for name in _names(given):
        # vLLM takes an option also by the beginning of its name.
        if name.startswith("--kv-t"):
            raise ConfigError(
                f"{name}: ssdkv serve writes --kv-transfer-config itself; start `vllm serve` to "
                "give your own"
            )


def _names(given: Sequence[str]) -> list[str]:
    """Names of options, spelled as vLLM does, without fields of them."""
    names = [word.partition("=")[0].partition(".")[0] for word in given if word.startswith("--")]
    return [name.replace("_", "-") for name in names]
