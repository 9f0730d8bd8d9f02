"""Users and requests of the KV-cache workload of MLPerf Storage 3.0.

From the public specification of the benchmark (mlcommons/storage, kv_cache_benchmark/docs): three
kinds of users, whose prompts, answers and pauses lie in ranges; a prompt is written whole; every 32
tokens of an answer read the whole of it again; a prompt of 10,000 tokens or more is written only;
a turn reads the turn before; and some prompts begin with one of three system prompts, which all
users share.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

WRITE_ONLY_TOKENS: Final = 10_000
"""Prompts of as many tokens are not read: another node decodes."""
DECODE_TOKENS: Final = 32
"""Tokens of an answer, for which the whole prompt is read once."""
SYSTEM_PROMPTS: Final = 3
SYSTEM_TOKENS: Final = 64
"""Tokens of a system prompt; the specification has sentences of some words: one block."""
SYSTEM_SHARE: Final = 0.5
"""Share of requests that begin with a system prompt; assumed, the specification does not say."""
TURNS: Final = 4
"""Turns of a conversation; assumed, the specification does not say."""


@dataclass(frozen=True, slots=True)
class Persona:
    """A kind of user: least and most of each.

    Attributes:
        prompt: Tokens of a prompt.
        answer: Tokens of an answer.
        pause_s: Seconds between an answer and the next prompt.
    """

    name: str
    prompt: tuple[int, int]
    answer: tuple[int, int]
    pause_s: tuple[float, float]


PERSONAS: Final = (
    Persona("chatbot", (512, 4096), (50, 200), (0.1, 0.5)),
    Persona("coding", (4096, 25000), (100, 500), (0.2, 1.0)),
    Persona("document", (4096, 16384), (200, 800), (0.3, 1.5)),
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a user.

    Attributes:
        tokens: Of its prompt.
        reads: Of the whole prompt, after it was written.
        pause_s: Before it.
        system: Number of the system prompt that it begins with. None: none.
        first: Whether a conversation begins, so that no turn before is read.
    """

    tokens: int
    reads: int
    pause_s: float
    system: int | None
    first: bool


def turns(user: int, seed: int, scale: float = 1.0) -> Iterator[Turn]:
    """All requests of a user, without end. The same seed gives the same ones.

    ``scale``: of the lengths of prompts; 1 is the benchmark's.
    """
    source = random.Random(f"{seed} {user}")
    persona = PERSONAS[user % len(PERSONAS)]
    number = 0
    while True:
        tokens = source.randint(*persona.prompt)
        answer = source.randint(*persona.answer)
        decodes = -(-answer // DECODE_TOKENS)
        system = source.randrange(SYSTEM_PROMPTS) if source.random() < SYSTEM_SHARE else None
        yield Turn(
            max(1, round(tokens * scale)),
            0 if tokens >= WRITE_ONLY_TOKENS else decodes,
            source.uniform(*persona.pause_s),
            system,
            number % TURNS == 0,
        )
        number += 1
