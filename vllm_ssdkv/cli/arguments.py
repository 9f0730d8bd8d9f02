"""Arguments of commands: paths, sizes and files, each read in one way; and printing JSON."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from vllm_ssdkv.base.sizes import parse_size


def place(text: str | Path) -> Path:
    """An absolute path, from the working directory on; ``~`` is the home directory.

    Raises:
        BadParameter: there is no such user, or no working directory.
    """
    path = os.path.expanduser(text)
    if path.startswith("~"):
        raise typer.BadParameter(f"{text}: there is no such user")
    try:
        return Path(os.path.abspath(path))
    except FileNotFoundError:
        raise typer.BadParameter(f"{text}: the working directory was removed") from None


def directory(text: str | Path) -> Path:
    """The place of a directory that exists."""
    path = place(text)
    if not path.is_dir():
        raise typer.BadParameter(f"{path} is not a directory")
    return path


def directory_to_write(text: str | Path) -> Path:
    """The same, of one that can be written."""
    path = directory(text)
    if not os.access(path, os.W_OK | os.X_OK):
        raise typer.BadParameter(f"{path} cannot be written; chown it, or name another")
    return path


def file_to_read(text: str | Path) -> Path:
    """The place of a file that exists."""
    path = place(text)
    if not path.exists():
        raise typer.BadParameter(f"{path} does not exist")
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a directory")
    return path


def file_to_write(text: str | Path) -> Path:
    """The place of a file in a directory that can be written. Said before the work, not after."""
    path = place(text)
    directory_to_write(path.parent)
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a directory")
    return path


def size(text: str | int) -> int:
    """Bytes, as ``sizes.parse_size`` reads them."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: {error}") from None


Devices = Annotated[
    list[Path] | None,
    typer.Argument(
        parser=place,
        metavar="DIR...",
        help="The store's devices in the order of the option devices; or its state directory "
        "alone, when they are where they were.",
    ),
]
"""Of every command on one store."""

StateDir = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        parser=place,
        metavar="DIR",
        help="Directory of store.json, when it is on no device.",
    ),
]
"""Of every command on one store."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to the output.")]
"""Of every command that has results."""


def print_json(content: object) -> None:
    """The only thing that a command prints to the output where JSON is asked for."""
    typer.echo(json.dumps(content, indent=2))


@contextlib.contextmanager
def output_for_results() -> Iterator[None]:
    """While the block lasts, what this process and its children print goes to the error output.

    vLLM logs to the output. The descriptor itself is exchanged, which children inherit.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
