"""The product's store, driven by users of the workload: cached tokens/s, GB/s and latencies.

No accelerator is there, and nothing is computed: what is measured is the store with its drives, as
in the benchmark's own mode without generation. DRAM is no tier: a block that is read comes from a
drive. The benchmark has a file per prompt; here it is blocks of the store, of 16 tokens.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.base.sizes import MIB, format_size
from vllm_ssdkv.profiling.bench_ssds.live_store import LiveStore, pause
from vllm_ssdkv.profiling.mlperf_kv.workload import (
    SYSTEM_PROMPTS,
    SYSTEM_TOKENS,
    Turn,
    turns,
)
from vllm_ssdkv.profiling.simulation.model_shape import ModelShape
from vllm_ssdkv.store.format.slot_geometry import PAGE_ALIGN, SlotGeometry, round_up

BLOCK_TOKENS: Final = 16
WRITES: Final = 32
"""Blocks in flight to the drives, at most."""
BATCH_BLOCKS: Final = 64
"""Blocks of one load, at most: a prompt is read in turns that fit DRAM."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Choice of a run.

    Attributes:
        directories: One on each drive.
        capacity: Bytes on each of them.
        users: That ask at a time.
        seconds: Of the run.
        seed: Of the requests.
        scale: Of the lengths of prompts; 1 is the benchmark's.
        dram: Bytes of memory for blocks on their way.
    """

    directories: Sequence[Path]
    model: ModelShape
    capacity: int
    users: int = 4
    seconds: float = 20.0
    seed: int = 42
    scale: float = 1.0
    dram: int = 256 * MIB


@dataclass(frozen=True, slots=True)
class Measured:
    """Result of a run.

    Attributes:
        seconds: Of it.
        requests: That ended.
        cached_tokens: That were read from the store.
        read_bytes: Of these.
        written_bytes: Of prompts.
        hit_rate: Part of the blocks asked for that the store had.
        read_s: Of each read of a whole prompt, sorted.
        write_s: Of each write of a whole prompt, sorted.
        device_share: Bytes that drives read over those that were asked for: 1, nothing from DRAM.
    """

    seconds: float
    requests: int
    cached_tokens: int
    read_bytes: int
    written_bytes: int
    hit_rate: float
    device_share: float
    read_s: tuple[float, ...] = field(repr=False)
    write_s: tuple[float, ...] = field(repr=False)

    @property
    def tokens_per_s(self) -> float:
        """Cached tokens per second."""
        return self.cached_tokens / self.seconds


def latency(seconds: Sequence[float], share: float) -> float | None:
    """Time that so many of them keep, of sorted ones; None: there are none."""
    if not seconds:
        return None
    return seconds[min(len(seconds) - 1, math.ceil(share * len(seconds)) - 1)]


def geometry_of(model: ModelShape) -> SlotGeometry:
    """Shape of a block of 16 tokens.

    Raises:
        BenchError: the model has no layer with KV.
    """
    layers = model.attention_layers()
    if not layers:
        raise BenchError(f"--model {model.name}: no layer has KV; give a model with attention")
    payload = -(-model.kv_bytes_per_token() * BLOCK_TOKENS // layers)
    return SlotGeometry(kind="opaque", layers=layers, heads=1, groups=1, payload_bytes=payload)


@dataclass(slots=True)
class _Entry:
    """KV of a prompt: blocks that are to be written, or are there."""

    blocks: int
    keys: list[bytes] = field(default_factory=list)
    durable: int = 0
    begun_s: float = 0.0


@dataclass(slots=True)
class _User:
    """A user with the work of its request that is left."""

    source: Iterator[Turn]
    until_s: float = 0.0
    turn: Turn | None = None
    before: _Entry | None = None
    entry: _Entry | None = None
    reads: deque[_Entry] = field(default_factory=deque)
    chunks: deque[list[bytes]] = field(default_factory=deque)
    job: int | None = None
    loading: int = 0
    read_from_s: float = 0.0


class _Run:
    """One run: all users, one thread."""

    def __init__(self, settings: Settings, store: LiveStore, block_bytes: int) -> None:
        self.settings, self.store, self.block_bytes = settings, store, block_bytes
        self.users = [
            _User(turns(number, settings.seed, settings.scale)) for number in range(settings.users)
        ]
        self.system = [_Entry(-(-SYSTEM_TOKENS // BLOCK_TOKENS)) for _ in range(SYSTEM_PROMPTS)]
        self.writing: deque[_Entry] = deque(self.system)
        self.owner: dict[bytes, _Entry] = {}
        # Blocks that were asked for, that the store had of these, and that were read.
        self.asked = self.found = self.read = 0
        self.requests = self.written = 0
        self.read_s: list[float] = []
        self.write_s: list[float] = []

    def run(self) -> Measured:
        """Serve all users until the time is over."""
        while any(entry.durable < entry.blocks for entry in self.system):
            self._step()
        before = self.store.read()
        self.written = 0
        self.write_s.clear()
        begin = time.monotonic()
        end = begin + self.settings.seconds
        while time.monotonic() < end:
            self._step()
            for user in self.users:
                self._serve(user)
        seconds = time.monotonic() - begin
        self.store.finish()
        moved = self.store.read() - before
        return Measured(
            seconds,
            self.requests,
            self.read * BLOCK_TOKENS,
            self.read * self.block_bytes,
            self.written * self.block_bytes,
            self.found / self.asked if self.asked else 0.0,
            moved / (self.found * self.block_bytes) if self.found else 0.0,
            tuple(sorted(self.read_s)),
            tuple(sorted(self.write_s)),
        )

    def _step(self) -> None:
        """Hand out blocks that are to be written, and note what has ended."""
        wanted = sum(entry.blocks - len(entry.keys) for entry in self.writing)
        under_way = len(self.owner)
        for key in self.store.store(min(WRITES, under_way + wanted)):
            entry = self.writing[0]
            entry.keys.append(key)
            self.owner[key] = entry
            if len(entry.keys) == entry.blocks:
                self.writing.popleft()
        pause()
        for key in self.store.step():
            entry = self.owner.pop(key)
            entry.durable += 1
            self.written += 1
            if entry.durable == entry.blocks:
                self.write_s.append(time.monotonic() - entry.begun_s)
        ended = set(self.store.take_ended())
        for user in self.users:
            if user.job in ended:
                user.job = None
                self.read += user.loading

    def _serve(self, user: _User) -> None:
        """Go on with a user's request, as far as nothing must be waited for."""
        now = time.monotonic()
        if user.turn is None:
            user.turn = next(user.source)
            user.until_s = now + user.turn.pause_s
            self._begin(user, user.turn)
            return
        if now < user.until_s or user.job is not None:
            return
        if user.chunks:
            self._load(user)
            return
        if user.read_from_s:
            self.read_s.append(now - user.read_from_s)
            user.read_from_s = 0.0
        entry = user.entry
        if user.reads and user.reads[0].durable == user.reads[0].blocks:
            keys = user.reads.popleft().keys
            user.chunks = deque(
                keys[at : at + BATCH_BLOCKS] for at in range(0, len(keys), BATCH_BLOCKS)
            )
            user.read_from_s = now
            self._load(user)
        elif entry is not None and not entry.begun_s:
            # What is read before the prompt was read: now it is written.
            entry.begun_s = now
            self.writing.append(entry)
            user.reads.extend([entry] * user.turn.reads)
        elif entry is not None and entry.durable == entry.blocks and not user.reads:
            self.requests += 1
            user.before, user.entry, user.turn = entry, None, None

    def _begin(self, user: _User, turn: Turn) -> None:
        """Plan a request: reads of a system prompt and of the turn before, then the prompt."""
        user.entry = _Entry(-(-turn.tokens // BLOCK_TOKENS))
        if turn.system is not None:
            user.reads.append(self.system[turn.system])
        if user.before is not None and not turn.first:
            user.reads.append(user.before)

    def _load(self, user: _User) -> None:
        keys = user.chunks.popleft()
        self.asked += len(keys)
        found = self.store.load(keys)
        self.found += found
        if found:
            user.job, user.loading = self.store.job, found


@contextlib.contextmanager
def _opened(settings: Settings, geometry: SlotGeometry) -> Iterator[LiveStore]:
    """A store in the directories, gone at the end.

    Raises:
        StoreError, ConfigError: it cannot be made.
    """
    folders = [
        Path(tempfile.mkdtemp(prefix="ssdkv-mlperf-", dir=place)) for place in settings.directories
    ]
    try:
        with tempfile.TemporaryDirectory(prefix="ssdkv-mlperf-state-") as state:
            store = LiveStore(
                folders,
                geometry,
                state=Path(state),
                capacity=settings.capacity,
                dram=settings.dram,
            )
            try:
                yield store
            finally:
                store.close()
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def run(settings: Settings) -> Measured:
    """Measure.

    Raises:
        BenchError: the store is too small for the users' prompts, or a read or write failed.
        StoreError, ConfigError: the store cannot be made.
    """
    geometry = geometry_of(settings.model)
    block_bytes = round_up(geometry.slot_bytes, PAGE_ALIGN)
    with _opened(settings, geometry) as store:
        most = max(
            turn.tokens
            for user in range(settings.users)
            for turn, _ in zip(turns(user, settings.seed, settings.scale), range(64), strict=False)
        )
        need = 2 * settings.users * -(-most // BLOCK_TOKENS) + WRITES
        if store.slots < need:
            raise BenchError(
                f"--capacity: the store has {store.slots} blocks; {settings.users} users whose "
                f"longest prompt has {most} tokens need {need}, {format_size(need * block_bytes)} "
                "in all: give more, fewer users, a smaller model or a smaller --scale"
            )
        return _Run(settings, store, block_bytes).run()
