"""Validation of batches that were handed in: a few at a time, one of a key, in turn.

So a key whose files take long waits for itself, and nobody else does.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from vllm_ssdkv.batch.files import NoRoomError
from vllm_ssdkv.batch.lines import LineError
from vllm_ssdkv.batch.prometheus import BatchCounters
from vllm_ssdkv.batch.service import Service
from vllm_ssdkv.batch.validation import error_object
from vllm_ssdkv.batch.validator import Validator, ValidatorError

logger = logging.getLogger(__name__)

AT_A_TIME: Final = 3
RETRY_S: Final = 2.0
"""Pause after the first failure to read a file; each further one takes twice as long."""
ASIDE_S: Final = 60.0
"""Maximum time for which a batch is put aside because its file could not be read."""
TRIES: Final = 2
"""Number of attempts to read a file whose reading ends without a result."""


@dataclass(frozen=True)
class _Aside:
    """A batch that could not be validated: when to try again, and the pause before."""

    until: float
    pause: float


class Validations:
    """Validations under way. To be used on the event loop's thread."""

    def __init__(
        self,
        service: Service,
        validator: Validator,
        counters: BatchCounters,
        done: Callable[[], None],
    ) -> None:
        """``done`` is called when one has ended."""
        self._service = service
        self._validator = validator
        self._counters = counters
        self._done = done
        self._pool = ThreadPoolExecutor(AT_A_TIME, "ssdkv-batch-validation")
        self._running: dict[int, tuple[bytes, asyncio.Future[None]]] = {}
        self._begun: dict[bytes, float] = {}
        self._aside: dict[int, _Aside] = {}
        self._lost: dict[int, int] = {}

    def is_running(self, seq: int) -> bool:
        """Check whether a batch is being validated."""
        return seq in self._running

    def start(self, rows: Sequence[sqlite3.Row]) -> None:
        """Begin with as many as may run, of batches to be validated, oldest first."""
        first: dict[bytes, sqlite3.Row] = {}
        busy = {owner for owner, _ in self._running.values()}
        for row in rows:
            if row["owner"] not in busy and not self._is_aside(row["seq"]):
                first.setdefault(row["owner"], row)
        self._begun = {owner: at for owner, at in self._begun.items() if owner in busy | set(first)}
        for owner in sorted(first, key=lambda owner: self._begun.get(owner, 0.0)):
            if len(self._running) >= AT_A_TIME:
                return
            self._begun[owner] = time.monotonic()
            loop = asyncio.get_running_loop()
            future = loop.run_in_executor(self._pool, self._validate, first[owner])
            future.add_done_callback(lambda _: self._done())
            self._running[first[owner]["seq"]] = (owner, future)

    def _is_aside(self, seq: int) -> bool:
        return seq in self._aside and time.monotonic() < self._aside[seq].until

    def collect(self) -> list[Exception]:
        """Take note of those that have ended; the errors of those to be tried again."""
        errors: list[Exception] = []
        for seq, (_, future) in list(self._running.items()):
            if not future.done():
                continue
            del self._running[seq]
            before = self._aside.pop(seq, None)
            error = future.exception()
            if isinstance(error, Exception):
                errors.append(error)
                pause = RETRY_S if before is None else min(2 * before.pause, ASIDE_S)
                self._aside[seq] = _Aside(time.monotonic() + pause, pause)
            else:
                self._lost.pop(seq, None)
        return errors

    def forget(self, seq: int) -> None:
        """A batch has ended otherwise."""
        self._aside.pop(seq, None)
        self._lost.pop(seq, None)

    async def stop(self) -> None:
        """End those under way."""
        self._validator.stop()
        await asyncio.gather(
            *(future for _, future in self._running.values()), return_exceptions=True
        )
        self._pool.shutdown(wait=False)

    # ---- in a thread of the pool ----

    def _validate(self, row: sqlite3.Row) -> None:
        try:
            self._read(row)
        except FileNotFoundError:
            lost = LineError("input_lost", "The input file is gone from the server's disk.")
            self._fail(row["seq"], [error_object(lost)])
        except NoRoomError as error:
            self._fail(row["seq"], [error_object(LineError("storage_full", str(error)))])
        except ValidatorError as error:
            if self._validator.stopped:
                raise
            tries = self._lost.get(row["seq"], 0) + 1
            self._lost[row["seq"]] = tries
            if tries < TRIES:
                raise
            logger.warning("batches: a file could not be validated: %s", error)
            problem = LineError("validation_failed", f"The input could not be read: {error}.")
            self._fail(row["seq"], [error_object(problem)])

    def _read(self, row: sqlite3.Row) -> None:
        path = self._service.files.path(row["input_file"])
        with self._validator.read(path, row["endpoint"]) as found:
            if found.summary.errors:
                self._fail(row["seq"], found.summary.errors)
            else:
                self._service.jobs.start(row["seq"], found.summary, found.entries)

    def _fail(self, seq: int, errors: list[dict[str, object]]) -> None:
        self._service.jobs.fail(seq, errors)
        self._counters.add("batches_ended", outcome="failed")
