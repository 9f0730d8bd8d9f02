"""Results of a run, one JSON object per line, appended at once and never rewritten."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from vllm_ssdkv.base.errors import BenchError

RESULTS: Final = "results.jsonl"
REPORT: Final = "report.txt"

NO_TIME: Final = "no time was left for it"
"""Error of a case that was not reached."""

TIMED: Final = "timed"
"""Figure that says how kernels were called while they were timed."""

STAGE: Final = "(stage)"
"""Case of the row that says how a whole stage ended."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a case, or a text, whose unit is empty then."""

    name: str
    value: float | str
    unit: str = ""

    def text(self) -> str:
        """The figure for people."""
        value = self.value if isinstance(self.value, str) else f"{self.value:.4g}"
        return f"{self.name} {value} {self.unit}".rstrip()


@dataclass(slots=True)
class Row:
    """Result of one case of a stage.

    Attributes:
        stage, case: Its names.
        ok: Whether the case did what it should; a case that was not reached did not.
        seconds: How long it took.
        figures: What it measured.
        error: Why it failed, with the end of the traceback.
    """

    stage: str
    case: str
    ok: bool = True
    seconds: float = 0.0
    figures: list[Figure] = field(default_factory=list)
    error: str = ""

    @classmethod
    def parse(cls, line: str) -> Row:
        """The row of a line; raises ``BenchError`` if it is none."""
        try:
            held = json.loads(line)
            figures = [Figure(**figure) for figure in held.pop("figures")]
            return cls(**held, figures=figures)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BenchError(f"not a result: {line[:200]!r} ({error})") from error

    def text(self) -> str:
        """The row for people, with the last line of its error."""
        verdict = "ok    " if self.ok else "FAILED"
        parts = [f"{verdict} {self.stage}: {self.case} ({self.seconds:.1f} s)"]
        parts += [figure.text() for figure in self.figures]
        lines = self.error.strip().splitlines()
        return "; ".join(parts) + "".join(f"\n         {line}" for line in lines[-6:])


def latest(rows: Iterable[Row]) -> list[Row]:
    """The last row of each case, in the order of the first ones: a run may be continued."""
    return list({(row.stage, row.case): row for row in rows}.values())


class ResultLog:
    """Appends rows to ``results.jsonl`` and ``report.txt`` of a directory.

    Any number of processes may append at once: each line is one write.
    """

    def __init__(self, directory: Path):
        self.directory = directory

    def append(self, row: Row) -> None:
        """Add a row; it is in both files when the call returns."""
        self._write(RESULTS, json.dumps(asdict(row)))
        self._write(REPORT, row.text())

    def note(self, text: str) -> None:
        """Add a line to the report alone."""
        self._write(REPORT, text)

    def rows(self) -> list[Row]:
        """All rows so far. A last line that was cut off is left out."""
        return list(read_rows(self.directory / RESULTS))

    def _write(self, name: str, text: str) -> None:
        path = self.directory / name
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        fd = os.open(path, flags | os.O_CLOEXEC, 0o644)
        try:
            os.write(fd, f"{text}\n".encode())
        finally:
            os.close(fd)


def read_rows(path: Path) -> Iterator[Row]:
    """Rows of a file; raises ``BenchError`` for a line in the middle that is none."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            yield Row.parse(line)
        except BenchError:
            if number == len(lines) - 1:  # whoever wrote it was killed
                return
            raise
