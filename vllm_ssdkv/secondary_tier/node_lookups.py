"""Look-ups of chunks that are on nodes: a thread asks the nodes, so that vLLM's waits for none."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store.io.thread_errors import ThreadErrors

_Asked = list[tuple[str, bytes]]
"""Requests and keys."""


class NodeLookups:
    """Answers to look-ups. vLLM's thread calls the methods.

    All keys of a step are asked for at once. An answer is good for the request that has asked,
    until it ends; another request asks anew, and so finds what was stored meanwhile.

    Example:
        >>> lookups = NodeLookups(lambda keys: [True for _ in keys], Counters())
        >>> lookups.found(b"key", "request") is None
        True
        >>> lookups.ask()
        >>> lookups.close()
        >>> lookups.found(b"key", "request")
        True
    """

    def __init__(self, find: Callable[[Sequence[bytes]], Sequence[bool]], counters: Counters):
        """``find``: which of some keys are stored. It has a deadline; called in the thread."""
        self._find = find
        self._errors = ThreadErrors(counters, "node")
        self._answers: dict[str, dict[bytes, bool | None]] = {}
        """Answers by request and key; None: the question is under way."""
        self._new: _Asked = []
        self._asked: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._told: queue.SimpleQueue[list[tuple[str, bytes, bool]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ssdkv-tier-lookups", daemon=True)
        self._thread.start()

    def found(self, key: bytes, request: str) -> bool | None:
        """Check whether a chunk is stored; None: no node has answered yet."""
        answers = self._answers.setdefault(request, {})
        if key not in answers:
            answers[key] = None
            self._new.append((request, key))
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

    def close(self) -> None:
        """End the thread, once it has answered; waits for a call at most."""
        self._asked.put(None)
        self._thread.join()

    def _take(self) -> None:
        while not self._told.empty():
            for request, key, found in self._told.get():
                if request in self._answers:
                    self._answers[request][key] = found

    # ---- the thread ----

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            found: dict[bytes, bool] = {}
            with self._errors.swallowed("chunks are not found"):
                keys = list(dict.fromkeys(key for _, key in asked))
                found = dict(zip(keys, self._find(keys), strict=True))
            self._told.put([(request, key, found.get(key, False)) for request, key in asked])
