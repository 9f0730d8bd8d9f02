"""Threads for calls that may hang: the interpreter does not wait for them when it ends."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

_T = TypeVar("_T")


class DaemonExecutor(Executor):
    """An executor of at most ``threads`` daemon threads, started when they are needed.

    The one of the standard library joins its threads at exit, and would wait for a hung device.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._started = 0
        self._free = 0
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def submit(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:  # noqa: ANN401  # as the base class
        """See :class:`concurrent.futures.Executor`."""
        future: Future[_T] = Future()

        def call() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001  # handed to whoever waits
                future.set_exception(error)

        with self._lock:
            self._free -= 1
            if self._free < 0 and self._started < self._threads:
                self._started += 1
                self._free += 1
                threading.Thread(target=self._serve, name="ssdkv-blocking", daemon=True).start()
        self._calls.put(call)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads after what is queued; never waits for them."""
        del wait, cancel_futures
        for _ in range(self._started):
            self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call
            with self._lock:
                self._free += 1
