"""Questions to the demo model with known answers, each of which lies far back in a long context.

The model (``demo_model/README.md``) was trained on synthetic text: filler words, and between them
*needles*, statements such as ``key key = value value value value ;``. A question at the end of the
context names a key; the answer is what the needle says. Here the needles that a question needs all
lie in the older half of the context, so that no window over the newest tokens can answer it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

import vllm_ssdkv

DTYPE: Final = "bfloat16"


MODEL_DIR: Final = Path(vllm_ssdkv.__file__).parent / "demo_model"

Task = Literal["multikey", "chain", "single", "copy"]
TASKS: Final[tuple[Task, ...]] = get_args(Task)

MIN_CONTEXT: Final = 1024
MAX_CONTEXT: Final = 32768
"""Longest context at which the model was found to answer all of :data:`TASKS` right."""
HEAD_SIZE: Final = 64
"""Channels of K of each of the model's heads."""

SYMBOLS: Final = {
    "<bos>": 1,
    ".": 4,
    "=": 5,
    ";": 6,
    "?": 7,
    "->": 8,
    "!": 9,
    "[": 10,
    "]": 11,
    "&": 12,
}
FILLER: Final = range(32, 289)
CONTENT: Final = range(289, 801)

_CHAINS: Final = 8
_HOPS: Final = 4
_PASSAGES: Final = 8
_PASSAGE_WORDS: Final = 22
_ASKED: Final = 8
"""Different questions of a conversation."""
_NEEDLE_SHARE: Final = 0.25
"""Share of the context that is needles in ``multikey``."""

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and the one right answer to it.

    Attributes:
        prompt: Token ids of context and question.
        answer: Token ids of the answer, its end mark included.
        distance: Tokens between the end of the prompt and the newest token that the answer needs.
    """

    task: Task
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    distance: int


@cache
def vocabulary() -> tuple[str, ...]:
    """The model's words by token id, from its tokenizer's file."""
    with (MODEL_DIR / "tokenizer.json").open(encoding="utf-8") as file:
        ids: dict[str, int] = json.load(file)["model"]["vocab"]
    return tuple(sorted(ids, key=ids.__getitem__))


def text(ids: Sequence[int]) -> str:
    """The words of token ids; the model's tokenizer makes the same ids of it."""
    words = vocabulary()
    return " ".join(words[i] for i in ids)


def ask(task: Task, tokens: int, seed: int) -> Question:
    """A question whose prompt is ``tokens`` long (MIN_CONTEXT to MAX_CONTEXT).

    Same arguments, same question. Raises ValueError when ``tokens`` is out of range.
    """
    if not MIN_CONTEXT <= tokens <= MAX_CONTEXT:
        raise ValueError(f"a context has {MIN_CONTEXT} to {MAX_CONTEXT} tokens, not {tokens}")
    rng = np.random.default_rng([seed, tokens, TASKS.index(task)])
    (needed, question, answer), *rest = _MAKERS[task](rng, tokens)
    others = [needle for fact in rest for needle in fact[0]]
    if len(needed) > 1:
        others = [others[i] for i in rng.permutation(len(others))]
    context_tokens = tokens - 1 - len(question)
    older_tokens = context_tokens // 2
    split = len(others) // 2
    older, ends = _scatter(rng, [*needed, *others[:split]], older_tokens)
    newer, _ = _scatter(rng, others[split:], context_tokens - older_tokens)
    prompt = np.concatenate([_ids("<bos>"), older, newer, question])
    newest_needed = 1 + int(ends[: len(needed)].max())
    return Question(task, tuple(prompt.tolist()), tuple(answer.tolist()), tokens - newest_needed)


def conversation(task: Task, context: int, tokens: int, seed: int) -> tuple[Ids, Ids]:
    """A context of so many tokens, and ``tokens`` tokens of questions on it with right answers.

    A few questions are asked again and again, each time in another order; what they need lies
    anywhere in the context. Same arguments, same tokens. Raises ValueError when ``context`` is out
    of range.
    """
    if not MIN_CONTEXT <= context <= MAX_CONTEXT:
        raise ValueError(f"a context has {MIN_CONTEXT} to {MAX_CONTEXT} tokens, not {context}")
    rng = np.random.default_rng([seed, context, TASKS.index(task), 1])
    facts = _MAKERS[task](rng, context)
    body, _ = _scatter(rng, [needle for fact in facts for needle in fact[0]], context - 1)
    turns = [np.concatenate([question, answer]) for _, question, answer in facts[:_ASKED]]
    asked: list[Ids] = []
    while sum(map(len, asked)) < tokens:
        asked += [turns[i] for i in rng.permutation(len(turns))]
    return np.concatenate([_ids("<bos>"), body]), np.concatenate(asked)[:tokens]


def _ids(*symbols: str) -> Ids:
    return np.array([SYMBOLS[symbol] for symbol in symbols], dtype=np.int64)


def _words(rng: np.random.Generator, count: int) -> Ids:
    return rng.integers(CONTENT.start, CONTENT.stop, count)


def _keys(rng: np.random.Generator, count: int) -> Ids:
    """Distinct keys of two words each, [count, 2]."""
    size = len(CONTENT)
    drawn = rng.choice(size * size, count, replace=False)
    return CONTENT.start + np.stack([drawn // size, drawn % size], axis=1)


def _statement(left: Ids, symbol: str, right: Ids) -> Ids:
    return np.concatenate([left, _ids(symbol), right, _ids(";")])


def _filler(rng: np.random.Generator, count: int) -> Ids:
    """Filler words, the first ones of the vocabulary most often, with a full stop now and then."""
    frequency = (np.arange(len(FILLER)) + 3.0) ** -0.8
    words = FILLER.start + rng.choice(len(FILLER), count, p=frequency / frequency.sum())
    stops = np.cumsum(rng.integers(7, 15, count // 7 + 1))
    words[stops[stops < count]] = SYMBOLS["."]
    return words


def _scatter(rng: np.random.Generator, needles: Sequence[Ids], tokens: int) -> tuple[Ids, Ids]:
    """``tokens`` tokens with the needles anywhere in filler, and where each needle ends."""
    free = tokens - sum(len(needle) for needle in needles)
    order = rng.permutation(len(needles))
    cuts = np.sort(rng.integers(0, free + 1, len(needles)))
    fill = _filler(rng, free)
    ends = np.zeros(len(needles), dtype=np.int64)
    pieces: list[Ids] = []
    cut = used = 0
    for next_cut, which in zip(cuts.tolist(), order.tolist(), strict=True):
        pieces += [fill[cut:next_cut], needles[which]]
        used += next_cut - cut + len(needles[which])
        ends[which] = used
        cut = next_cut
    return np.concatenate([*pieces, fill[cut:]]), ends


_Fact = tuple[list[Ids], Ids, Ids]
"""Needles that the answer needs, question, answer."""


def _lookup(rng: np.random.Generator, needles: int) -> list[_Fact]:
    made = [(key, _words(rng, 4)) for key in _keys(rng, needles)]
    return [
        (
            [_statement(key, "=", value)],
            np.concatenate([_ids("?"), key, _ids("=")]),
            np.concatenate([value, _ids(";")]),
        )
        for key, value in made
    ]


def _single(rng: np.random.Generator, tokens: int) -> list[_Fact]:
    """``? key =``: the only needle there is."""
    return _lookup(rng, 1)


def _multikey(rng: np.random.Generator, tokens: int) -> list[_Fact]:
    """``? key =``: one needle of many."""
    return _lookup(rng, int(tokens * _NEEDLE_SHARE) // 8)


def _chain(rng: np.random.Generator, tokens: int) -> list[_Fact]:
    """``! key ->``: follow the pointers from key to key, then read the value."""
    keys = _keys(rng, _CHAINS * (_HOPS + 1)).reshape(_CHAINS, _HOPS + 1, 2)
    facts: list[_Fact] = []
    for links in keys:
        value = _words(rng, 2)
        hops = [_statement(a, "->", b) for a, b in itertools.pairwise(links)]
        middle = [np.concatenate([_ids("->"), key]) for key in links[2:]]
        answer = np.concatenate([links[1], *middle, _ids("="), value, _ids(";")])
        question = np.concatenate([_ids("!"), links[0], _ids("->")])
        facts.append(([*hops, _statement(links[-1], "=", value)], question, answer))
    return facts


def _copy(rng: np.random.Generator, tokens: int) -> list[_Fact]:
    """``& word word``: continue the passage that begins so."""
    passages = [_words(rng, _PASSAGE_WORDS) for _ in range(_PASSAGES)]
    return [
        (
            [np.concatenate([_ids("["), words, _ids("]")])],
            np.concatenate([_ids("&"), words[:2]]),
            np.concatenate([words[2:], _ids("]")]),
        )
        for words in passages
    ]


_MAKERS: Final = {"multikey": _multikey, "chain": _chain, "single": _single, "copy": _copy}
