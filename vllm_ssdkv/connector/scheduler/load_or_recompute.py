"""Load a hit or compute it: whichever gives the request its first token sooner.

Both are measured: what loads really took, queueing included, and what the engine's own steps took.
Until there is a measurement of each, hits are loaded.

**All, a part or nothing.** The time to load the first k blocks and compute the others is, with
loads linear in k and computing convex in it, concave in k: it is smallest at an end, all or
nothing. Only where blocks in DRAM are followed by blocks on the devices does the slope of loading
change; those places are looked at, too. (A part other than a prefix is of no use to vLLM.)

**Recovery.** While hits are computed nothing is learnt about the devices. So now and then a few
blocks of such a hit are read beside the request, which does not wait for them: a *probe*. They stay
in DRAM as after any read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.connector.messages import BACKGROUND, INTO_DRAM, PROBE, LoadTime, RankReport
from vllm_ssdkv.connector.scheduler.cost_model import LoadCost, PrefillCost, StepShape
from vllm_ssdkv.connector.scheduler.residency import ResidentSlots

PROBE_INTERVAL_S = 10.0
PROBE_BLOCKS = 16
PROBE_S = 0.2
"""A probe reads fewer blocks than that, down to one, if they seem to take longer than this: loads
may queue behind it."""

_STEPS_IN_FLIGHT = 64
"""Shapes of steps that are kept until their times come in; vLLM has two or three in flight."""

_DECODES_PER_TIMING = 16
"""Decode-only steps per timed one."""

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Decision about the request that vLLM asked about last."""

    request_id: str
    hits: int
    blocks: int
    compute_s: float
    """Estimated time to compute the blocks to load, or, with none, those of the hit."""
    load_s: float
    unread: I64
    """Blocks of the request that are computed although they are on devices."""


@dataclass(frozen=True, slots=True)
class HitConstraints:
    """Limits of a hit for layers with sliding windows.

    Attributes:
        slots: Loaded with any part of the hit, for layers that have windows where others have not.
        behind: Blocks at the hit's beginning that are not loaded, as no layer attends to them. Such
            a hit is loaded whole or not at all.
        follows: Whether all layers could go on after so many blocks.
    """

    slots: I64
    behind: int
    follows: Callable[[int], bool]


ALL_ATTEND_TO_ALL = HitConstraints(np.zeros(0, dtype=np.int64), 0, lambda count: True)


@dataclass(slots=True)
class _UnderWay:
    planned_at: float
    service_s: float
    compute_s: float
    times: list[LoadTime] = field(default_factory=list)


class LoadOrRecompute:
    """Decides how much of a hit is loaded. Runs in the scheduler, on its thread; never blocks."""

    def __init__(
        self,
        *,
        always: bool,
        block_tokens: int,
        chunk_tokens: int,
        ranks: int,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ):
        """``always``: load every hit, and measure nothing. ``chunk_tokens``: most of one step."""
        self._always = always
        self._block = block_tokens
        self.chunk_tokens = chunk_tokens
        self._ranks = ranks
        self._counters = counters
        self._clock = clock
        self.prefill = PrefillCost(chunk_tokens)
        self.load = LoadCost()
        self.resident = ResidentSlots()
        self._frames: dict[int, int] = {}
        self._steps: dict[int, StepShape] = {}
        self._untimed = 0
        self._chosen: _Chosen | None = None
        self._under_way: dict[str, _UnderWay] = {}
        self._last_end = 0.0
        self._read_at = 0.0

    @property
    def frames(self) -> int:
        """Frames of DRAM that every worker has; 0 until they have said so."""
        return min(self._frames.values(), default=0)

    # ---- the decision ----

    def blocks(
        self,
        request_id: str,
        slots: I64,
        computed: int,
        total: int,
        running: Iterable[tuple[int, int]],
        besides: HitConstraints = ALL_ATTEND_TO_ALL,
    ) -> int:
        """Number of a hit's blocks to load.

        Args:
            request_id: The request.
            slots: Slots of the hit, [n].
            computed: Tokens before the hit.
            total: Tokens of the request.
            running: (computed, all) tokens of the requests that vLLM computes already; asked for
                only where they matter.
            besides: What layers with windows need.
        """
        hits = len(slots)
        known = self.prefill.known and self.load.known
        if self._always or not hits or not known:
            self._chosen = _Chosen(request_id, hits, hits, 0.0, 0.0, slots[:0])
            return hits
        in_dram = self.resident.which(slots)
        end = computed + hits * self._block
        backlog = self.prefill.backlog(running)
        queue = self._queue() + self.load.way
        windows = self.resident.which(besides.slots)
        windows_in_dram = int(windows.sum())
        begin = besides.behind
        ends = self._ends(in_dram) if not begin else [0, hits]

        def service(count: int) -> float:
            from_dram = int(in_dram[begin:count].sum()) + windows_in_dram
            return self._service(from_dram, count - begin + len(windows) - from_dram)

        best, least = 0, 0.0
        for count in ends:
            if 0 < count < hits and not besides.follows(count):
                continue
            first = computed + count * self._block
            seconds = backlog
            if count:
                seconds = max(queue + service(count), backlog)
            seconds += self.prefill.seconds(first, end, total - end)
            # With equal times loading is better: it leaves the time to other requests.
            if count == 0 or seconds <= least:
                best, least = count, seconds
        loaded = best or hits
        self._chosen = _Chosen(
            request_id,
            hits,
            best,
            self.prefill.seconds(computed, computed + loaded * self._block, total - end),
            queue + service(loaded),
            computed // self._block + best + np.flatnonzero(~in_dram[best:]),
        )
        return best

    @staticmethod
    def _ends(in_dram: NDArray[np.bool_]) -> list[int]:
        """Numbers of blocks among which the best one is, rising."""
        borders = np.flatnonzero(in_dram[:-1] & ~in_dram[1:]) + 1
        return [0, *borders.tolist(), len(in_dram)]

    def _service(self, dram_blocks: int, ssd_blocks: int) -> float:
        return self.load.service(dram_blocks * self._block, ssd_blocks * self._block)

    def _queue(self) -> float:
        """Seconds until the loader is through with what is under way: it takes one by one."""
        if not self._under_way:
            return 0.0
        first, *others = self._under_way.values()
        elapsed = self._clock() - max(first.planned_at, self._last_end)
        # One that takes longer than it should will take as long again, for all we know.
        rest = first.service_s - elapsed if elapsed < first.service_s else elapsed
        return rest + sum(load.service_s for load in others)

    def admitted(self, request_id: str) -> range | None:
        """vLLM goes by the last decision. Blocks of the request to probe, or None."""
        chosen, self._chosen = self._chosen, None
        if chosen is None or chosen.request_id != request_id or chosen.blocks == chosen.hits:
            return None
        self._counters.add("hit_tokens_computed", (chosen.hits - chosen.blocks) * self._block)
        if chosen.blocks == 0:
            saved = max(0.0, chosen.load_s - chosen.compute_s)
            self._counters.add("seconds_saved", saved, by="computing")
        due = self._clock() - self._read_at >= PROBE_INTERVAL_S
        if not due or PROBE in self._under_way or not len(chosen.unread):
            return None
        count = PROBE_BLOCKS
        while count > 1 and self._service(0, count) > PROBE_S:
            count //= 2
        # A run of neighbours, as a hit is.
        blocks = chosen.unread[:count]
        neighbours = blocks - blocks[0] == np.arange(len(blocks))
        return range(int(blocks[0]), int(blocks[0]) + int(neighbours.sum()))

    # ---- what happens ----

    def planned(self, request_id: str, slots: I64) -> None:
        """A load of these slots goes to the workers with the next plan."""
        in_dram = self.resident.which(slots)
        from_dram = int(in_dram.sum())
        service = self._service(from_dram, len(slots) - from_dram)
        compute = 0.0
        if request_id == PROBE:
            self._read_at = self._clock()
            self._counters.add("load_probes")
        elif self._chosen is not None and self._chosen.request_id == request_id:
            compute = self._chosen.compute_s
        self._under_way[request_id] = _UnderWay(self._clock(), service, compute)
        self.resident.touch(slots.tolist())

    def saved(self, slots: Iterable[int]) -> None:
        """These slots are copied from HBM to DRAM in this step."""
        self.resident.touch(slots)

    def step(self, number: int, rows: Sequence[tuple[int, int]]) -> bool:
        """A step of (tokens before, tokens) rows is planned; whether workers shall time it."""
        shape = StepShape.of(rows)
        if self._always or not shape.tokens:
            return False
        if not shape.prefill:
            self._untimed += 1
            if self._untimed % _DECODES_PER_TIMING:
                return False
        self._steps[number] = shape
        while len(self._steps) > _STEPS_IN_FLIGHT:  # their workers never reported them
            del self._steps[next(iter(self._steps))]
        return True

    def reported(self, rank: int, report: RankReport) -> list[str]:
        """Take in what a worker measured; loads in the background that have ended on every rank."""
        if report.frames:
            self._frames[rank] = report.frames
            self.resident.set_frames(self.frames)
        if rank == 0:
            for number, seconds in report.steps:
                shape = self._steps.pop(number, None)
                if shape is not None:
                    self.prefill.observe(shape, seconds)
        for time_of in report.loads:
            load = self._under_way.get(time_of.request_id)
            if load is not None:
                load.times.append(time_of)
        beside = self._under_way.keys() & BACKGROUND
        return [name for name in beside if len(self._under_way[name].times) == self._ranks]

    def ended(self, request_id: str) -> None:
        """A load has ended on every rank."""
        load = self._under_way.pop(request_id, None)
        if load is None:
            return
        now = self._clock()
        self._last_end = now
        # Counted here, where what all ranks say of a load is together.
        failed = any(time_of.failed for time_of in load.times)
        self._counters.add("load_failures", int(failed))
        if not load.times or request_id in INTO_DRAM:  # which say nothing of how fast a hit is
            return
        slowest = max(load.times, key=lambda time_of: time_of.loading_s)
        waited = now - load.planned_at
        self.load.observe(slowest, None if request_id == PROBE else waited)
        if slowest.tokens_from_ssd:
            self._read_at = now
        if load.compute_s and not failed:
            gained = load.compute_s - waited
            if gained >= 0:
                self._counters.add("seconds_saved", gained, by="loading")
            else:
                self._counters.add("seconds_lost", -gained)

    def update_gauges(self) -> None:
        """Refresh the gauges of what is known."""
        if self.prefill.known:
            rate = self.prefill.tokens_per_second
            self._counters.set("estimated_prefill_tokens_per_second", rate)
        if self.load.known:
            self._counters.set("estimated_load_tokens_per_second", self.load.tokens_per_second)
            self._counters.set("estimated_load_latency_seconds", self.load.latency)
