"""Catalog of errors and warnings, each with its cause and cure."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from typing import Final

ANYTHING: Final = "…"
"""Sign in a message for a part that differs."""

_DETAILS: Final = f": {ANYTHING}"
_WILD: Final = re.compile(r"…|\b(?:PATH|DEVICE|N|M|X)\b")
_BEFORE: Final = re.compile(r"(?:: |\] |^\w*Error:)\s*")
_SLUG_WORDS: Final = 7


@dataclass(frozen=True)
class Message:
    """Message, or several with one cause.

    Attributes:
        texts: Messages as they begin, with signs for parts that differ. None: it is a symptom.
        note: Kind or occasion of the message, or the symptom.
        why: Cause.
        cure: Remedy.
        sees: Effect on users.
        moves: Counters that move.
    """

    texts: tuple[str, ...] = ()
    note: str = ""
    why: str = ""
    cure: str = ""
    sees: str = ""
    moves: str = ""

    @property
    def slug(self) -> str:
        """Anchor on the page of messages, from the first text; unique with the catalog's order."""
        words = re.findall(
            r"[a-z0-9]+", _WILD.sub(" ", self.texts[0] if self.texts else self.note).lower()
        )
        return "-".join(words[:_SLUG_WORDS])


@dataclass(frozen=True)
class Section:
    """Messages of one occasion."""

    title: str
    intro: str
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Entry:
    """One text of a message."""

    text: str
    message: Message

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Pattern of the beginning of what is logged or raised; people leave details out."""
        text = self.text.removesuffix(_DETAILS)
        parts = [re.escape(part) for part in _WILD.split(text)]
        end = "(?:: |$)" if text != self.text else ""
        return re.compile(".*".join(parts) + end, re.DOTALL)


@cache
def sections() -> tuple[Section, ...]:
    """The catalog, in its order."""
    text = resources.files(__package__).joinpath("messages.toml").read_text(encoding="utf-8")
    return tuple(
        Section(
            section["title"],
            section.get("intro", ""),
            tuple(
                Message(**{**fields, "texts": tuple(fields.get("texts", ()))})
                for fields in section["message"]
            ),
        )
        for section in tomllib.loads(text)["section"]
    )


@cache
def entries() -> tuple[Entry, ...]:
    """Texts of all messages, the longest first."""
    found = [
        Entry(text, message)
        for section in sections()
        for message in section.messages
        for text in message.texts
    ]
    return tuple(sorted(found, key=lambda entry: -len(letters(entry.text))))


def letters(text: str) -> str:
    """Letters of a message, without parts that differ."""
    return re.sub(r"[^a-zA-Z]", "", _WILD.sub("", text))


def entry_for(message: str) -> Entry | None:
    """The entry that is most like a message of this package, which may begin with its name."""
    text = re.sub(r"^(?:ssdkv|batches): ", "", message)
    return next((entry for entry in entries() if entry.pattern.match(text)), None)


def entry_in(line: str) -> Entry | None:
    """The entry of a line as people paste it: with time, process, level or type of the error."""
    line = line.strip()
    starts = [0, *(found.end() for found in _BEFORE.finditer(line))]
    found = [entry for start in starts if (entry := entry_for(line[start:])) is not None]
    return max(found, key=lambda entry: len(letters(entry.text)), default=None)


def anchors() -> Iterator[tuple[Message, str]]:
    """Messages, each with an anchor that no other one has."""
    used: dict[str, int] = {}
    for section in sections():
        for message in section.messages:
            used[message.slug] = used.get(message.slug, 0) + 1
            times = used[message.slug]
            yield message, message.slug + (f"-{times}" if times > 1 else "")
