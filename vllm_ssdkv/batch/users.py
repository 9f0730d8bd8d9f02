"""Requests of users under way, counted where a death of the server leaves the number.

Whoever runs the batches next has to know whether a server died of a batch. It cannot tell when
requests of users were under way as well.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_ssdkv.batch.prometheus import BatchCounters
from vllm_ssdkv.batch.room import Engine

STATE: Final = "ssdkv_batch_users"
"""Name of the :class:`Users` in the app's state."""
_OURS: Final = ("/v1/files", "/v1/batches")
_READING: Final = ("GET", "HEAD", "OPTIONS")
_BYTES: Final = 8


class Users:
    """The requests of one API server process. For the event loop's thread.

    The number is in a file in ``users`` below the directory of the jobs, locked by the process. It
    is there for deaths of processes, so nothing is synced.
    """

    def __init__(self, directory: Path, engine: Engine | None, counters: BatchCounters) -> None:
        """Make the file.

        Raises:
            OSError: it cannot be made.
        """
        self._engine = engine
        self._counters = counters
        self._count = 0
        os.makedirs(directory / "users", mode=0o700, exist_ok=True)
        self._path = directory / "users" / secrets.token_hex(12)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file = os.open(self._path, flags, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._write()

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Count a request for as long as the block lasts, and for good if the engine dies."""
        self._count += 1
        self._write()
        try:
            yield
        finally:
            if self._engine is None or not self._engine.died:
                self._count -= 1
                self._write()

    def _write(self) -> None:
        try:
            os.pwrite(self._file, self._count.to_bytes(_BYTES), 0)
        except OSError:  # no user shall wait for the disk of batches; the last number stands
            self._counters.add("batch_errors")

    def close(self) -> None:
        """Remove the file, unless requests were under way at a death."""
        if not self._count:
            self._path.unlink(missing_ok=True)
        os.close(self._file)


def left_by_the_dead(directory: Path) -> list[tuple[Path, int]]:
    """The files of processes that have ended, and the requests that were under way in each. Blocks.

    Raises:
        OSError: one cannot be read.
    """
    found = []
    for path in (directory / "users").glob("*"):
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            if data := file.read(_BYTES):  # else its process has made it this moment
                found.append((path, int.from_bytes(data)))
    return found


class CountUsers:
    """Middleware that counts what users ask of the engine: all but reading, files and batches."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        users: Users | None = None
        is_ours = str(scope.get("path", "")).startswith(_OURS)
        if scope["type"] != "lifespan" and not is_ours and scope.get("method") not in _READING:
            users = getattr(scope["app"].state, STATE, None)
        with contextlib.nullcontext() if users is None else users.one():
            await self._app(scope, receive, send)
