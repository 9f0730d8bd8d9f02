"""Suites of requests over long real texts, whose right continuations are known.

``text``: documents, continued by their own last tokens. ``needles``: sentences with a number each,
put into a document, one of which the prompt begins again. ``json``: a table inside a document, rows
of which follow as JSON. What a question needs lies in the first half of its context, so no window
can answer it.

The continuation is forced, token by token. A part of it is right when the model's first choice was
right for each of its tokens: for a whole answer that is the exact match of greedy decoding, and a
wrong field of a JSON object spoils no later one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.accuracy.documents import DOCUMENTS, PROSE, text_of

SuiteName = Literal["text", "needles", "json"]
SUITES: Final[tuple[SuiteName, ...]] = get_args(SuiteName)

FORCED_TOKENS: Final = 256
"""Number of forced tokens of a document: the first comes from the prompt, the others from 255
decode steps."""
NEEDLES: Final = (
    "The access code of the Lisbon office is",
    "The ticket to the opera in Vienna cost",
    "The captain of the red ship sold his boat for",
    "The phone number of the bakery in Oslo is",
    "The population of the island of Gorm is",
    "The serial number of Anna's bicycle is",
    "The telescope on the mountain weighs",
    "The winning lottery number in Dublin was",
    "The farmer near Toledo counted his olive trees and found",
    "The locker at the railway station in Prague opens with",
    "The oldest manuscript of the abbey has the shelf mark",
    "The weather balloon over Finland rose to a height of",
    "The violin that was made in Cremona was insured for",
    "The satellite called Merle circles the Earth in orbit",
    "The marathon in Nairobi was run by a crowd of",
    "The postal code of the lighthouse keeper is",
)
"""Unlike each other: a small model mixes up what is worded alike, however it attends."""
ROWS: Final = 10
_EXAMPLES: Final = 2
"""Rows of the table that the question shows as JSON."""
_PLACES: Final = "Lisbon", "Oslo", "Vienna", "Dublin", "Prague", "Warsaw", "Athens", "Zurich"
_NAMES: Final = (
    *("Adler", "Bruno", "Clara", "Diana", "Edwin", "Flora"),
    *("Greta", "Harold", "Irene", "Jonas", "Karin", "Louis"),
)
_TRADES: Final = "baker", "driver", "farmer", "lawyer", "miner", "nurse", "painter", "teacher"

Tokenizer = Any
"""A tokenizer of transformers."""
Span = tuple[int, int]
"""First token of a part of a continuation, and the one behind its last."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and its right continuation.

    Attributes:
        group: Requests of a group share all of their prompt but its end.
        forced: Token ids of the continuation.
        parts: Those of its tokens that answer something, each part by itself.
    """

    group: str
    name: str
    prompt: tuple[int, ...]
    forced: tuple[int, ...]
    parts: tuple[Span, ...] = ()


def requests(suite: SuiteName, tokenizer: Tokenizer, tokens: int, count: int) -> list[Request]:
    """The requests of a suite, each of ``tokens`` tokens at most, its continuation included.

    ``count``: questions about each document of ``needles`` and ``json``, at most
    ``len(NEEDLES)``. Same arguments, same requests.

    Raises:
        BenchError: the machine does not have a document, or it is too short.
    """
    return _MAKERS[suite](tokenizer, tokens, count)


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    found: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return found


def _document(tokenizer: Tokenizer, name: str, tokens: int) -> list[int]:
    """The first ``tokens`` tokens of a document."""
    # A token has fewer than 16 characters on average, whatever the tokenizer.
    found = _encoded(tokenizer, text_of(name)[: 16 * tokens])
    if len(found) < tokens:
        raise BenchError(f"document {name}: {len(found)} tokens, not {tokens}; ask for less")
    return found[:tokens]


def _text(tokenizer: Tokenizer, tokens: int, _count: int) -> list[Request]:
    forced = min(FORCED_TOKENS, tokens // 2)
    found = []
    for name in DOCUMENTS:
        ids = tuple(_document(tokenizer, name, tokens))
        found.append(Request(name, name, ids[:-forced], ids[-forced:]))
    return found


def _needles(tokenizer: Tokenizer, tokens: int, count: int) -> list[Request]:
    found = []
    for document in PROSE:
        draw = random.Random(f"needles {document} {tokens}")
        answers = [f" {draw.randrange(10_000, 100_000)}." for _ in NEEDLES]
        needles = [
            _encoded(tokenizer, f"\n\n{text}{answer}\n\n")
            for text, answer in zip(NEEDLES, answers, strict=True)
        ]
        left = tokens - max(map(len, needles))
        context = _scattered(draw, needles, _document(tokenizer, document, tokens), left)
        for text, answer in list(zip(NEEDLES, answers, strict=True))[:count]:
            forced = _encoded(tokenizer, answer)
            prompt = (*context, *_encoded(tokenizer, f"\n\n{text}"))
            whole = ((0, len(forced)),)
            found.append(Request(document, text, prompt, tuple(forced), whole))
    return found


def _scattered(
    draw: random.Random, needles: Sequence[list[int]], text: list[int], tokens: int
) -> list[int]:
    """``tokens`` tokens of text with the needles anywhere in its first half."""
    rest = tokens - sum(map(len, needles))
    cuts = sorted(draw.randrange(rest // 2) for _ in needles)
    context: list[int] = []
    for begin, end, needle in zip([0, *cuts[:-1]], cuts, needles, strict=True):
        context += [*text[begin:end], *needle]
    return [*context, *text[cuts[-1] : rest]]


def _json(tokenizer: Tokenizer, tokens: int, count: int) -> list[Request]:
    found = []
    for document in PROSE:
        rows = _table(random.Random(f"json {document} {tokens}"))
        table = "\n".join(", ".join(f"{k}: {v}" for k, v in row.items()) for row in rows)
        shown = "".join(json.dumps(row) + "\n" for row in rows[:_EXAMPLES])
        above = _encoded(tokenizer, f"\n\n{table}\n\n")
        below = _encoded(tokenizer, f"\n\nThe rows of the table as JSON:\n{shown}")
        asked = [(row, *_object(tokenizer, row)) for row in rows[_EXAMPLES:]]
        left = tokens - len(above) - len(below) - max(len(p) + len(f) for _, p, f, _ in asked)
        text = _document(tokenizer, document, max(left, 1))
        # A quarter is ahead of it, so that it is neither at the beginning nor near the end.
        context = [*text[: left // 4], *above, *text[left // 4 :], *below]
        found += [
            Request(document, row["name"], (*context, *prompt), tuple(forced), parts)
            for row, prompt, forced, parts in asked[:count]
        ]
    return found


def _table(draw: random.Random) -> list[dict[str, str]]:
    """Rows of which none tells the fields of another."""
    return [
        {
            "name": name,
            "city": draw.choice(_PLACES),
            "trade": draw.choice(_TRADES),
            "year": str(draw.randrange(1950, 2000)),
            "fee": str(draw.randrange(100, 1000)),
        }
        for name in draw.sample(_NAMES, ROWS)
    ]


def _object(
    tokenizer: Tokenizer, row: dict[str, str]
) -> tuple[list[int], list[int], tuple[Span, ...]]:
    """A row as JSON: its name for the prompt, the other fields to be continued, their values."""
    name, *others = row
    prompt = _encoded(tokenizer, f'{{"{name}": "{row[name]}",')
    forced: list[int] = []
    parts = []
    for key in others:
        forced += _encoded(tokenizer, f' "{key}": "')
        value = _encoded(tokenizer, row[key])
        parts.append((len(forced), len(forced) + len(value)))
        forced += [*value, *_encoded(tokenizer, '",')]
    return prompt, forced, tuple(parts)


def right(parts: Iterable[Span], same: Sequence[bool]) -> int:
    """Parts all of whose tokens were the model's first choice, by token in ``same``."""
    return sum(all(same[begin:end]) for begin, end in parts)


_MAKERS: Final[dict[SuiteName, Callable[[Tokenizer, int, int], list[Request]]]] = {
    "text": _text,
    "needles": _needles,
    "json": _json,
}
