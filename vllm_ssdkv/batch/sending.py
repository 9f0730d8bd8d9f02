"""Sends the requests of batches in progress: whose turn it is, and whether there is room for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from vllm_ssdkv.base.sizes import KIB, MIB
from vllm_ssdkv.batch.answers import Reply, answer_line, failure_line
from vllm_ssdkv.batch.endpoint_protocol import AbortedError, Answering, NoReplyError
from vllm_ssdkv.batch.jobs import CONVICTED, Finished, Jobs, Pending
from vllm_ssdkv.batch.lines import MAX_LINE, LineError
from vllm_ssdkv.batch.request import Limits, Request, custom_id_of, parse_request
from vllm_ssdkv.batch.room import SETTLE_S, Engine, Expected, Room
from vllm_ssdkv.batch.round_robin import Turns

logger = logging.getLogger(__name__)

RETRY_S: Final = 2.0
"""Pause before what failed is tried again."""
ATTEMPTS: Final = 3
"""Number of attempts for a request that the engine answers with an error of its own."""
DEATHS: Final = 2
"""Deaths of servers that are charged to a batch, until it ends; of ``ssdkv batch run``: those that
happen while a request is under way, until it is sent no more."""
PATIENCE_S: Final = 10.0
"""Time for which smaller requests may pass one that needs more room than the batches have left."""
MAX_LOGPROBS: Final = 16 * KIB
"""Log probabilities of all answers under way together, or of one: they may all end at once."""
MAX_ANSWER: Final = 128 * MIB
"""Bytes of an answer; only embeddings of some hundred inputs come near it."""
_BUSY: Final = (429, 503)
_PAGE: Final = 256
_LOOKS: Final = 8
"""Batches of a key that are looked at, when the first ones do not fit."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A request under way, and when it was sent."""

    request: Pending
    at: float


@dataclass
class Active:
    """A batch in progress, as this process sees it.

    Attributes:
        suspects: Those that a server died of, perhaps; each runs alone.
        doubted: Whether it is open who the last server died of. Then suspects are tried before the
            rest, so that one death says it; else after it, so that the rest has its answers.
        expected: What its requests take of KV.
        damage: What has happened to its files, if anything has.
        full: Whether its results have no room any more.
        halted: Whether it is about to end.
        unrecorded: Whether answers of it could not be recorded; they wait for that.
        passed_at: Since when its next request is passed by others.
    """

    seq: int
    owner: bytes
    endpoint: str
    input: Path
    suspects: list[Pending]
    doubted: bool
    expected: Expected
    queue: deque[Pending] = field(default_factory=deque)
    last_rank: int = -1
    drained: bool = False
    running: dict[asyncio.Task[None], Sent] = field(default_factory=dict)
    damage: str | None = None
    full: bool = False
    halted: bool = False
    unrecorded: bool = False
    passed_at: float | None = None

    @property
    def is_idle(self) -> bool:
        """Check whether every request has been answered; not every answer may be final."""
        return self.drained and not self.queue and not self.running

    @property
    def has_next(self) -> bool:
        """Check whether there is something to send."""
        is_stopped = self.damage is not None or self.full or self.halted or self.unrecorded
        return bool(self.queue) and not is_stopped

    @property
    def has_suspect_next(self) -> bool:
        """Check whether the next one to send has to run alone."""
        return bool(self.queue) and self.queue[0].is_suspect

    def is_short(self, least: int) -> bool:
        """Check whether there are fewer requests at hand, and may be more."""
        return len(self.queue) < least and not self.drained

    def fill(self, jobs: Jobs, least: int) -> None:
        """Read on. Blocks."""
        if self.doubted and self.suspects:
            self.queue.extend(self.suspects)
            self.suspects = []
            return
        found = jobs.pending(self.seq, self.last_rank, _PAGE + least)
        if found:
            self.last_rank = found[-1].rank
            self.queue.extend(found)
        elif not self.queue and not self.running:
            self.queue.extend(self.suspects)
            self.suspects = []
            self.drained = True


@dataclass(frozen=True, slots=True)
class _Taken:
    """Shares that requests under way take of what batches may have."""

    seats: int = 0
    size: int = 0
    logprobs: int = 0
    part: float = 0.0
    unseen: float = 0.0
    alone: bool = False

    def __add__(self, other: _Taken) -> _Taken:
        return _Taken(
            self.seats + other.seats,
            self.size + other.size,
            self.logprobs + other.logprobs,
            self.part + other.part,
            self.unseen + other.unseen,
            self.alone or other.alone,
        )


class Sending:
    """Requests under way. To be used on the event loop's thread.

    Attributes:
        active: Batches in progress, by number.
        finished: Answers that are not final yet, each with its batch.
        held: Batches that waited for KV of users when requests were sent last.
        interrupted: Whether nothing is sent any more, as the engine ends.
    """

    def __init__(
        self,
        jobs: Jobs,
        answering: Answering,
        seats: int,
        limits: Limits,
        room: Room,
        engine: Engine | None,
        tell: Callable[[Exception], None],
        woken: asyncio.Event,
    ) -> None:
        """``seats`` requests run at a time, answers that are not yet final included.

        ``woken`` is set when one has ended; ``tell`` takes errors that pass.
        """
        self._jobs = jobs
        self._answering = answering
        self._seats = seats
        self._limits = limits
        self._room = room
        self._engine = engine
        self._tell = tell
        self._woken = woken
        # One thread, so that what large lines leave behind in the heap is there once.
        self._reader = ThreadPoolExecutor(1, "ssdkv-batch-lines")
        self._turns: Turns[int] = Turns()
        self._begun: set[tuple[int, int]] = set()
        self.active: dict[int, Active] = {}
        self.finished: list[tuple[int, Finished]] = []
        self.held = 0
        self.interrupted = False
        self._engine_died = False

    # ---- batches ----

    def join(self, active: Active) -> None:
        """Send requests of this batch, too."""
        self.active[active.seq] = active
        self._turns.join(active.owner, active.seq)

    async def halt(self, active: Active) -> None:
        """Abort what runs of a batch."""
        active.halted = True
        await _end(active.running)

    def leave(self, seq: int) -> None:
        """A batch has ended; answers that come late are dropped."""
        active = self.active.pop(seq, None)
        self.finished[:] = [entry for entry in self.finished if entry[0] != seq]
        self._begun = {sent for sent in self._begun if sent[0] != seq}
        if active is None:
            return
        self._turns.leave(active.owner, seq)
        for task in tuple(active.running):
            task.cancel()

    def recorded(self, seq: int, answers: Iterable[Finished]) -> None:
        """These answers are final."""
        self._begun -= {(seq, answer.rank) for answer in answers}

    @property
    def running(self) -> int:
        """Requests under way."""
        return sum(len(active.running) for active in self.active.values())

    async def stop(self) -> None:
        """Abort all that runs; the answers that are there stay in ``finished``."""
        await _end([task for active in self.active.values() for task in active.running])
        self._reader.shutdown(wait=False)

    def put_back(self) -> None:
        """Put back requests without an answer: they killed nobody. Unless one did. Blocks."""
        if self._begun and not self._died():
            self._jobs.put_back(self._begun)
            self._begun = set()

    def _died(self) -> bool:
        # Noted when the first request is told so: a stop of the server may follow at once.
        self._engine_died |= self._engine is not None and self._engine.died
        return self._engine_died

    # ---- sending ----

    async def dispatch(self, *, may_try: bool = True) -> None:
        """Send as many as there is room for; suspects only where ``may_try``."""
        if self.interrupted or not self.active:
            return
        for active in self.active.values():
            if active.is_short(self._seats):
                await asyncio.to_thread(active.fill, self._jobs, self._seats)
        if self._engine is not None:
            self._room.see(await asyncio.to_thread(self._engine.load))
        chosen = self._choose(may_try=may_try)
        new = {(active.seq, request.rank) for active, request in chosen} - self._begun
        try:
            if new:
                await asyncio.to_thread(self._jobs.begin, new)
        except Exception:
            for active, request in reversed(chosen):
                active.queue.appendleft(request)
            raise
        self._begun |= new
        for active, request in chosen:
            task = asyncio.create_task(self._send(active, request))
            active.running[task] = Sent(request, time.monotonic())
            task.add_done_callback(active.running.pop)

    def _choose(self, *, may_try: bool) -> list[tuple[Active, Pending]]:
        """The requests to be sent now, taken from their queues."""
        chosen: list[tuple[Active, Pending]] = []
        now = time.monotonic()
        taken = sum(
            (
                self._takes(active, sent.request, new=now < sent.at + SETTLE_S)
                for active in self.active.values()
                for sent in active.running.values()
            ),
            _Taken(seats=len(self.finished)),
        )
        seats: Counter[bytes] = Counter()
        for active in self.active.values():
            seats[active.owner] += sum(sent.request.seats for sent in active.running.values())
        passed: set[int] = set()
        looks: Counter[bytes] = Counter()
        self.held = 0

        def may_be_next(seq: int) -> bool:
            active = self.active[seq]
            may_go = may_try or not active.has_suspect_next
            return active.has_next and may_go and looks[active.owner] < _LOOKS

        while taken.seats < self._seats and not taken.alone:
            seq = self._turns.next(may_be_next, seats.__getitem__, passed)
            if seq is None:
                break
            active = self.active[seq]
            takes = self._takes(active, active.queue[0], new=True)
            fits = self._fits(takes, taken)
            if fits and self._room.is_free(takes.unseen, taken.unseen):
                active.passed_at = None
                self._turns.took(active.owner, seq)
                seats[active.owner] += takes.seats
                taken += takes
                chosen.append((active, active.queue.popleft()))
                continue
            self.held += fits
            if not fits:
                active.passed_at = active.passed_at or now
                if now >= active.passed_at + PATIENCE_S:
                    break  # others would pass it for ever
            passed.add(seq)
            looks[active.owner] += 1
        return chosen

    def _takes(self, active: Active, request: Pending, *, new: bool) -> _Taken:
        prompt = active.expected.prompt(request)
        answers = active.expected.answers(request)
        return _Taken(
            seats=request.seats,
            size=request.length,
            logprobs=request.logprobs,
            part=self._room.part(prompt + answers, request.answers),
            unseen=self._room.part(prompt, request.answers) if new else 0.0,
            alone=request.is_suspect,
        )

    def _fits(self, takes: _Taken, taken: _Taken) -> bool:
        """Check whether it fits into what batches may have. When nothing is under way, all does."""
        if not taken.seats:
            return True
        return (
            not takes.alone
            and taken.seats + takes.seats <= self._seats
            and taken.size + takes.size <= self._limits.under_way
            and (not takes.logprobs or taken.logprobs + takes.logprobs <= MAX_LOGPROBS)
            and self._room.within_share(takes.part, taken.part)
        )

    # ---- one request ----

    async def _send(self, active: Active, pending: Pending) -> None:
        try:
            answer = await self._answer(active, pending)
        except AbortedError as error:
            # Somebody has paused the engine, or reset it: it will answer when it is asked again.
            await self._pause(error)
            active.queue.appendleft(pending)
        except NoReplyError as error:
            if not self.interrupted:
                logger.warning("batches: %s; the next start of the server goes on", error)
            self.interrupted = True
            self._died()
        except FileNotFoundError:
            active.damage = "The input file is gone from the server's disk."
        except Exception as error:  # noqa: BLE001 - it must not take others down, nor be sent again
            self._tell(error)
            problem = LineError("server_error", "The server failed to process this request.")
            line = failure_line(problem, pending.number)
            self._deliver(active, Finished(pending.rank, line, succeeded=False))
        else:
            self._deliver(active, answer)
        finally:
            self._woken.set()

    def _deliver(self, active: Active, answer: Finished) -> None:
        if self.active.get(active.seq) is active:  # else it was given up meanwhile
            self.finished.append((active.seq, answer))

    async def _pause(self, error: Exception) -> None:
        self._tell(error)
        await asyncio.sleep(RETRY_S)

    async def _read(self, active: Active, pending: Pending) -> Request:
        while True:
            try:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._reader, self._request, active, pending)
            except FileNotFoundError:
                raise
            except OSError as error:
                await self._pause(error)

    def _request(self, active: Active, pending: Pending) -> Request:
        """The request on a line. In the thread that reads lines.

        Raises:
            LineError: it is none, or is sent no more.
        """
        text = read_line(active.input, pending)
        if pending.attempts >= CONVICTED:
            raise died(custom_id_of(text))
        return parse_request(text, active.endpoint, self._limits)

    async def _answer(self, active: Active, pending: Pending) -> Finished:
        try:
            request = await self._read(active, pending)
            reply = await self._reply(request)
        except LineError as problem:
            return Finished(pending.rank, failure_line(problem, pending.number), succeeded=False)
        if reply.succeeded:
            active.expected.learn(pending, reply.usage)
        line = answer_line(request.custom_id, reply)
        return Finished(pending.rank, line, succeeded=reply.succeeded, usage=reply.usage)

    async def _reply(self, request: Request) -> Reply:
        """The last reply, after those that may pass.

        Raises:
            LineError: it is no request, or the answer is too large.
        """
        failures = 0
        while True:
            # Anew each time: vLLM may change it.
            body = await asyncio.get_running_loop().run_in_executor(self._reader, request.body)
            reply = await self._answering.answer(request.endpoint, body)
            failures += reply.status >= 500 and reply.status not in _BUSY
            if reply.status not in _BUSY and (reply.status < 500 or failures == ATTEMPTS):
                break
            await asyncio.sleep(RETRY_S)
        if len(reply.body) > MAX_ANSWER:
            problem = f"The answer has more than {MAX_ANSWER} bytes."
            raise LineError("answer_too_large", problem, None, request.custom_id)
        return reply


def died(custom_id: str | None) -> LineError:
    """Error of a request that was under way at too many deaths."""
    return LineError(
        "server_died",
        f"The server or its engine died {DEATHS} times while this request was under way, the last "
        "time alone; it is not sent again.",
        None,
        custom_id,
    )


async def _end(tasks: Iterable[asyncio.Task[None]]) -> None:
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


def read_line(path: Path, pending: Pending) -> bytes:
    """The text of a line; empty when it is too long. Blocks.

    Raises:
        OSError: the file cannot be read.
    """
    if pending.length > MAX_LINE:
        return b""
    with path.open("rb") as file:
        file.seek(pending.offset)
        return file.read(pending.length)
