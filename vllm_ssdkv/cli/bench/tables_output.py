"""Tables of benchmarks in the terminal, as Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.markup import escape
from rich.table import Table as TerminalTable

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.cli import arguments
from vllm_ssdkv.profiling.console import wide_console
from vllm_ssdkv.profiling.table import Table


def print_tables(
    tables: Sequence[Table], *, as_json: bool, beside: Mapping[str, object] | None = None
) -> None:
    """Print tables for people; first, where that is asked for, as a JSON document with what is
    ``beside`` them."""
    if as_json:
        arguments.print_json({**(beside or {}), "tables": [asdict(table) for table in tables]})
    console = wide_console(stderr=as_json)
    for table in tables:
        shown = TerminalTable(title=escape(table.title), title_justify="left", box=None)
        for number, column in enumerate(table.columns):
            words = any(isinstance(row[number], str) for row in table.rows)
            shown.add_column(escape(column), justify="left" if words else "right")
        for row in table.rows:
            shown.add_row(*(escape(table.text(cell)) for cell in row))
        console.print(shown)
        if table.note:
            console.print(escape(table.note), style="dim")
        console.print()


def write_markdown(tables: Sequence[Table], path: Path) -> None:
    """Write all tables as Markdown.

    Raises:
        BenchError: the file cannot be written.
    """
    try:
        path.write_text("\n".join(table.markdown() for table in tables), encoding="utf-8")
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror}") from error
