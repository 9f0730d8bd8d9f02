"""A store that works for a long time: memory, descriptors, threads and files stay as they are."""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.crash import store_victim
from tests.crash.store_victim import CHAIN, GEOMETRY, Victim, key_of
from tests.kit.waiting import until
from vllm_ssdkv.store import open as opening
from vllm_ssdkv.store.cache.frames import FrameState
from vllm_ssdkv.store.context_store import ContextStore

REQUEST = "long"
SAMPLES = 12
SPARE_BYTES = 6 << 20
"""An interpreter's heap breathes by about that much; the soak test runs long enough to tell."""

STATE_BYTES = 256 << 10
"""More than journal and manifest of this small store may ever take."""


@dataclass(frozen=True)
class Sample:
    """What a process holds."""

    rss: int
    descriptors: int
    threads: int

    @classmethod
    def take(cls) -> Sample:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        fds, tasks = os.listdir("/proc/self/fd"), os.listdir("/proc/self/task")
        return cls(pages * os.sysconf("SC_PAGESIZE"), len(fds), len(tasks))


class Work:
    """Everything that a store does, over and over, with a check of what is read."""

    def __init__(self, devices: list[Path], state: Path) -> None:
        self.victim = Victim([str(path) for path in devices], str(state))
        self.source = random.Random(1)
        self.number = 0
        self.streamed = 0

    def turn(self) -> None:
        victim = self.victim
        victim.start(list(range(self.number, self.number + CHAIN)))  # evicts when it is full
        self.number += CHAIN
        assert victim.store.drain(store_victim.PATIENCE_S)
        victim.finish()  # drops some, and stores some a second time
        self.give_up(victim.index.allocate(2))
        known = [
            (n, slot)
            for n in self.source.sample(range(self.number), min(self.number, 40))
            for slot in victim.index.lookup([key_of(n)]).tolist()
        ]
        if known:
            self.read(known)

    def give_up(self, slots: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        """Blocks that are held and never written."""
        assert len(self.victim.store.reserve_frames(slots, wait=True))
        self.victim.store.abandon(slots)
        self.victim.index.unpin(slots)

    def read(self, known: list[tuple[int, int]]) -> None:
        """A request: its hit is loaded and compared, then its context is streamed."""
        victim, store = self.victim, self.victim.store
        assert isinstance(store, ContextStore)
        slots = np.array([slot for _, slot in known], dtype=np.int64)
        victim.index.pin(slots)
        store.extend_context(REQUEST, 0, slots)
        victim._load([n for n, _ in known], slots)
        store.frames.forget(slots[::2].copy())  # these come from the devices
        stream = store.stream([slots])
        for layer in range(GEOMETRY.layers):
            self.streamed += sum(len(piece.base) for piece in stream.pieces(layer))
        stream.close()
        assert not stream.poisoned
        store.drop_context(REQUEST)
        victim.index.unpin(slots)

    def quiet(self) -> None:
        """Nothing is under way, so that samples can be compared."""
        assert self.victim.store.drain(store_victim.PATIENCE_S)
        assert not self.victim.store.busy()
        assert self.victim.store.frames.count(FrameState.LOADING, FrameState.LOST) == 0


@pytest.mark.slow
@pytest.mark.rounds
def test_memory_is_flat(
    tmp_devices: Callable[[int], list[Path]],
    memory_seconds: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(vars(opening), "Journal", opening.Journal)  # the victim replaces it
    monkeypatch.setattr(store_victim, "say", lambda *_: None)
    before = Sample.take()
    *data, state = tmp_devices(4)
    work = Work(data, state)
    samples: list[Sample] = []
    for _ in range(SAMPLES):
        end = time.monotonic() + memory_seconds / SAMPLES
        while True:
            work.turn()
            if time.monotonic() >= end:
                break
        work.quiet()
        samples.append(Sample.take())
        assert sum(path.stat().st_size for path in state.iterdir()) < STATE_BYTES
    counts = work.victim.index.gauges()
    work.victim.close()
    assert work.streamed > 0
    assert counts["ready"] > 0
    del work

    warm, late = samples[SAMPLES // 3 : 2 * SAMPLES // 3], samples[2 * SAMPLES // 3 :]
    grown = min(s.rss for s in late) - min(s.rss for s in warm)
    assert grown < SPARE_BYTES, [s.rss >> 10 for s in samples]
    # Whoever looks after the manifest has a descriptor and threads more, for a moment.
    # What other tests have left may end at any time.
    assert min(s.descriptors for s in late) <= min(s.descriptors for s in warm)
    assert min(s.threads for s in late) <= min(s.threads for s in warm)

    def given_back() -> bool:
        now = Sample.take()
        return now.descriptors <= before.descriptors and now.threads <= before.threads

    until(given_back, "the return of descriptors and threads")
