"""Room in KV for requests of batches beside those of users.

A request of a batch that finds a seat but no KV waits in vLLM's queue, and users wait behind it;
one that runs takes KV that a user's request waits for. So before one is sent its KV is counted,
twice: what batches take together is kept within a share, by what each is expected to take; and
what vLLM says of its KV must leave room for the prompt, with nobody waiting for KV or a seat.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from vllm_ssdkv.batch.answers import Usage
from vllm_ssdkv.batch.jobs import Pending

MOST: Final = 0.9
"""Share of KV that may be in use when a request of a batch has its prompt in it. The rest lets
those that run grow: vLLM would have to send one back."""
SETTLE_S: Final = 1.0
"""Time after it was sent in which vLLM's numbers may not include a request."""
STALE_S: Final = 10.0
"""An engine at work says something new within this time; what is older says nothing."""
FIRST_ANSWER: Final = 1024
"""Tokens that an answer is expected to have before the batch has one."""
_FORGET: Final = 0.98
_PRIOR: Final = 1000


@dataclass(frozen=True, slots=True)
class KVCache:
    """The KV of all engines of a server together.

    Attributes:
        tokens: How many there is room for.
        of_a_request: What one request takes at most: the model's context, or in mode ``page``
            its window.
    """

    tokens: float
    of_a_request: float


@dataclass(frozen=True, slots=True)
class Load:
    """The load of the engines by vLLM.

    Attributes:
        waiting: Requests that wait for a seat or for KV; those that load KV do not.
        running: Requests that have a seat.
        used: Share of KV that is in use.
    """

    waiting: int
    running: int
    used: float


class Engine(Protocol):
    """The engine that requests are sent to, beside what answers them."""

    @property
    def died(self) -> bool:
        """Check whether it has ended, and nobody told it to."""

    @property
    def kv(self) -> KVCache | None:
        """Its KV; None: it has none."""

    def load(self) -> Load | None:
        """The load now; None: it is not told. Blocks."""


class Expected:
    """Tokens that requests of one batch are expected to take, by those that were answered."""

    def __init__(self, answer: float = FIRST_ANSWER) -> None:
        """``answer`` tokens are expected of each answer at first."""
        self._estimated = self._found = float(_PRIOR)
        self._answer = float(answer)

    def learn(self, request: Pending, usage: Usage) -> None:
        """One was answered."""
        self._estimated = _FORGET * self._estimated + request.tokens
        self._found = _FORGET * self._found + usage.prompt
        # Short answers come first, so the longest counts, for a while.
        answer = usage.completion / max(1, request.answers)
        self._answer = max(answer, _FORGET * self._answer)

    def prompt(self, request: Pending) -> float:
        """Tokens of its prompts."""
        return request.tokens * self._found / self._estimated

    def answers(self, request: Pending) -> float:
        """Tokens of its answers."""
        each = self._answer
        if request.answer_tokens:
            each = min(each, request.answer_tokens)
        return each * request.answers


class Room:
    """Share of KV that batches may take now. Not thread-safe, but for the engine's own call."""

    def __init__(
        self,
        kv: KVCache | None,
        share: float,
        *,
        users_first: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Batches may take ``share``; ``users_first``: vLLM lets users pass those that wait."""
        self._kv = kv
        self._share = share
        self._users_first = users_first
        self._clock = clock
        self._load: Load | None = None
        self._since = 0.0

    def see(self, load: Load | None) -> None:
        """Take note of what the engine says."""
        if load != self._load:
            self._load, self._since = load, self._clock()

    def part(self, tokens: float, answers: int) -> float:
        """The part of KV that so many tokens of so many sequences take."""
        if self._kv is None:
            return 0.0
        return min(tokens, answers * self._kv.of_a_request) / self._kv.tokens

    def within_share(self, part: float, taken: float) -> bool:
        """Check whether batches that have ``taken`` may take this part, too."""
        return taken + part <= self._share

    def is_free(self, part: float, unseen: float) -> bool:
        """Check whether this part is free of what users run or wait for.

        Args:
            part: What the prompt takes.
            unseen: What was sent less than ``SETTLE_S`` ago takes.
        """
        load = self._load
        if self._kv is None or load is None or self._clock() >= self._since + STALE_S:
            return True
        if not load.running and not load.waiting:
            # What it says of KV may be from the last step, before that was given back.
            return not unseen or unseen + part <= MOST
        if load.waiting and not self._users_first:
            return False
        return load.used + unseen + part <= MOST
