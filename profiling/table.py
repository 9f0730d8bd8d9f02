"""Tables of results: one shape for the terminal, Markdown and JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

Cell: TypeAlias = str | float | int | None


@dataclass(slots=True)
class Table:
    """Rows with a name and a value per column.

    Attributes:
        title: What is shown, with units.
        columns: Names of all columns, that of the rows first.
        decimals: Of floats.
        note: Sentences below the table.
    """

    title: str
    columns: list[str]
    decimals: int = 0
    note: str = ""
    rows: list[list[Cell]] = field(default_factory=list)

    def add(self, *cells: Cell) -> None:
        """Add a row. Raises ValueError: it has not a cell per column."""
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns")
        self.rows.append(list(cells))

    def text(self, cell: Cell) -> str:
        """A cell as it is shown."""
        if cell is None:
            return "-"
        return f"{cell:.{self.decimals}f}" if isinstance(cell, float) else str(cell)

    def markdown(self) -> str:
        """The table as Markdown."""
        lines = [f"### {self.title}", ""]
        lines.append(f"| {' | '.join(self.columns)} |")
        lines.append("|---|" + "---:|" * (len(self.columns) - 1))
        lines += [f"| {' | '.join(map(self.text, row))} |" for row in self.rows]
        if self.note:
            lines += ["", self.note]
        return "\n".join(lines) + "\n"
