"""Entries of docs about messages, found from a message as its reader would."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
ANYTHING = "…"
_WILD = re.compile(r"…|\b(?:PATH|DEVICE|N|M|X)\b")
_PREFIX = re.compile(r"^(?:ssdkv|batches): ")
_OF_THE_SYSTEM = 10
"""A message with fewer letters of its own is a path and the operating system's words."""


@dataclass(frozen=True)
class Entry:
    """A message as docs have it, and the row of the table that it stands in."""

    phrase: str
    row: tuple[str, ...]

    @property
    def cure(self) -> str:
        return self.row[-1]

    @property
    def pattern(self) -> re.Pattern[str]:
        """Matches the beginning of the message."""
        parts = [re.escape(part) for part in _WILD.split(self.phrase)]
        return re.compile(".*".join(parts), re.DOTALL)


@cache
def entries() -> tuple[Entry, ...]:
    """All messages in the tables of docs, the longest first."""
    found = []
    for page, heading in (("operations.md", "# From the message"), ("batch.md", "# What a crash")):
        section = (DOCS / page).read_text().split(heading)[1].split("\n## ")[0]
        for line in section.splitlines():
            cells = tuple(cell.strip() for cell in line.strip("|").split("|"))
            if line.startswith("| ") and len(cells) >= 3:
                spans = re.findall(r"`([^`]*)`", cells[0])
                found += [Entry(span, cells) for span in spans if ANYTHING in span or " " in span]
    return tuple(sorted(found, key=lambda entry: -len(_letters(entry.phrase))))


def _letters(text: str) -> str:
    return re.sub(r"[^a-zA-Z]", "", _WILD.sub("", text))


def is_of_the_system(message: str) -> bool:
    """Whether it says little that is ours; variable parts are ``ANYTHING``."""
    return len(_letters(message)) < _OF_THE_SYSTEM


def entry_for(message: str) -> Entry | None:
    """What docs say about a message: the entry that is most like it."""
    text = _PREFIX.sub("", message)
    return next((entry for entry in entries() if entry.pattern.match(text)), None)


class Undocumented(logging.Handler):
    """Keeps warnings and errors that docs say nothing about. Benches are not part of an engine.

    Attributes:
        messages: These.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        bench = record.name.startswith("vllm_ssdkv.profiling")
        if not bench and entry_for(record.getMessage()) is None:
            self.messages.append(record.getMessage())
