"""A process with the tier is killed at any moment: what it told vLLM to be stored is there."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from vllm.config import VllmConfig

from tests.kit.forks import Program
from tests.kit.node import NodeProcess
from tests.kit.waiting import until
from tests.secondary_tier.rig import key_of, running
from vllm_ssdkv.store.maintenance.fsck import examined

Devices = Callable[[int], list[Path]]

VICTIM = Path(__file__).with_name("victim.py")
KILLS = 20
SOAK_KILLS = 200
MOST_JOBS = 40
"""Jobs that end well before a kill, at most."""

NEWEST, OTHERS = 100, 60
"""Chunks of which a start must find the newest, and may find the others."""

UNDER_WAY = 80
"""Chunks whose jobs have not ended, at most: so many slots a kill takes from older ones."""

START_S = 240.0


@dataclass
class Lives:
    """Victims over one store, and what it must hold as far as that is known from outside."""

    settings: Path
    devices: list[Path]
    folder: Path
    source: random.Random
    known: list[int] = field(default_factory=list)
    """Chunks whose jobs have ended well, the oldest first."""
    first: int = 0
    found: int = 0
    lives: int = 0

    def live(self, jobs: int | None) -> None:
        """Run a victim and kill it when so many jobs have ended; None: it ends by itself."""
        self.lives += 1
        log = self.folder / f"{self.lives}.log"
        engine = f"ssdkv-victim-{os.getpid()}"
        task = {
            "settings": str(self.settings),
            "devices": [str(path) for path in self.devices],
            "engine_id": engine,
            "candidates": self._candidates(),
            "first": self.first,
            "stores": jobs is not None,
        }
        program = Program([str(VICTIM), json.dumps(task)], {}, self.folder, log)
        try:
            if jobs is None:
                assert program.wait(START_S) == 0, log.read_text()
            else:
                until(
                    lambda: self._said(log, "D") > jobs or program.poll() is not None,
                    f"{jobs} jobs",
                    START_S,
                )
                assert program.poll() is None, log.read_text()
                os.kill(program.pid, signal.SIGKILL)
                program.wait(START_S)
        finally:
            Path(f"/dev/shm/vllm_offload_{engine}.mmap").unlink(missing_ok=True)
        self._take_in(log)

    def _candidates(self) -> list[int]:
        """The newest chunks, those of jobs that were under way, and some of the others."""
        newest = self.known[-NEWEST:]
        others = self.source.sample(self.known[:-NEWEST], min(OTHERS, len(self.known[:-NEWEST])))
        border = newest[-1] + 1 if newest else 0
        return sorted({*others, *newest, *range(border, border + UNDER_WAY)})

    def _said(self, log: Path, kind: str) -> int:
        return log.read_text().count(f"\n{kind} ") if log.exists() else 0

    def _take_in(self, log: Path) -> None:
        lines = log.read_text().splitlines()
        found = next(set(json.loads(line[2:])) for line in lines if line.startswith("V "))
        self.found += len(found)
        missing = set(self.known[-NEWEST:]) - found
        assert not missing, f"{sorted(missing)}: {log.read_text()[-4000:]}"
        for line in lines:
            if line.startswith("D "):
                self.known += json.loads(line[2:])
        if self.known:
            self.first = max(self.first, self.known[-1] + UNDER_WAY)

    def whole(self) -> None:
        """The store's files are those that they should be, and every slot is right."""
        with examined(self.devices, self.devices[0], write=False) as found:
            assert found.report.bad == 0, found.report.problems


def kill(settings: VllmConfig, devices: list[Path], folder: Path, kills: int, seed: int) -> Lives:
    """Kill victim after victim over one store, then look once more."""
    file = folder / "settings"
    file.write_bytes(pickle.dumps(settings))
    source = random.Random(seed)
    lives = Lives(file, devices, folder, source)
    for _ in range(kills):
        lives.live(source.randint(0, MOST_JOBS))
    lives.live(None)
    lives.whole()
    print(f"{kills} kills, seed {seed}: {lives.found} chunks found")
    return lives


@pytest.mark.slow
def test_a_kill_loses_nothing_that_was_told(
    settings: VllmConfig, tmp_devices: Devices, tmp_path: Path
) -> None:
    assert kill(settings, tmp_devices(2), tmp_path, KILLS, seed=1).found


@pytest.mark.soak
def test_more_kills(settings: VllmConfig, tmp_devices: Devices, tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    assert kill(settings, tmp_devices(2), tmp_path, SOAK_KILLS, seed).found


class Sharers:
    """Engines in processes of their own that store chunks until they are killed."""

    def __init__(self, settings: VllmConfig, folder: Path, node: NodeProcess):
        self._task = {"settings": str(folder / "settings"), "devices": [], "candidates": []}
        (folder / "settings").write_bytes(pickle.dumps(settings))
        options = {"nodes": [node.address], "io": {"deadline": 2.0}}
        self._task |= {"options": options, "pause_s": 0.02, "stores": True}
        self._folder = folder
        self._programs: dict[int, Program] = {}

    def start(self, first: int) -> None:
        engine = f"ssdkv-victim-{os.getpid()}-{first}"
        task = json.dumps({**self._task, "first": first, "engine_id": engine})
        log = self._folder / f"{first}.log"
        self._programs[first] = Program([str(VICTIM), task], {}, self._folder, log)

    def done(self, first: int) -> list[int]:
        """Chunks whose jobs have ended well."""
        log = self._folder / f"{first}.log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [n for line in lines if line.startswith("D ") for n in json.loads(line[2:])]

    def goes_on(self, first: int, chunks: int = 60) -> None:
        """Wait until an engine has stored some more."""
        before = len(self.done(first))
        until(lambda: len(self.done(first)) >= before + chunks, "an engine stores")

    def kill(self, first: int) -> list[int]:
        """Kill an engine; chunks whose jobs had ended well."""
        program = self._programs.pop(first)
        assert program.poll() is None, (self._folder / f"{first}.log").read_text()
        os.kill(program.pid, signal.SIGKILL)
        program.wait(START_S)
        Path(f"/dev/shm/vllm_offload_ssdkv-victim-{os.getpid()}-{first}.mmap").unlink()
        return self.done(first)

    def end(self) -> None:
        for first in list(self._programs):
            self.kill(first)


@pytest.mark.slow
def test_a_kill_of_either_engine_or_of_the_node_loses_nothing(
    settings: VllmConfig, node_place: Path, tmp_path: Path
) -> None:
    """A node that is slow for a while leads to misses, so each is asked for until it is found."""
    with NodeProcess(node_place, store_share=1.0) as node:
        lives = Sharers(settings, tmp_path, node)
        try:
            for first in (0, 100_000):
                lives.start(first)
            for first in (0, 100_000):
                lives.goes_on(first)
            told = lives.kill(0)
            with running(settings, [], nodes=[node.address]) as engine:
                until(lambda: engine.recovered(told) == told, "every chunk")
                lives.goes_on(100_000)
                node.kill()
                keys = [key_of(number) for number in told]
                until(lambda: engine.stored(keys) == set(), "misses")
                node.start()
                until(lambda: len(engine.stored(keys)) == len(keys), "hits")
                until(lambda: engine.recovered(told) == told, "every chunk")
                lives.goes_on(100_000)
                # Some were under way, and were not told as stored: the engine computes them.
                told = lives.kill(100_000)
                newest = told[-NEWEST:]
                until(lambda: engine.recovered(newest) == newest, "the newest chunks")
        finally:
            lives.end()
