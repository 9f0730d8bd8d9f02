"""A process that a test starts, speaks with by lines, and ends."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

PATIENCE_S = 240.0
"""Time for a line or an end: longer than anything takes on a busy machine."""


class Child:
    """A running process; as a context manager it is killed at the end.

    Attributes:
        process: For signals, and for its status.
    """

    def __init__(self, *command: object, log: Path | None = None, **options: Any) -> None:  # noqa: ANN401 - Popen's
        """``log``: file that gets its standard error; ``options``: of ``Popen``."""
        errors = None if log is None else log.open("ab")
        self._log = log
        self.process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            **options,
        )
        if errors is not None:
            errors.close()
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @classmethod
    def python(cls, *arguments: object, **more: Any) -> Child:  # noqa: ANN401 - Popen's
        """The interpreter of this process: with a file, or ``-c`` and code."""
        return cls(sys.executable, *arguments, **more)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stdout:
            for line in stdout:
                self._lines.put(line)
        self._lines.put("")

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self.process.pid

    def say(self, line: str) -> None:
        """Send it a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def hear(self, seconds: float = PATIENCE_S) -> str:
        """Its next line, without the end of the line; "" when it has ended.

        Raises:
            AssertionError: none came in time; with its log.
        """
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise AssertionError(f"{seconds:g} s without a line: {self.log()}") from None
        if not line:
            self._lines.put(line)
        return line.removesuffix("\n")

    def rest(self) -> Iterator[str]:
        """Its lines until it has ended."""
        while line := self.hear():
            yield line

    def log(self) -> str:
        """The end of its standard error."""
        return "" if self._log is None else self._log.read_text(errors="replace")[-12000:]

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def close_input(self) -> None:
        """Say nothing more."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def wait(self, seconds: float = PATIENCE_S) -> int:
        """Close its input and wait for its end: its status."""
        self.close_input()
        return self.process.wait(seconds)

    def kill(self) -> int:
        """Kill it, if it runs, and wait for its end: its status."""
        self.process.kill()
        return self.wait()
