"""Consoles of benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console

_WIDTH: Final = 112


def wide_console(*, stderr: bool = False) -> Console:
    """Prints tables of 112 columns: a narrow terminal breaks their lines, and shows them whole."""
    console = Console(stderr=stderr)
    console.width = max(_WIDTH, console.width)
    return console


@contextmanager
def progress(console: Console) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a benchmark's present case.

    A terminal shows it in one line that changes, a file or a pipe gets a line for each case.
    """
    if not console.is_terminal:
        yield lambda what: console.print(what, markup=False, highlight=False, soft_wrap=True)
        return
    with console.status("starting") as status:
        yield status.update
