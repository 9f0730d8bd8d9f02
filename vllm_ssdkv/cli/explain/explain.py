"""``ssdkv explain``: cause and cure of a message."""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Final

import typer

from vllm_ssdkv.cli import arguments
from vllm_ssdkv.cli.explain.catalog import Message, anchors, entries, entry_in

_PAGE: Final = "docs/messages.md"
_LABELS: Final = (("why", "Cause"), ("sees", "Effect"), ("moves", "Metrics"), ("cure", "Cure"))


def _plain(text: str) -> str:
    """Markdown as a terminal shows it: links by their targets."""
    text = re.sub(r"\[([^\]]*)\]\(([^)]*)\)", r"\1 (docs/\2)", text)
    return text.replace("`", "")


def _fields(message: Message) -> dict[str, str]:
    (anchor,) = [anchor for known, anchor in anchors() if known is message]
    found = {name: _plain(getattr(message, name)) for name, _ in _LABELS}
    return {**found, "page": f"{_PAGE}#{anchor}"}


def explain(
    message: Annotated[
        list[str],
        typer.Argument(
            metavar="MESSAGE",
            help="Error or line of a log, in quotes. Time, process and level may stand before it.",
        ),
    ],
    as_json: arguments.Json = False,
) -> None:
    """Print the cause and the cure of an error or a line of the log.

    Exits with 1 where the message is not known, and prints the messages that are most like it.
    """
    text = " ".join(message)
    entry = entry_in(text)
    if entry is None:
        near = difflib.get_close_matches(text, [entry.text for entry in entries()], 3, 0.3)
        typer.echo(
            "no such message; " + ("most like it:" if near else "nothing is like it"), err=True
        )
        for other in near:
            typer.echo(f"  {other}", err=True)
        raise typer.Exit(1)
    fields = _fields(entry.message)
    if as_json:
        arguments.print_json({"message": entry.text, **fields})
        return
    typer.echo(entry.text)
    for name, label in _LABELS:
        if fields[name]:
            typer.echo(f"{label + ':':9}{fields[name]}")
    typer.echo(f"{'Page:':9}{fields['page']}")
