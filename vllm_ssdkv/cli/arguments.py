"""Arguments of commands: paths, sizes, files and lists, each read in one way; and printing JSON."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from vllm_ssdkv.base.sizes import parse_size

_Name = TypeVar("_Name", bound=str)


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


def numbers(option: str, text: str, low: float, high: float) -> list[float]:
    """The numbers of a list ``1,2,3``.

    Raises:
        BadParameter: one is none, or not within ``low`` and ``high``.
    """
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(low <= value <= high for value in found):
        raise typer.BadParameter(f"{text!r}: numbers from {low:g} to {high:g}", param_hint=option)
    return found


def whole_numbers(option: str, text: str, low: int, high: int) -> list[int]:
    """The whole numbers of a list, ascending, each once.

    Raises:
        BadParameter: one is none, or not within ``low`` and ``high``.
    """
    found = numbers(option, text, low, high)
    if any(value != int(value) for value in found):
        raise typer.BadParameter(f"{text!r}: whole numbers from {low} to {high}", param_hint=option)
    return sorted({int(value) for value in found})


def names(option: str, text: str, known: Sequence[_Name]) -> list[_Name]:
    """The names of a list, in its order, each once.

    Raises:
        BadParameter: one is not ``known``.
    """
    by_text: dict[str, _Name] = {name: name for name in known}
    found = dict.fromkeys(text.split(","))
    if not found.keys() <= by_text.keys():
        raise typer.BadParameter(f"{text!r}: any of {', '.join(known)}", param_hint=option)
    return [by_text[name] for name in found]


def one_of(option: str, value: object, allowed: Sequence[object]) -> None:
    """Check one value.

    Raises:
        BadParameter: it is not ``allowed``.
    """
    if value not in allowed:
        listed = ", ".join(map(str, allowed))
        raise typer.BadParameter(f"{value!r}: any of {listed}", param_hint=option)


Devices = Annotated[
    list[Path] | None,
    typer.Argument(
        parser=place,
        metavar="DIR...",
        help="Devices of the store, in the order of the option devices. The state directory alone "
        "is enough if no device has moved.",
    ),
]
"""Devices argument of every command on one store."""

StateDir = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        parser=place,
        metavar="DIR",
        help="Directory of store.json, if it is not on a device.",
    ),
]
"""State directory of every command on one store."""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
"""JSON flag of every command that has results."""


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
