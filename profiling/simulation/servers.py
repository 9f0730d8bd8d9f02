"""Servers with a queue each: drives, links, an accelerator. Discrete events, by SimPy.

A server does one piece of work at a time, the one that is first in the order of the program. One
that comes later and is before it interrupts it. So a piece waits for what is needed earlier, and
for nothing else: a faster part never makes the whole slower. Latency is beside it: a piece occupies
its server for its bytes or its turn, and is there some time later.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeAlias

import simpy

Events: TypeAlias = Generator[simpy.Event, Any, None]
"""A process of the simulation."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Work of a server until now.

    Attributes:
        seconds: Of the simulation.
        busy_s: In which it worked.
        jobs: Pieces of work that it ended.
        nbytes: Of these.
        present: Mean number of pieces that waited or were worked on.
        stay_s: Mean time of a piece in it.
    """

    seconds: float
    busy_s: float
    jobs: int
    nbytes: float
    present: float
    stay_s: float

    @property
    def utilisation(self) -> float:
        """Part of the time in which it worked."""
        return self.busy_s / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class _Job:
    """A piece of work; ``left`` seconds of it from ``begun`` on."""

    order: int
    number: int
    left: float
    done: simpy.Event
    begun: float = 0.0

    def __lt__(self, other: _Job) -> bool:
        """Compare turns; of equal ones, the order of arrival."""
        return (self.order, self.number) < (other.order, other.number)


class Server:
    """One queue, one piece of work at a time.

    Example:
        env = simpy.Environment()
        drive = Server(env, "drive")
        env.process(drive.work(0.5, nbytes=4096))
        env.run()
    """

    def __init__(self, env: simpy.Environment, name: str) -> None:
        self.name = name
        self._env = env
        self._waiting: list[_Job] = []
        self._now: _Job | None = None
        self._arrivals = 0
        self._busy_s = 0.0
        self._jobs = 0
        self._nbytes = 0.0
        self._present = 0
        self._area = 0.0
        self._changed = 0.0
        self._stay_s = 0.0

    def work(
        self, seconds: float, *, order: int = 0, nbytes: float = 0.0, latency_s: float = 0.0
    ) -> Events:
        """Work in the turn of ``order``, least first, and be there after the latency.

        Raises:
            ValueError: time or bytes are negative.
        """
        if seconds < 0 or nbytes < 0 or latency_s < 0:
            raise ValueError(f"{self.name}: {seconds} s, {nbytes} bytes, {latency_s} s of latency")
        arrived = self._env.now
        self._count(1)
        self._arrivals += 1
        job = _Job(order, self._arrivals, seconds, self._env.event())
        heapq.heappush(self._waiting, job)
        self._go_on()
        yield job.done
        self._busy_s += seconds
        self._jobs += 1
        self._nbytes += nbytes
        self._stay_s += self._env.now - arrived
        if latency_s:
            yield self._env.timeout(latency_s)

    def _go_on(self) -> None:
        """Work on the piece whose turn it is; one that is under way and is not goes back."""
        if not self._waiting or (self._now is not None and self._now < self._waiting[0]):
            return
        if self._now is not None:
            self._now.left = max(0.0, self._now.left - (self._env.now - self._now.begun))
            heapq.heappush(self._waiting, self._now)
        job = heapq.heappop(self._waiting)
        self._now, job.begun = job, self._env.now
        end = self._env.timeout(job.left)
        begun = job.begun
        # An interrupted piece begins again later: what ends then is not this.
        end.callbacks.append(lambda _: self._end(job, begun))

    def _end(self, job: _Job, begun: float) -> None:
        if self._now is not job or job.begun != begun:
            return
        self._now = None
        self._count(-1)
        job.done.succeed()
        self._go_on()

    def usage(self) -> Usage:
        """Count until now, without pieces under way."""
        self._count(0)
        now = self._env.now
        return Usage(
            now,
            self._busy_s,
            self._jobs,
            self._nbytes,
            self._area / now if now else 0.0,
            self._stay_s / self._jobs if self._jobs else 0.0,
        )

    def _count(self, change: int) -> None:
        """Pieces came or went: the area under their number grows until now."""
        self._area += self._present * (self._env.now - self._changed)
        self._changed = self._env.now
        self._present += change
