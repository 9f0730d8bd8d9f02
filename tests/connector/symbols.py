"""A model that computes nothing: what stands for the KV of its tokens, and what it samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

VOCAB = 500
Symbols = list[int]


def extend(previous: int, tokens: Iterable[int]) -> Symbols:
    """What stands for the KV of each of these tokens, after ``previous``."""
    found: Symbols = []
    for token in tokens:
        previous = hash((previous, token))
        found.append(previous)
    return found


def of_group(symbols: Symbols, group: int) -> Symbols:
    """What stands for the KV of these tokens in the layers of a KV cache group."""
    return [hash((symbol, group)) for symbol in symbols] if group else symbols


def state_after(symbol: int, group: int, block: int) -> Symbols:
    """What stands for the state of a group's layers after the token that ``symbol`` stands for, in
    a block of so many tokens."""
    return of_group([symbol], group) * block


def next_token(last: int) -> int:
    """What the model samples after the KV that ``last`` stands for."""
    return 3 + last % VOCAB


def answer(prompt: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """The right tokens, by the weights that ``seed`` stands for."""
    symbols = extend(seed, prompt)
    tokens: list[int] = []
    while len(tokens) < count:
        tokens.append(next_token(symbols[-1]))
        symbols += extend(symbols[-1], tokens[-1:])
    return tokens


def accepted(after: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """Tokens that a step samples: the drafts that are right, and one more. ``after`` stands for
    the KV of the last token before them and of each of them."""
    tokens: list[int] = []
    for symbol, draft in zip(after, [*drafts, None], strict=False):
        tokens.append(next_token(symbol))
        if tokens[-1] != draft:
            break
    return tokens
