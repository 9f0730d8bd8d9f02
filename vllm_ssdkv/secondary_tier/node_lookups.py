"""Look-ups of chunks that are on nodes: a thread asks the nodes, so that vLLM's waits for none."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.node.client.awaited_chains import ASK_S
from vllm_ssdkv.store.io.thread_errors import ThreadErrors


@dataclass(frozen=True, slots=True)
class _Question:
    """A chunk that a request has looked up. ``end``: its last token, -1 where nobody is to wait for
    the chunk."""

    request: str
    key: bytes
    end: int


class NodeLookups:
    """Answers to look-ups. vLLM's thread calls the methods.

    All keys of a step are asked for at once. An answer is good for the request that has asked,
    until it ends; another request asks anew, and so finds what was stored meanwhile. What others
    compute at this moment has no answer until they have stored it, or take too long.

    Example:
        >>> lookups = NodeLookups(lambda k: [True for _ in k], lambda r, k: False, Counters())
        >>> lookups.found(b"key", "request") is None
        True
        >>> lookups.ask()
        >>> lookups.close()
        >>> lookups.found(b"key", "request")
        True
    """

    def __init__(
        self,
        find: Callable[[Sequence[bytes]], Sequence[bool]],
        awaits: Callable[[str, Sequence[bytes]], bool],
        counters: Counters,
    ):
        """
        Args:
            find: Says which of some keys are stored.
            awaits: Says whether others compute chunks that a request lacks, head first.
            counters: Metrics.

        Both functions have a deadline, and are called in the thread.
        """
        self._find, self._awaits = find, awaits
        self._errors = ThreadErrors(counters, "node")
        self._answers: dict[str, dict[bytes, bool | None]] = {}
        """Answers by request and key; None: the question is under way."""
        self._groups: dict[str, int] = {}
        """KV cache group that a request has looked up first. vLLM begins with one without a window,
        if there is any: every chunk of it gets stored, so that others may wait for it."""
        self._new: list[_Question] = []
        self._asked: queue.SimpleQueue[list[_Question] | None] = queue.SimpleQueue()
        self._told: queue.SimpleQueue[list[tuple[_Question, bool]]] = queue.SimpleQueue()
        self._waiting: dict[str, list[_Question]] = {}
        """Chunks that are awaited, by request."""
        self._thread = threading.Thread(target=self._run, name="ssdkv-tier-lookups", daemon=True)
        self._thread.start()

    def found(self, key: bytes, request: str, group: int = 0, end: int = 0) -> bool | None:
        """Check whether a chunk is stored; None: no node has answered yet, or it is awaited.

        ``group``: its KV cache group. ``end``: its last token.
        """
        answers = self._answers.setdefault(request, {})
        if key not in answers:
            answers[key] = None
            first = self._groups.setdefault(request, group)
            self._new.append(_Question(request, key, end if group == first else -1))
        elif answers[key] is None:
            self._take()
        return answers[key]

    def missed(self, keys: Iterable[bytes], request: str) -> None:
        """Chunks were not there when they were loaded: the request does not find them again."""
        answers = self._answers.get(request, {})
        for key in keys:
            if key in answers:
                answers[key] = False

    def ask(self) -> None:
        """Ask for what was looked up since the last call."""
        if self._new:
            self._asked.put(self._new)
            self._new = []

    def forget(self, request: str) -> None:
        """A request has ended."""
        self._answers.pop(request, None)
        self._groups.pop(request, None)

    def close(self) -> None:
        """End the thread, once it has answered; waits for a call at most."""
        self._asked.put(None)
        self._thread.join()

    def _take(self) -> None:
        while not self._told.empty():
            for question, found in self._told.get():
                if question.request in self._answers:
                    self._answers[question.request][question.key] = found

    # ---- the thread ----

    def _run(self) -> None:
        asked: list[_Question] | None = []
        while asked is not None:
            if asked:
                self._answer(asked)
            asked = []
            with contextlib.suppress(queue.Empty):
                asked = self._asked.get(timeout=ASK_S if self._waiting else None)
            for request, questions in list(self._waiting.items()):
                if not self._waits(request, questions):
                    self._answer(self._waiting.pop(request))

    def _answer(self, questions: Sequence[_Question]) -> None:
        """Tell what is stored of these chunks. A request waits for the others, if somebody computes
        them."""
        stored: set[bytes] = set()
        with self._errors.swallowed("chunks are not found"):
            keys = list(dict.fromkeys(question.key for question in questions))
            stored = {key for key, there in zip(keys, self._find(keys), strict=True) if there}
        missing: dict[str, list[_Question]] = {}
        for question in questions:
            if question.key not in stored:
                missing.setdefault(question.request, []).append(question)
        told = [(question, True) for question in questions if question.key in stored]
        for request, lacking in missing.items():
            if self._waits(request, lacking):
                self._waiting.setdefault(request, []).extend(lacking)
            else:
                told += [(question, False) for question in lacking]
        self._told.put(told)

    def _waits(self, request: str, lacking: Sequence[_Question]) -> bool:
        """Check whether a request had better wait for chunks."""
        chain = sorted((q for q in lacking if q.end >= 0), key=lambda q: q.end)
        with self._errors.swallowed("chunks are not awaited"):
            return bool(chain) and self._awaits(request, [q.key for q in chain])
        return False
