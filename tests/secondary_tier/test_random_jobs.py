"""Random jobs through vLLM's manager, against a plain model of what may be found."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.v1.kv_offload.base import OffloadKey

from tests.secondary_tier.rig import Engine, key_of

Devices = Callable[[int], list[Path]]

JOBS = 1_000
SOAK_JOBS = 10_000
KEYS = 1_500
SLOTS_KEPT = 300
"""The store has more slots than this: chunks that were used so lately are found."""


class Play:
    """An engine, and what is known of its store from outside.

    Attributes:
        known: Chunks that were stored or found, the latest last.
        lasting: Chunks that a later start may find.
        replayed: Chunks that the events say are stored.
    """

    def __init__(self, settings: VllmConfig, devices: list[Path], seed: int):
        self.settings, self.devices = settings, devices
        self.random = random.Random(seed)
        self.known: OrderedDict[OffloadKey, None] = OrderedDict()
        self.replayed: set[OffloadKey] = set()
        self.lasting: set[OffloadKey] = set()
        self.jobs = self.loaded = 0
        self.engine = self._start()

    def _start(self) -> Engine:
        return Engine(self.settings, self.devices, chunks=48, enable_kv_events=True)

    def keys(self, most: int = 8) -> list[OffloadKey]:
        return [key_of(n) for n in self.random.sample(range(KEYS), self.random.randint(1, most))]

    def store(self) -> None:
        context = self.engine.begin()
        keys = self.keys()
        taken = self.engine.store(keys, context)
        self.engine.settle()
        self._used(taken)
        self.engine.end(context)

    def _used(self, keys: list[OffloadKey]) -> None:
        for key in keys:
            self.known.pop(key, None)
            self.known[key] = None
        if not self.engine.weights:
            self.lasting.update(keys)

    def load(self) -> None:
        recent = list(self.known)[-SLOTS_KEPT:]
        self.engine.empty_pool()
        if not recent:
            return
        keys = self.random.sample(recent, min(len(recent), self.random.randint(1, 8)))
        context = self.engine.begin()
        assert self.engine.looked_up(keys, context) == keys
        self.loaded += len(keys)
        self._used(keys)
        self.engine.end(context)

    def look(self) -> None:
        """Whatever is found was stored, since the last reset."""
        keys = self.keys(32)
        context = self.engine.begin()
        for position in self.engine.stored(keys, context):
            assert keys[position] in self.known
        self.engine.end(context)

    def adapter(self) -> None:
        """A request with an adapter finds nothing, and stores nothing."""
        self.engine.empty_pool()
        context = self.engine.begin(lora=LoRARequest("an adapter", 1, "/none"))
        before = self.engine.stored([key_of(n) for n in range(KEYS)])
        assert self.engine.looked_up(list(self.known)[-8:], context) == []
        self.engine.store([key_of(n) for n in self.random.sample(range(KEYS), 4)], context)
        self.engine.settle()
        assert self.engine.stored([key_of(n) for n in range(KEYS)]) == before
        self.engine.empty_pool()
        self.engine.end(context)

    def reset(self) -> None:
        """vLLM resets its cache, perhaps for other weights, with jobs under way."""
        context = self.engine.begin()
        taken = self.engine.store(self.keys(), context)
        if not self.engine.weights:
            self.lasting.update(taken)
        self.engine.reset()
        self.engine.weights += 1
        self.known.clear()
        self.engine.end(context)
        assert self.engine.stored([key_of(n) for n in range(KEYS)]) == set()

    def restart(self) -> None:
        """Restart: chunks of a lasting identity are found again, and none of another one."""
        self.engine.close()
        weights = self.engine.weights
        self.engine = self._start()
        self.replayed = set()
        found = [key_of(n) for n in sorted(self.engine.stored([key_of(n) for n in range(KEYS)]))]
        assert self.lasting.issuperset(found)
        if weights:  # others have taken the place of some
            self.known.clear()
            context = self.engine.begin()
            for at in range(0, len(found), 16):
                part = found[at : at + 16]
                assert self.engine.looked_up(part, context) == part
                self._used(part)
            self.engine.end(context)

    def replay(self) -> None:
        for event in self.engine.events():
            (self.replayed.difference_update if event.removed else self.replayed.update)(event.keys)
        assert self.engine.stored([key_of(n) for n in range(KEYS)]) == {
            n for n in range(KEYS) if key_of(n) in self.replayed
        }

    def step(self, number: int) -> None:
        chosen = self.random.choices(
            [self.store, self.load, self.look, self.adapter, self.reset, self.restart],
            [60, 30, 5, 2, 0.3, 0.5],
        )[0]
        chosen()
        if number % 20 == 0:
            self.replay()


def play(settings: VllmConfig, devices: list[Path], jobs: int, seed: int) -> Play:
    game = Play(settings, devices, seed)
    for number in range(jobs):
        game.step(number)
    game.engine.close()
    print(f"{jobs} jobs, seed {seed}: {game.loaded} chunks loaded")
    return game


def test_random_jobs_find_what_they_may(settings: VllmConfig, tmp_devices: Devices) -> None:
    assert play(settings, tmp_devices(2), JOBS, seed=1).loaded > JOBS // 4


@pytest.mark.soak
def test_more_random_jobs(settings: VllmConfig, tmp_devices: Devices) -> None:
    assert play(settings, tmp_devices(2), SOAK_JOBS, random.randrange(1 << 30)).loaded
