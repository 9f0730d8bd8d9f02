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
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from vllm_ssdkv.batch.answering import AbortedError, Answering, NoReplyError
from vllm_ssdkv.batch.answers import Reply, answer_line, failure_line
from vllm_ssdkv.batch.jobs import Finished, Pending
from vllm_ssdkv.batch.lines import MAX_LINE, LineError, parse_request
from vllm_ssdkv.batch.prometheus import BatchCounters
from vllm_ssdkv.batch.service import Service
from vllm_ssdkv.batch.turns import Turns
from vllm_ssdkv.batch.validation import error_object, plan
from vllm_ssdkv.errors import StoreError

logger = logging.getLogger(__name__)

POLL_S: Final = 1.0
"""How long it takes at most to see what another API server process wrote."""
RETRY_S: Final = 2.0
"""Pause after an error of the disk, of the lock or of the engine."""
ASIDE_S: Final = 60.0
"""How long a batch is put aside at most whose validation failed again and again."""
SWEEP_S: Final = 60.0
ATTEMPTS: Final = 3
"""How often a request is sent that the engine answers with an error of its own."""
_BUSY: Final = (429, 503)
_PAGE: Final = 256
_CLOSING_PAGE: Final = 2048
_ENDS: Final = {
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was answered."),
    "expired": (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
}


@dataclass
class _Active:
    """A batch in progress, as this process sees it."""

    seq: int
    endpoint: str
    input: Path
    queue: deque[Pending] = field(default_factory=deque)
    last_rank: int = -1
    drained: bool = False
    running: set[asyncio.Task[None]] = field(default_factory=set)
    damage: str | None = None

    @property
    def is_idle(self) -> bool:
        return self.drained and not self.queue and not self.running


@dataclass(frozen=True)
class _Aside:
    """A batch that could not be validated: when to try again, and the pause before."""

    until: float
    pause: float


class Runner:
    """Runs all batches of a service. Everything but :meth:`wake` happens in :meth:`run`."""

    def __init__(
        self,
        service: Service,
        answering: Answering,
        concurrency: int,
        counters: BatchCounters,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``concurrency`` requests run at a time, answers that are not yet final included."""
        self._service = service
        self._jobs = service.jobs
        self._answering = answering
        self._concurrency = concurrency
        self._counters = counters
        self._clock = clock
        self._woken = asyncio.Event()
        self._active: dict[int, _Active] = {}
        self._turns: Turns[int] = Turns()
        self._finished: list[tuple[int, Finished]] = []
        self._validation: tuple[int, asyncio.Task[None]] | None = None
        self._aside: dict[int, _Aside] = {}
        self._interrupted = False
        self._waits_for_room = False
        self._next_sweep = 0.0
        service.wakers.append(self.wake)

    def wake(self) -> None:
        """There is something to do. On the event loop's thread."""
        self._woken.set()

    async def run(self) -> None:
        """Run batches until cancelled; then end cleanly what is under way."""
        lock = await self._own()
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
        unended = len(self._jobs.unended())
        if orphans or unended:
            logger.info("batches: %d go on, %d unfinished files removed", unended, orphans)

    async def _stop(self) -> None:
        tasks = [task for active in self._active.values() for task in active.running]
        if self._validation is not None:
            tasks.append(self._validation[1])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            await self._commit()
        except (OSError, sqlite3.Error) as error:
            # These requests have no answer, and are sent again by the next run.
            self._counters.add("batch_errors")
            logger.warning("batches: %d answers were not kept: %s", len(self._finished), error)

    # ---- one round ----

    async def _step(self) -> None:
        await self._sweep()  # first: what expires makes room for answers
        await self._commit()
        self._end_validation()
        rows = await asyncio.to_thread(self._jobs.unended)
        self._counters.set("batches_unended", len(rows))
        now = self._clock()
        for row in rows:
            await self._advance(row, now)
        await self._dispatch()
        running = sum(len(active.running) for active in self._active.values())
        self._counters.set("batch_requests_running", running)

    async def _sweep(self) -> None:
        now = time.monotonic()
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_S
            await asyncio.to_thread(self._service.files.expire)
            used = await asyncio.to_thread(self._service.files.used_bytes)
            self._counters.set("batch_bytes", used)

    async def _advance(self, row: sqlite3.Row, now: float) -> None:
        """Take a batch one step further, whatever state it is in."""
        seq, status = int(row["seq"]), str(row["status"])
        if self._validation is not None and self._validation[0] == seq:
            return
        if status == "finalizing":
            await self._end(seq, "completed")
        elif status == "cancelling":
            await self._end_early(row, "cancelled")
        elif now >= row["expires_at"]:
            await self._end_early(row, "expired")
        elif status == "validating":
            if self._validation is None and not self._is_aside(seq):
                task = asyncio.create_task(self._validate(row))
                self._validation = (seq, task)
        else:
            active = self._join(row)
            if active.damage is not None:
                await self._give_up(seq, active.damage)
            elif active.is_idle and not any(seq == other for other, _ in self._finished):
                await self._end(seq, "completed")

    def _end_validation(self) -> None:
        """Take note of its end: of a batch that failed by it nobody will speak any more."""
        if self._validation is None or not self._validation[1].done():
            return
        (seq, task), self._validation = self._validation, None
        before = self._aside.pop(seq, None)
        try:
            task.result()
        except Exception as error:  # noqa: BLE001 - others must not wait for it
            self._tell(error)
            pause = RETRY_S if before is None else min(2 * before.pause, ASIDE_S)
            self._aside[seq] = _Aside(time.monotonic() + pause, pause)

    def _is_aside(self, seq: int) -> bool:
        return seq in self._aside and time.monotonic() < self._aside[seq].until

    async def _validate(self, row: sqlite3.Row) -> None:
        try:
            await asyncio.to_thread(self._validate_file, row)
        finally:
            self._woken.set()

    def _validate_file(self, row: sqlite3.Row) -> None:
        seq = row["seq"]
        try:
            with self._service.files.path(row["input_file"]).open("rb") as file:
                found = plan(file, row["endpoint"], self._service.config.max_requests)
        except FileNotFoundError:
            lost = LineError("input_lost", "The input file is gone from the server's disk.")
            self._jobs.fail(seq, [error_object(lost)])
            self._counters.add("batches_ended", outcome="failed")
            return
        if found.errors:
            self._jobs.fail(seq, found.errors)
            self._counters.add("batches_ended", outcome="failed")
        else:
            self._jobs.start(seq, found.lines, found.order, found.model)

    def _join(self, row: sqlite3.Row) -> _Active:
        seq = int(row["seq"])
        active = self._active.get(seq)
        if active is None:
            path = self._service.files.path(row["input_file"])
            active = _Active(seq, row["endpoint"], path)
            self._active[seq] = active
            self._turns.join(seq)
        return active

    # ---- sending ----

    async def _dispatch(self) -> None:
        if self._interrupted or not self._active:
            return
        has_room = await asyncio.to_thread(self._service.files.has_room)
        if has_room == self._waits_for_room:
            self._waits_for_room = not has_room
            if not has_room:
                logger.warning(
                    "batches: files and results fill batch.capacity; batches wait until some "
                    "are deleted or expire"
                )
        if not has_room:
            return
        for active in self._active.values():
            if len(active.queue) < self._concurrency and not active.drained:
                found = await asyncio.to_thread(
                    self._jobs.pending, active.seq, active.last_rank, _PAGE + self._concurrency
                )
                active.queue.extend(found)
                active.drained = not found
                if found:
                    active.last_rank = found[-1].rank
        taken = len(self._finished) + sum(len(a.running) for a in self._active.values())
        for _ in range(self._concurrency - taken):
            seq = self._turns.next(self._has_next)
            if seq is None:
                return
            active = self._active[seq]
            task = asyncio.create_task(self._send(active, active.queue.popleft()))
            active.running.add(task)
            task.add_done_callback(active.running.discard)

    def _has_next(self, seq: int) -> bool:
        active = self._active[seq]
        return bool(active.queue) and active.damage is None

    async def _send(self, active: _Active, pending: Pending) -> None:
        try:
            answer = await self._answer(active, pending)
        except AbortedError as error:
            # Somebody has paused the engine, or reset it: it will answer when it is asked again.
            await self._pause(error)
            active.queue.appendleft(pending)
        except NoReplyError as error:
            if not self._interrupted:
                logger.warning("batches: %s; the next start of the server goes on", error)
            self._interrupted = True
        except FileNotFoundError:
            active.damage = "The input file is gone from the server's disk."
        except Exception:
            # A request must not take the others down, nor be sent for ever.
            logger.exception("batches: a request failed")
            problem = LineError("server_error", "The server failed to process this request.")
            line = failure_line(problem, pending.number)
            self._deliver(active, Finished(pending.rank, line, succeeded=False))
        else:
            self._deliver(active, answer)
        finally:
            self._woken.set()

    def _deliver(self, active: _Active, answer: Finished) -> None:
        if self._active.get(active.seq) is active:  # else it was given up meanwhile
            self._finished.append((active.seq, answer))

    async def _read(self, active: _Active, pending: Pending) -> bytes:
        while True:
            try:
                return await asyncio.to_thread(_read_line, active.input, pending)
            except FileNotFoundError:
                raise
            except OSError as error:
                await self._pause(error)

    async def _answer(self, active: _Active, pending: Pending) -> Finished:
        text = await self._read(active, pending)
        try:
            request = parse_request(text, active.endpoint)
        except LineError as problem:
            return Finished(pending.rank, failure_line(problem, pending.number), succeeded=False)
        failures = 0
        while True:
            reply: Reply = await self._answering.answer(request.endpoint, request.body)
            failures += reply.status >= 500 and reply.status not in _BUSY
            if reply.status not in _BUSY and (reply.status < 500 or failures == ATTEMPTS):
                break
            await asyncio.sleep(RETRY_S)
        line = answer_line(request.custom_id, reply)
        return Finished(pending.rank, line, succeeded=reply.succeeded, usage=reply.usage)

    # ---- making final ----

    async def _commit(self) -> None:
        while self._finished:
            seq = self._finished[0][0]
            # More may be added while the disk works.
            batch = [
                (i, answer) for i, (other, answer) in enumerate(self._finished) if other == seq
            ]
            answers = [answer for _, answer in batch]
            try:
                await asyncio.to_thread(self._jobs.record, seq, answers)
            except (StoreError, FileNotFoundError) as error:
                self._active[seq].damage = str(error)
            else:
                self._count(answers)
            gone = {i for i, _ in batch}
            self._finished = [entry for i, entry in enumerate(self._finished) if i not in gone]

    def _count(self, answers: list[Finished]) -> None:
        good = [answer for answer in answers if answer.succeeded]
        self._counters.add("batch_requests", len(good), outcome="completed")
        self._counters.add("batch_requests", len(answers) - len(good), outcome="failed")
        self._counters.add("batch_prompt_tokens", sum(a.usage.prompt for a in good))
        self._counters.add("batch_saved_tokens", sum(a.usage.cached for a in good))

    # ---- ending ----

    async def _end_early(self, row: sqlite3.Row, status: str) -> None:
        """Abort what runs, and tell of every request without an answer why it has none."""
        seq = int(row["seq"])
        active = self._join(row)
        tasks = list(active.running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._commit()
        try:
            await asyncio.to_thread(self._close_rest, active, *_ENDS[status])
        except (StoreError, FileNotFoundError) as error:
            await self._give_up(seq, str(error))
        else:
            await self._end(seq, status)

    def _close_rest(self, active: _Active, code: str, message: str) -> None:
        while rest := self._jobs.pending(active.seq, -1, _CLOSING_PAGE):
            finished: list[Finished] = []
            for pending in rest:
                problem = LineError(code, message)
                with contextlib.suppress(LineError):
                    request = parse_request(_read_line(active.input, pending), None)
                    problem.custom_id = request.custom_id
                line = failure_line(problem, pending.number)
                finished.append(Finished(pending.rank, line, succeeded=False))
            self._jobs.record(active.seq, finished)
            self._counters.add("batch_requests", len(finished), outcome="failed")

    async def _give_up(self, seq: int, why: str) -> None:
        logger.error("batches: a batch cannot go on: %s", why)
        self._counters.add("batch_errors")
        problem = LineError("files_damaged", why)
        await asyncio.to_thread(self._jobs.fail, seq, [error_object(problem)])
        self._counters.add("batches_ended", outcome="failed")
        self._leave(seq)

    async def _end(self, seq: int, status: str) -> None:
        if await asyncio.to_thread(self._jobs.finish, seq, status):
            self._counters.add("batches_ended", outcome=status)
            self._leave(seq)

    def _leave(self, seq: int) -> None:
        self._turns.leave(seq)
        self._aside.pop(seq, None)
        active = self._active.pop(seq, None)
        self._finished = [entry for entry in self._finished if entry[0] != seq]
        for task in () if active is None else tuple(active.running):
            task.cancel()


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


def _read_line(path: Path, pending: Pending) -> bytes:
    if pending.length > MAX_LINE:
        return b""
    with path.open("rb") as file:
        file.seek(pending.offset)
        return file.read(pending.length)
