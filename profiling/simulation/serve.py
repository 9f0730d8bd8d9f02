"""Requests that come and go: admission, chunks of prompts, decode steps, over one simulated clock.

Room for a request is taken when it is admitted, for its prompt and its output, in the fastest tier
that has some and those below. So nothing is preempted, and who does not fit waits. A step is a
chunk of a prompt, then a token of every request that decodes. Steps are simulated
(:mod:`vllm_ssdkv.profiling.simulation.decode`), once for each batch and about each length.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import simpy

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.profiling.simulation.decode import Setting, System, decode, prefill
from vllm_ssdkv.profiling.simulation.hardware import Machine
from vllm_ssdkv.profiling.simulation.model_shape import ModelShape
from vllm_ssdkv.profiling.simulation.servers import Events
from vllm_ssdkv.profiling.simulation.storage import Storage
from vllm_ssdkv.profiling.simulation.tiers import Tiers

LENGTHS_PER_OCTAVE: Final = 4
"""Lengths between one and its double for which steps are simulated; others go up to the next."""
PARTS: Final = 16
"""Steps of the part of KV in a tier, likewise; down to the next."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and the output that it gets.

    Attributes:
        arrival_s: When it comes.
        prompt: Tokens.
        output: Tokens, the first one included.
    """

    arrival_s: float
    prompt: int
    output: int

    def __post_init__(self) -> None:
        """Check sizes. Raises ConfigError."""
        if self.arrival_s < 0 or self.prompt < 1 or self.output < 1:
            raise ConfigError(f"request: got {self}; a time, and at least one token of each")


@dataclass(frozen=True, slots=True)
class Served:
    """A request that was answered, in seconds of the simulated clock."""

    request: Request
    first_token_s: float
    end_s: float

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.first_token_s - self.request.arrival_s


@dataclass(frozen=True, slots=True)
class Report:
    """All requests of a run.

    Attributes:
        seconds: To the end of the last one.
        served: In the order of their ends.
        tier_bytes: Most that was used of each tier.
        limits: Decode steps by the kind of server that limited them.
    """

    seconds: float
    served: tuple[Served, ...]
    tier_bytes: dict[str, float]
    limits: dict[str, int] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Output of all requests by the time to the last end."""
        return sum(one.request.output for one in self.served) / self.seconds

    def ttft_s(self, share: float = 0.5) -> float:
        """Time to the first token that so many requests keep."""
        ordered = sorted(one.ttft_s for one in self.served)
        return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class Serving:
    """System with its machine and model, and its limits.

    Example:
        Serving(system, machine, storage, model, most=16).run(requests, tiers)

    Attributes:
        most: Requests that decode at a time.
        chunk: Tokens of a prompt that are computed in a step.
    """

    system: System
    machine: Machine
    storage: Storage
    model: ModelShape
    most: int
    chunk: int = 8192

    def run(self, requests: Sequence[Request], tiers: Tiers) -> Report:
        """Serve all requests.

        Raises:
            ConfigError: one never fits, or there are none.
        """
        if not requests:
            raise ConfigError("requests: none; give at least one")
        for number, request in enumerate(requests):
            tiers.check(f"request {number}", self.kv_bytes(request))
        return _Engine(self, requests, tiers).run()

    def kv_bytes(self, request: Request) -> float:
        """Bytes that a request takes."""
        tokens = request.prompt + request.output
        return float(self.model.kv_bytes_per_token() * tokens + self.model.state_bytes())


class _Engine:
    """One run of a serving."""

    def __init__(self, serving: Serving, requests: Sequence[Request], tiers: Tiers) -> None:
        self.env = simpy.Environment()
        self.of, self.tiers = serving, tiers
        numbered = enumerate(requests)
        self.coming = deque(sorted(numbered, key=lambda one: (one[1].arrival_s, one[0])))
        self.decoding: dict[int, _Row] = {}
        self.prompts: deque[_Row] = deque()
        self.served: list[Served] = []
        self.limits: dict[str, int] = {}
        self._decodes: dict[tuple[int, int, int, int], tuple[float, str]] = {}
        self._prompts_s: dict[int, float] = {}

    def run(self) -> Report:
        self.env.run(self.env.process(self._steps()))
        return Report(self.env.now, tuple(self.served), self.tiers.most(), self.limits)

    def _steps(self) -> Events:
        while self.coming or self.decoding or self.prompts:
            self._admit()
            if not self.decoding and not self.prompts:
                yield self.env.timeout(max(0.0, self.coming[0][1].arrival_s - self.env.now))
                continue
            if self.prompts:
                yield from self._chunk()
            if self.decoding:
                yield from self._decode()

    def _admit(self) -> None:
        """Admit who has come, in order, while there are seats and room."""
        while self.coming and len(self.decoding) + len(self.prompts) < self.of.most:
            number, request = self.coming[0]
            if request.arrival_s > self.env.now:
                return
            if not self.tiers.place(str(number), self.of.kv_bytes(request)):
                return
            self.coming.popleft()
            self.prompts.append(_Row(number, request))

    def _chunk(self) -> Events:
        """Compute a chunk of the oldest prompt; with its last one comes the first token."""
        row = self.prompts[0]
        tokens = min(self.of.chunk, row.request.prompt - row.computed)
        yield self.env.timeout(self._prompt_s(row.request.prompt) * tokens / row.request.prompt)
        row.computed += tokens
        if row.computed == row.request.prompt:
            self.prompts.popleft()
            row.made, row.first_s = 1, self.env.now
            self.decoding[row.number] = row
            self._end_those_that_are_done()

    def _decode(self) -> Events:
        """Decode steps: one while prompts wait, else as many as are alike."""
        step_s, limit = self._decode_s()
        count = 1
        if not self.prompts:
            least = min(row.request.output - row.made for row in self.decoding.values())
            count = max(1, min(least, self._steps_alike()))
            if self.coming and len(self.decoding) < self.of.most:
                # Room or not, the next one is looked at when it comes.
                until = self.coming[0][1].arrival_s - self.env.now
                if until > 0:
                    count = min(count, max(1, math.ceil(until / step_s)))
        yield self.env.timeout(step_s * count)
        self.limits[limit] = self.limits.get(limit, 0) + count
        for row in self.decoding.values():
            row.made += count
        self._end_those_that_are_done()

    def _end_those_that_are_done(self) -> None:
        for row in [row for row in self.decoding.values() if row.made >= row.request.output]:
            del self.decoding[row.number]
            self.tiers.free(str(row.number))
            self.served.append(Served(row.request, row.first_s, self.env.now))

    def _length(self) -> float:
        rows = self.decoding.values()
        return sum(row.request.prompt + row.made for row in rows) / len(rows)

    def _steps_alike(self) -> int:
        """Steps until the mean length goes on to the next that is simulated."""
        return max(1, int(_length_of(_bucket(self._length())) - self._length()))

    def _decode_s(self) -> tuple[float, str]:
        """Seconds of a decode step of all rows, and what limits it."""
        parts = self.tiers.parts()
        hbm, dram = (int(PARTS * parts.get(name, 0.0)) for name in ("hbm", "dram"))
        key = (len(self.decoding), _bucket(self._length()), hbm, dram)
        if key not in self._decodes:
            setting = Setting(
                *(self.of.machine, self.of.storage, self.of.model, key[0], _length_of(key[1])),
                in_hbm=hbm / PARTS,
                in_dram=dram / PARTS,
            )
            found = decode(self.of.system, setting)
            self._decodes[key] = (found.seconds, found.limit)
        return self._decodes[key]

    def _prompt_s(self, tokens: int) -> float:
        if tokens not in self._prompts_s:
            of = self.of
            setting = Setting(of.machine, of.storage, of.model, 1, tokens)
            self._prompts_s[tokens] = prefill(of.system, setting).seconds
        return self._prompts_s[tokens]


@dataclass(slots=True)
class _Row:
    """A request under way."""

    number: int
    request: Request
    computed: int = 0
    made: int = 0
    first_s: float = 0.0


def _bucket(tokens: float) -> int:
    return math.ceil(LENGTHS_PER_OCTAVE * math.log2(max(1.0, tokens)) - 1e-9)


def _length_of(bucket: int) -> int:
    return math.ceil(2 ** (bucket / LENGTHS_PER_OCTAVE))


def draw_requests(
    count: int, *, seed: int, rate: float, prompt: tuple[int, int], output: tuple[int, int]
) -> list[Request]:
    """Requests that come at random, ``rate`` per second, with lengths between both ends.

    The same seed gives the same requests.
    """
    source, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        now += source.expovariate(rate)
        found.append(Request(now, source.randint(*prompt), source.randint(*output)))
    return found
