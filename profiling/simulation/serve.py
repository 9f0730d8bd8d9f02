"""Requests that come and go: admission, chunks of prompts, decode steps, over one simulated clock.

A step is a chunk of a prompt, then a token of every request that decodes. Steps are simulated
(:mod:`vllm_ssdkv.profiling.simulation.decode`), once for each batch and about each length. Room for
a request is taken in the fastest tier that has some and those below: when it is admitted, for its
output too, or as it grows. In the second case the youngest request is preempted where no tier has
room. With a store, prompts begin with what it has of them, and loads and writes take what steps
leave of the drives (:mod:`vllm_ssdkv.profiling.simulation.reuse`).
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import simpy

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.profiling.simulation.decode import Setting, StepResult, System, decode, prefill
from vllm_ssdkv.profiling.simulation.hardware import Machine
from vllm_ssdkv.profiling.simulation.model_shape import ModelShape
from vllm_ssdkv.profiling.simulation.reuse import (
    READ_BYTES,
    Background,
    ReuseStore,
    StoreShape,
)
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

    Example:
        Request(0.0, 4096, 128, context="manual", shared=4000)

    Attributes:
        arrival_s: When it comes.
        prompt: Tokens.
        output: Tokens, the first one included.
        context: Name of a text that other prompts begin with, too.
        shared: Tokens of the prompt that are this text.
    """

    arrival_s: float
    prompt: int
    output: int
    context: str = ""
    shared: int = 0

    def __post_init__(self) -> None:
        """Check sizes. Raises ConfigError."""
        if self.arrival_s < 0 or self.prompt < 1 or self.output < 1:
            raise ConfigError(f"request: got {self}; a time, and at least one token of each")
        if not 0 <= self.shared <= self.prompt:
            raise ConfigError(f"request: shared: got {self.shared}; 0 to {self.prompt} tokens")


@dataclass(frozen=True, slots=True)
class Served:
    """A request that was answered, in seconds of the simulated clock.

    Attributes:
        hit: Tokens of the prompt that came from the store.
        preempted: Times that it lost its place.
    """

    request: Request
    first_token_s: float
    end_s: float
    hit: int = 0
    preempted: int = 0

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.first_token_s - self.request.arrival_s


class Gap(NamedTuple):
    """Seconds between two tokens of a request, and how many tokens came after so many."""

    seconds: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Report:
    """All requests of a run.

    Attributes:
        seconds: To the end of the last one.
        served: In the order of their ends.
        tier_bytes: Most that was used of each tier.
        limits: Decode steps by the kind of server that limited them.
        gaps: Between tokens, in the order of their steps.
        loaded_bytes: That came from the store.
        from_dram_bytes: Of these, blocks that were in DRAM, too.
        stored_bytes: That were written to it.
        skipped_bytes: That were not, because writes lagged behind.
        evicted_blocks: Blocks that made room in the store.
    """

    seconds: float
    served: tuple[Served, ...]
    tier_bytes: dict[str, float]
    limits: dict[str, int] = field(default_factory=dict)
    gaps: tuple[Gap, ...] = ()
    loaded_bytes: float = 0.0
    from_dram_bytes: float = 0.0
    stored_bytes: float = 0.0
    skipped_bytes: float = 0.0
    evicted_blocks: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Output of all requests by the time to the last end."""
        return sum(one.request.output for one in self.served) / self.seconds

    def ttft_s(self, share: float = 0.5) -> float:
        """Time to the first token that so many requests keep."""
        ordered = sorted(one.ttft_s for one in self.served)
        return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]

    def gap_s(self, share: float = 0.5) -> float:
        """Time between two tokens that so many of them keep; 0: no request made two."""
        ordered = sorted(self.gaps)
        wanted, seen = share * sum(gap.tokens for gap in ordered), 0
        for gap in ordered:
            seen += gap.tokens
            if seen >= wanted:
                return gap.seconds
        return 0.0


@dataclass(frozen=True, slots=True)
class Serving:
    """System with its machine and model, and its limits.

    Example:
        Serving(system, machine, storage, model, most=16).run(requests, tiers)

    Attributes:
        most: Requests that decode at a time.
        chunk: Tokens of a prompt that are computed in a step.
        grows: Whether room for output is taken as it comes; else at admission.
        store: Of computed blocks, for prompts that begin alike. None: no store.
    """

    system: System
    machine: Machine
    storage: Storage
    model: ModelShape
    most: int
    chunk: int = 8192
    grows: bool = False
    store: StoreShape | None = None

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
        return self.bytes_of(request.prompt + request.output)

    def bytes_of(self, tokens: int) -> float:
        """Bytes of so many tokens of a request."""
        return float(self.model.kv_bytes_per_token() * tokens + self.model.state_bytes())


@dataclass(slots=True)
class _Row:
    """A request under way.

    Attributes:
        computed: Tokens whose KV is there, of the prompt and of what was made before.
    """

    number: int
    request: Request
    computed: int = 0
    made: int = 0
    first_s: float = 0.0
    hit: int = 0
    looked_up: bool = False
    preempted: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that are to be computed before the next one is made."""
        return self.request.prompt + self.made


class _Engine:
    """One run of a serving."""

    def __init__(self, serving: Serving, requests: Sequence[Request], tiers: Tiers) -> None:
        self.env = simpy.Environment()
        self.of, self.tiers = serving, tiers
        rows = [_Row(number, request) for number, request in enumerate(requests)]
        self.coming = deque(sorted(rows, key=lambda row: (row.request.arrival_s, row.number)))
        self.decoding: dict[int, _Row] = {}
        self.prompts: deque[_Row] = deque()
        self.served: list[Served] = []
        self.limits: dict[str, int] = {}
        self.gaps: list[Gap] = []
        self.since_s: float | None = None
        self.store = None if serving.store is None else ReuseStore(serving.store, serving.model)
        block_bytes = READ_BYTES if self.store is None else self.store.block_bytes
        through = (
            (None, None) if serving.store is None else (serving.store.path, serving.store.node)
        )
        self.background = Background(serving.machine, serving.storage, block_bytes, *through)
        self.loading: deque[_Row] = deque()
        self._decodes: dict[tuple[int, int, int, int], StepResult] = {}
        self._prompts_s: dict[int, float] = {}

    def run(self) -> Report:
        self.env.run(self.env.process(self._steps()))
        store = self.store
        return Report(
            self.env.now,
            tuple(self.served),
            self.tiers.most(),
            self.limits,
            tuple(self.gaps),
            self.background.loaded_bytes,
            self.background.from_dram_bytes,
            self.background.stored_bytes,
            self.background.skipped_bytes,
            0 if store is None else store.evicted,
        )

    def _steps(self) -> Events:
        while self.coming or self.decoding or self.prompts or self.loading:
            self._admit()
            if not self.decoding and not self.prompts:
                yield from self._wait()
                continue
            if self.prompts:
                yield from self._chunk()
            if self.decoding:
                yield from self._decode()

    def _wait(self) -> Events:
        """Nothing to compute: until the next load ends, or the next request comes."""
        waits = [self.background.next_end_s()] if self.loading else []
        if self.coming and self._seats() and self.coming[0].request.arrival_s > self.env.now:
            waits.append(self.coming[0].request.arrival_s - self.env.now)
        yield from self._pass(min(waits))

    def _pass(self, seconds: float, busy: float = 0.0) -> Events:
        """Let time pass, of which steps take a part of the drives; others have the rest."""
        yield self.env.timeout(seconds)
        for _ in range(self.background.advance(seconds * (1 - busy))):
            row = self.loading.popleft()
            row.computed = row.hit
            if self.store is not None:
                self.store.unpin(row.number)
            self.prompts.append(row)
        if self.store is not None:
            self.store.written(self.background.take_written())

    def _seats(self) -> bool:
        used = len(self.decoding) + len(self.prompts) + len(self.loading)
        return used < self.of.most

    def _admit(self) -> None:
        """Admit who has come, in order, while there are seats and room."""
        while self.coming and self._seats():
            row = self.coming[0]
            if row.request.arrival_s > self.env.now:
                return
            need = row.tokens + (0 if self.of.grows else row.request.output - row.made)
            if not self.tiers.place(str(row.number), self.of.bytes_of(need)):
                return
            self.coming.popleft()
            row.computed, row.hit, row.looked_up = 0, 0, False
            self.prompts.append(row)

    def _loads(self, row: _Row) -> bool:
        """Begin to load what the store has, unless computing is faster.

        Looked up when the prompt's turn has come: what those before it have in common with it is
        there by then.
        """
        row.looked_up = True
        if self.store is None:
            return False
        context = row.request.context
        # The last token of a prompt is computed, whatever is stored.
        found = min(self.store.find(context, row.request.shared), row.tokens - 1)
        if not found:
            return False
        token = self.of.model.kv_bytes_per_token()
        from_dram = float(token * max(0, found - self.store.on_drives(context, found)))
        nbytes = float(token * found)
        computing = self._prompt_s(row.tokens) * found / row.tokens
        if self.background.load_s(nbytes, from_dram) >= computing:
            return False
        row.hit = found
        self.store.pin(row.number, context, found)
        self.loading.append(row)
        self.background.load(nbytes, from_dram)
        return True

    def _chunk(self) -> Events:
        """Compute a chunk of the oldest prompt; with its last one comes the first token."""
        row = self.prompts[0]
        if not row.looked_up and self._loads(row):
            self.prompts.popleft()
            return
        tokens = min(self.of.chunk, row.tokens - row.computed)
        seconds = self._prompt_s(row.tokens) * tokens / row.tokens
        row.computed += tokens
        if self.decoding and self.since_s is None:
            self.since_s = self.env.now
        yield from self._pass(seconds)
        if row.computed < row.tokens:
            return
        self.prompts.popleft()
        if row.made == 0:
            row.made, row.first_s = 1, self.env.now
        self.decoding[row.number] = row
        self._store(row)
        self._end_those_that_are_done()

    def _store(self, row: _Row) -> None:
        """Order the writes of blocks that the store has not."""
        if self.store is None or not row.request.context:
            return
        new = self.store.missing(row.request.context, row.request.shared)
        if new and self.background.store(self.store.shape, new, self.store.block_bytes):
            self.store.order(new)

    def _decode(self) -> Events:
        """Decode steps: one while prompts wait, else as many as are alike."""
        if self.of.grows:
            self._preempt()
        found = self._decode_step()
        count = self._steps_at_once(found.seconds)
        if self.of.grows:
            names, each = [str(number) for number in self.decoding], self._token_bytes
            if not self.tiers.grow(names, each * count):
                count = 1
                self.tiers.grow(names, each)
        rows, begun = len(self.decoding), self.env.now if self.since_s is None else self.since_s
        yield from self._pass(found.seconds * count, self._busy(found))
        first = self.env.now - begun - found.seconds * (count - 1)
        self.gaps.append(Gap(first, rows))
        if count > 1:
            self.gaps.append(Gap(found.seconds, rows * (count - 1)))
        self.since_s = None
        self.limits[found.limit] = self.limits.get(found.limit, 0) + count
        for row in self.decoding.values():
            row.made += count
            row.computed += count
        self._end_those_that_are_done()

    def _steps_at_once(self, seconds: float) -> int:
        """Steps of so many seconds in which nothing else changes."""
        if self.prompts or self.loading:
            return 1
        least = min(row.request.output - row.made for row in self.decoding.values())
        count = max(1, min(least, self._steps_alike()))
        if self.coming and self._seats():
            # Room or not, the next one is looked at when it comes.
            until = self.coming[0].request.arrival_s - self.env.now
            if until > 0:
                count = min(count, max(1, math.ceil(until / seconds)))
        return count

    @property
    def _token_bytes(self) -> float:
        return float(self.of.model.kv_bytes_per_token())

    def _preempt(self) -> None:
        """Take the place of the youngest, until there is room for a token of each of the others."""
        while len(self.decoding) > 1:
            if len(self.decoding) * self._token_bytes <= self.tiers.free_bytes:
                return
            _, row = self.decoding.popitem()
            self.tiers.free(str(row.number))
            row.preempted += 1
            self.coming.appendleft(row)

    def _busy(self, found: StepResult) -> float:
        """Part of a step in which its drives, or their link, have no time for others."""
        shared = [
            one.utilisation
            for name, one in found.usage.items()
            if name.startswith(("drive ", "chassis up"))
        ]
        return min(1.0, max(shared, default=0.0))

    def _end_those_that_are_done(self) -> None:
        for row in [row for row in self.decoding.values() if row.made >= row.request.output]:
            del self.decoding[row.number]
            self.tiers.free(str(row.number))
            self.served.append(
                Served(row.request, row.first_s, self.env.now, row.hit, row.preempted)
            )

    def _length(self) -> float:
        rows = self.decoding.values()
        return sum(row.tokens for row in rows) / len(rows)

    def _steps_alike(self) -> int:
        """Steps until the mean length goes on to the next that is simulated."""
        return max(1, int(_length_of(_bucket(self._length())) - self._length()))

    def _decode_step(self) -> StepResult:
        """A decode step of all rows."""
        parts = self.tiers.parts()
        hbm, dram = (int(PARTS * parts.get(name, 0.0)) for name in ("hbm", "dram"))
        key = (len(self.decoding), _bucket(self._length()), hbm, dram)
        if key not in self._decodes:
            setting = Setting(
                *(self.of.machine, self.of.storage, self.of.model, key[0], _length_of(key[1])),
                in_hbm=hbm / PARTS,
                in_dram=dram / PARTS,
            )
            self._decodes[key] = decode(self.of.system, setting)
        return self._decodes[key]

    def _prompt_s(self, tokens: int) -> float:
        """Seconds of a prompt of so many tokens."""
        if tokens not in self._prompts_s:
            of = self.of
            setting = Setting(of.machine, of.storage, of.model, 1, tokens)
            self._prompts_s[tokens] = prefill(of.system, setting).seconds
        return self._prompts_s[tokens]


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
