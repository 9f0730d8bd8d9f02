"""Checks what is streamed as soon as it has arrived, in a thread beside the forward pass.

The thread that runs the forward pass never waits for this one to begin: what it needs and finds
untouched, it takes back and does itself, as if there were no other thread.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Generic, TypeVar

from vllm_ssdkv.base.errors import StoreError
from vllm_ssdkv.store.io.engines.protocol import Batch

_LOOK_S = 0.1
"""Interval at which the thread checks whether the awaited read was cancelled."""

Found = TypeVar("Found")


class _State(Enum):
    WAITING = auto()
    RUNNING = auto()
    DONE = auto()
    TAKEN = auto()


class Verification(Generic[Found]):
    """Work that is to be done once a batch has ended; made by :meth:`AsyncVerifier.after`."""

    def __init__(self, batch: Batch, work: Callable[[], Found], changed: threading.Condition):
        self.batch = batch
        self._work = work
        self._changed = changed
        """Guards the state; notified of every change."""
        self._state = _State.WAITING
        self._found: Found | None = None
        self._error: Exception | None = None

    def take(self, timeout_s: float) -> Found | None:
        """Take the findings of the work; None when it was not begun, and never will be.

        Blocks while it is under way. What the work touches is the caller's again afterwards.

        Raises:
            StoreError: it did not end in time.
            Exception: what the work raised.
        """
        self.stop(timeout_s)
        if self._error is not None:
            raise self._error
        return self._found

    def stop(self, timeout_s: float) -> None:
        """As :meth:`take`, whatever the work has found.

        Raises:
            StoreError: it did not end in time.
        """
        with self._changed:
            if self._state is _State.WAITING:
                self._state = _State.TAKEN
            ended = self._changed.wait_for(lambda: self._state is not _State.RUNNING, timeout_s)
        if not ended:
            raise StoreError(f"streamed pages were not checked within {timeout_s:g} s")

    def run(self) -> None:
        """Do the work unless it was taken back. The batch has ended."""
        with self._changed:
            if self._state is not _State.WAITING:
                return
            self._state = _State.RUNNING
        try:
            self._found = self._work()
        except Exception as error:  # noqa: BLE001 - it is raised where the result is taken
            self._error = error
        with self._changed:
            self._state = _State.DONE
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """The batch cannot be waited for: who takes the work hears of it, unless it has it back."""
        with self._changed:
            if self._state is _State.WAITING:
                self._error, self._state = error, _State.DONE

    def wanted(self) -> bool:
        """Check whether the work is still to be done."""
        with self._changed:
            return self._state is _State.WAITING


class AsyncVerifier:
    """A thread, started when it is first needed. Methods are thread-safe; only ``close`` blocks."""

    def __init__(self) -> None:
        self._wake = threading.Condition()
        """Guards everything below."""
        self._queue: collections.deque[Verification[Any]] = collections.deque()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def after(self, batch: Batch, work: Callable[[], Found]) -> Verification[Found]:
        """Have work done when ``batch`` has ended, in the order of these calls."""
        asked = Verification(batch, work, self._wake)
        with self._wake:
            if not self._stopping:
                self._queue.append(asked)
                self._wake.notify_all()
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, name="ssdkv-verifier", daemon=True
                    )
                    self._thread.start()
        return asked

    def close(self, timeout_s: float) -> bool:
        """End the thread; False when it did not end in time. What was not begun never will be."""
        with self._wake:
            self._stopping = True
            self._queue.clear()
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._queue or self._stopping)
                if self._stopping:
                    return
                asked = self._queue.popleft()
            while asked.wanted() and not self._stopping:
                try:
                    ended = asked.batch.wait(_LOOK_S)
                except Exception as error:  # noqa: BLE001 - as in run()
                    asked.fail(error)
                    break
                if ended:
                    asked.run()
