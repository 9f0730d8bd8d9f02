"""Runs the batches: takes requests in turn, sends them, makes their answers final.

One process at a time runs the batches of a directory, whichever holds the lock; another takes over
when it ends. All that counts is in the database, so the process may be killed at any moment: the
next one sends the requests that have no answer, and only those.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from vllm_ssdkv.base.errors import StoreError
from vllm_ssdkv.batch.answers import failure_line
from vllm_ssdkv.batch.endpoint_protocol import AbortedError, Answering
from vllm_ssdkv.batch.heap import trim
from vllm_ssdkv.batch.jobs import Finished
from vllm_ssdkv.batch.lines import LineError
from vllm_ssdkv.batch.prometheus import BatchCounters
from vllm_ssdkv.batch.request import EMBEDDINGS, NO_LIMITS, Limits, custom_id_of
from vllm_ssdkv.batch.room import FIRST_ANSWER, Engine, Expected, Room
from vllm_ssdkv.batch.sending import DEATHS, RETRY_S, Active, Sending, read_line
from vllm_ssdkv.batch.service import Service
from vllm_ssdkv.batch.users import left_by_the_dead
from vllm_ssdkv.batch.validation import error_object
from vllm_ssdkv.batch.validations import Validations
from vllm_ssdkv.batch.validator import Validator

logger = logging.getLogger(__name__)

POLL_S: Final = 1.0
"""Maximum delay until a change by another API server process is seen."""
SWEEP_S: Final = 60.0
TRIM_S: Final = 5.0
"""Interval at which free memory is given back while there are batches, and once after the last."""
QUIET_S: Final = 1.0
"""Errors that pass are told once in this time; all of them are counted."""
WELL_S: Final = 180.0
"""Time to serve well before requests are tried that another server may have died of."""
_CLOSING_PAGE: Final = 2048
_FULL: Final = "storage_full"
_DIED: Final = "server_died"
_ENDS: Final = {
    "batch_cancelled": "The batch was cancelled before this request was answered.",
    "batch_expired": "This request could not be executed before the completion window expired.",
    _FULL: "There was no room for more results.",
    _DIED: f"The batch ended before this request was answered: the server or its engine died "
    f"{DEATHS} times while requests of this batch alone were under way.",
}
"""Texts for requests that have no answer, by the code of the reason."""


class Runner:
    """Runs all batches of a service. Everything but :meth:`wake` happens in :meth:`run`."""

    def __init__(
        self,
        service: Service,
        answering: Answering,
        concurrency: int,
        counters: BatchCounters,
        clock: Callable[[], float] = time.time,
        engine: Engine | None = None,
        room: Room | None = None,
        limits: Limits = NO_LIMITS,
    ) -> None:
        """``concurrency`` requests run at a time, answers that are not yet final included.

        Without an ``engine`` nothing is known of its KV, nor of its death.
        """
        self._service = service
        self._jobs = service.jobs
        self._answering = answering
        self._concurrency = concurrency
        self._counters = counters
        self._clock = clock
        self._engine = engine
        self._room = room or Room(None, 1.0, users_first=False)
        self._limits = limits
        self._woken = asyncio.Event()
        self._sending: Sending
        self._validations: Validations
        self._not_before: dict[int, float] = {}
        self._well_at = 0.0
        self._next_sweep = 0.0
        self._next_trim = 0.0
        self._was_idle = True
        self._quiet_until = 0.0
        service.wakers.append(self.wake)

    def wake(self) -> None:
        """There is something to do. On the event loop's thread."""
        self._woken.set()

    async def run(self) -> None:
        """Run batches until cancelled; then end cleanly what is under way."""
        lock = await self._own()
        validator = Validator(self._service.config.max_requests, self._limits)
        self._validations = Validations(self._service, validator, self._counters, self.wake)
        self._sending = Sending(
            self._jobs,
            self._answering,
            self._concurrency,
            self._limits,
            self._room,
            self._engine,
            self._tell,
            self._woken,
        )
        self._well_at = self._clock() + WELL_S
        try:
            await self._until_it_works(self._recover)
            while True:
                self._woken.clear()
                try:
                    await _undivided(self._step())
                except Exception as error:  # noqa: BLE001 - running must not end for all batches
                    await self._pause(error)
                # Not wait_for: on Python 3.11 it forgets a cancellation that comes with the event.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await self._woken.wait()
        finally:
            await self._stop()
            os.close(lock)

    async def _own(self) -> int:
        path = self._service.directory / "runner.lock"
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        told = False
        while True:
            fd = os.open(path, flags, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
            else:
                return fd
            if not told:
                logger.info("batches: another process runs those in %s", path.parent)
                told = True
            await asyncio.sleep(RETRY_S)

    async def _pause(self, error: Exception) -> None:
        """After an error that may pass: the disk is full, or does not answer."""
        self._tell(error)
        await asyncio.sleep(RETRY_S)

    def _tell(self, error: Exception) -> None:
        self._counters.add("batch_errors")
        now = time.monotonic()
        if now < self._quiet_until:
            return
        self._quiet_until = now + QUIET_S
        expected = isinstance(error, OSError | sqlite3.Error | AbortedError)
        logger.warning("batches: %s; trying again", error, exc_info=None if expected else error)

    async def _until_it_works(self, call: Callable[[], None]) -> None:
        while True:
            try:
                return await _undivided(asyncio.to_thread(call))
            except (OSError, sqlite3.Error) as error:
                await self._pause(error)

    def _recover(self) -> None:
        orphans = self._service.files.remove_orphans()
        left = left_by_the_dead(self._service.directory)
        death = self._jobs.charge(users=any(count for _, count in left))
        for path, _ in left:
            path.unlink(missing_ok=True)
        if death is not None:
            logger.warning(
                "batches: the last server died with %d requests of %d batches under way, which is "
                "%s; each runs alone, after %g s at least",
                death.lines,
                death.batches,
                "charged to the batch" if death.charged else "charged to none",
                WELL_S,
            )
        unended = len(self._jobs.unended())
        if orphans or unended:
            logger.info("batches: %d go on, %d unfinished files removed", unended, orphans)

    async def _stop(self) -> None:
        await self._validations.stop()
        await self._sending.stop()
        self._not_before.clear()
        await self._commit()
        try:
            await asyncio.to_thread(self._sending.put_back)
        except sqlite3.Error as error:
            self._tell(error)
        if left := len(self._sending.finished):
            # These requests have no answer, and are sent again by the next run.
            logger.warning("batches: %d answers were not kept", left)

    # ---- one round ----

    async def _step(self) -> None:
        await self._sweep()  # first: what expires makes room for answers
        await self._commit()
        for error in self._validations.collect():
            self._tell(error)
        rows = await asyncio.to_thread(self._jobs.unended)
        self._counters.set("batches_unended", len(rows))
        now = self._clock()
        new = [row for row in rows if row["status"] == "validating" and now < row["expires_at"]]
        self._validations.start(new)
        full = await asyncio.to_thread(self._without_room)
        for row in rows:
            await self._try(row["seq"], self._advance(row, now, full))
        await self._sending.dispatch(may_try=now >= self._well_at)
        self._counters.set("batch_requests_running", self._sending.running)
        self._counters.set("batches_held", self._sending.held)
        await self._trim(is_idle=not rows)

    async def _trim(self, *, is_idle: bool) -> None:
        now = time.monotonic()
        if now < self._next_trim or (is_idle and self._was_idle):
            return
        self._next_trim, self._was_idle = now + TRIM_S, is_idle
        await asyncio.to_thread(trim)

    async def _try(self, seq: int, work: Coroutine[Any, Any, None]) -> None:
        """Work on one batch: its errors, such as those of its files, hold up no other one."""
        if time.monotonic() < self._not_before.get(seq, 0.0):
            work.close()
            return
        try:
            await work
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one
            self._tell(error)
            self._not_before[seq] = time.monotonic() + RETRY_S

    def _without_room(self) -> set[bytes]:
        """Keys that have something to send, but no room for an answer."""
        owners = {active.owner for active in self._sending.active.values() if active.has_next}
        return {owner for owner in owners if self._service.files.room(owner) <= 0}

    async def _sweep(self) -> None:
        now = time.monotonic()
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_S
            await asyncio.to_thread(self._service.files.expire)
            used = await asyncio.to_thread(self._service.files.used_bytes)
            self._counters.set("batch_bytes", used)

    async def _advance(self, row: sqlite3.Row, now: float, full: set[bytes]) -> None:
        """Take a batch one step further, whatever state it is in."""
        seq, status = int(row["seq"]), str(row["status"])
        if self._validations.is_running(seq):
            return
        if status == "finalizing":
            await self._end(seq, "completed")
        elif status == "cancelling":
            await self._end_early(row, "cancelled", "batch_cancelled")
        elif now >= row["expires_at"]:
            await self._end_early(row, "expired", "batch_expired")
        elif row["deaths"] >= DEATHS:
            logger.error("batches: %s ends: the server died %d times of it", row["id"], DEATHS)
            await self._end_early(row, "failed", _DIED)
        elif status == "in_progress":
            active = await self._join(row)
            if active.damage is not None:
                await self._give_up(seq, active.damage)
            elif active.full or (active.has_next and active.owner in full):
                await self._end_early(row, "failed", _FULL)
            elif active.is_idle and not any(seq == other for other, _ in self._sending.finished):
                await self._end(seq, "completed")

    async def _join(self, row: sqlite3.Row) -> Active:
        seq = int(row["seq"])
        active = self._sending.active.get(seq)
        if active is None:
            path = self._service.files.path(row["input_file"])
            suspects = await asyncio.to_thread(self._jobs.suspects, seq)
            expected = Expected(0 if row["endpoint"] == EMBEDDINGS else FIRST_ANSWER)
            doubted = bool(row["doubted"])
            active = Active(seq, row["owner"], row["endpoint"], path, suspects, doubted, expected)
            self._sending.join(active)
        return active

    # ---- making final ----

    async def _commit(self) -> None:
        for seq in dict.fromkeys(seq for seq, _ in self._sending.finished):
            await self._try(seq, self._record(self._sending.active[seq]))

    async def _record(self, active: Active) -> None:
        finished = self._sending.finished
        # More may be added while the disk works.
        answers = [answer for seq, answer in finished if seq == active.seq]
        if not answers:
            return
        active.unrecorded = True
        try:
            recorded = await asyncio.to_thread(self._jobs.record, active.seq, answers)
        except (StoreError, FileNotFoundError) as error:
            active.damage = str(error)
        else:
            active.full |= recorded < len(answers)
            self._sending.recorded(active.seq, answers[:recorded])
            self._count(answers[:recorded])
        active.unrecorded = False
        gone = {answer.rank for answer in answers}
        finished[:] = [e for e in finished if e[0] != active.seq or e[1].rank not in gone]

    def _count(self, answers: list[Finished]) -> None:
        good = [answer for answer in answers if answer.succeeded]
        self._counters.add("batch_requests", len(good), outcome="completed")
        self._counters.add("batch_requests", len(answers) - len(good), outcome="failed")
        self._counters.add("batch_prompt_tokens", sum(a.usage.prompt for a in good))
        self._counters.add("batch_saved_tokens", sum(a.usage.cached for a in good))

    # ---- ending ----

    async def _end_early(self, row: sqlite3.Row, status: str, code: str) -> None:
        """Abort what runs, and tell of every request without an answer why it has none."""
        seq = int(row["seq"])
        active = await self._join(row)
        await self._sending.halt(active)
        await self._record(active)
        try:
            untold = await asyncio.to_thread(self._close_rest, active, code, _ENDS[code])
        except (StoreError, FileNotFoundError) as error:
            await self._give_up(seq, str(error))
            return
        errors = [error_object(LineError(code, _ENDS[code]))] if code == _DIED else []
        if code == _FULL or untold:
            full = await asyncio.to_thread(self._service.files.full, active.owner)
            more = f"; {untold} requests have no line" if untold else ""
            problem = f"Its results would take more than {full}{more}."
            errors.append(error_object(LineError(_FULL, problem)))
            logger.warning("batches: one ends as %s for want of room: %s", status, problem)
        await self._end(seq, status, errors)

    def _close_rest(self, active: Active, code: str, message: str) -> int:
        """Record a line for each request without an answer; how many found no room."""
        while rest := self._jobs.rest(active.seq, _CLOSING_PAGE):
            finished: list[Finished] = []
            for pending in rest:
                custom_id = custom_id_of(read_line(active.input, pending))
                problem = LineError(code, message, None, custom_id)
                line = failure_line(problem, pending.number)
                finished.append(Finished(pending.rank, line, succeeded=False))
            recorded = self._jobs.record(active.seq, finished)
            self._counters.add("batch_requests", recorded, outcome="failed")
            if recorded < len(finished):
                return self._jobs.left(active.seq)
        return 0

    async def _give_up(self, seq: int, why: str) -> None:
        logger.error("batches: a batch cannot go on: %s", why)
        self._counters.add("batch_errors")
        problem = LineError("files_damaged", why)
        await asyncio.to_thread(self._jobs.fail, seq, [error_object(problem)])
        self._counters.add("batches_ended", outcome="failed")
        self._leave(seq)

    async def _end(self, seq: int, status: str, errors: list[dict[str, Any]] | None = None) -> None:
        if await asyncio.to_thread(self._jobs.finish, seq, status, errors or ()):
            self._counters.add("batches_ended", outcome=status)
            self._leave(seq)

    def _leave(self, seq: int) -> None:
        self._not_before.pop(seq, None)
        self._validations.forget(seq)
        self._sending.leave(seq)


async def _undivided(work: Coroutine[Any, Any, None]) -> None:
    """Wait until it has ended, even when cancelled: a thread that it waits for would go on, and
    write what somebody else writes by then.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise
