"""Consoles of benchmarks."""

from __future__ import annotations

from typing import Final

from rich.console import Console

_WIDTH: Final = 112


def wide_console(*, stderr: bool = False) -> Console:
    """Prints tables of 112 columns: a narrow terminal breaks their lines, and shows them whole."""
    console = Console(stderr=stderr)
    console.width = max(_WIDTH, console.width)
    return console
