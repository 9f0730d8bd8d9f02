"""vLLM is killed in the middle of a batch, again and again: the next one gives the same tokens.

All engines use the same directories. Each is killed with its whole process group at a random
moment and checks, with its first batches, what the one before had just stored. Two of three
have the host attend to contexts near storage, and store a share of them as X, of which a slot
holds two blocks; neither changes a token. ``ssdkv fsck`` finds nothing wrong in between.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.e2e.models import make_llama, prompts
from tests.e2e.workload import SMALL_DRAM, kv_tokens, page_mode
from vllm_ssdkv.cli.main import app

ZYGOTE = Path(__file__).with_name("zygote.py")
ROUNDS = 10
LONGEST_RUN_S = 2.0
DEADLINE_S = 180.0
"""For any single event; a start takes seconds, the first import of vLLM half a minute."""

WINDOW, CHUNK, BLOCK = 64, 256, 32
NEAR = {"kind": "host", "threads": 1, "share": 1.0, "x_share": 0.5}
"""The option ``offload`` of the first engine, not of the second, of the third, and so on."""
BATCH = 3
LENGTHS = (1500, 1200, 900, 700, 400, 200)


def conversations() -> list[list[int]]:
    """Prompts of many lengths, some of which begin alike. Together they exceed the store."""
    bases = prompts(LENGTHS, seed=31) + prompts(LENGTHS, seed=32)
    tails = prompts([97] * len(bases), seed=33)
    return [*bases, *(b[: len(b) // 2] + t for b, t in zip(bases, tails, strict=True))]


PROMPTS = conversations()


class Zygote:
    """The process that forks engines."""

    def __init__(self, model: Path, log: Path):
        self.model = model
        self.log = log
        self._file = log.open("w")
        self._process = subprocess.Popen(
            [sys.executable, str(ZYGOTE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._file,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        )
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.group: int | None = None
        """Process group of the engine that runs now."""
        self.busy = False
        """The zygote has a task, and reads no other: a second one would wait in the pipe."""
        threading.Thread(target=self._listen, daemon=True).start()
        self.wait("imported")

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._events.put(json.loads(line))
        self._events.put({"event": "ended", "code": "the zygote is gone"})

    def next(self, timeout_s: float = DEADLINE_S) -> dict[str, Any]:
        """The next event.

        Raises:
            queue.Empty: none came in time.
        """
        event = self._events.get(timeout=timeout_s)
        if event["event"] == "started":
            self.group = event["pid"]
        elif event["event"] == "ended":
            self.group, self.busy = None, False
        return event

    def wait(self, name: str) -> dict[str, Any]:
        """Wait for an event; others before it are dropped, but the end of the engine is not."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            event = self.next(max(0.0, deadline - time.monotonic()))
            if event["event"] == name:
                return event
            assert event["event"] != "ended", f"no {name}: {event}\n{self.tail()}"

    def start(self, ssdkv: dict[str, object] | None, **task: object) -> None:
        """Have an engine started, when the one before has ended."""
        assert self._process.stdin is not None
        assert not self.busy
        full = {
            "model": str(self.model),
            "ssdkv": ssdkv,
            "prompts": PROMPTS,
            "reference": None,
            "first": [],
            "held": [],
            "batches": 0,
            "batch_size": BATCH,
            "seed": 0,
            "options": {
                "kv_tokens": 32768 if ssdkv is None else BATCH * kv_tokens(WINDOW, CHUNK),
                "max_model_len": 2048,
                "max_num_batched_tokens": CHUNK,
                "max_num_seqs": BATCH,
            },
            **task,
        }
        self.busy = True
        self._process.stdin.write(json.dumps(full) + "\n")
        self._process.stdin.flush()

    def kill_engine(self) -> None:
        """End the engine that runs, and everything that it started, without a warning."""
        if self.group is not None:
            with contextlib.suppress(ProcessLookupError):  # it ended; the event says how
                os.killpg(self.group, signal.SIGKILL)

    def end_engine(self) -> None:
        """Kill the engine that a failed test has left, and wait for its end."""
        while self.busy:
            self.kill_engine()
            self.next()

    def tail(self) -> str:
        """The last lines of the log, for messages of failed tests."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-60:])

    def close(self) -> None:
        """End everything."""
        self.kill_engine()
        self._process.kill()
        self._process.wait(DEADLINE_S)
        self._file.close()


@dataclass
class Killed:
    """Engines over one store, killed one after the other."""

    zygote: Zygote
    ssdkv: dict[str, object]
    reference: list[list[int]]
    source: random.Random
    last: list[list[int]] = field(default_factory=list)
    """The batch that was answered last and the one that was interrupted by the kill."""
    right: int = 0
    hits: int = 0
    """Tokens of first batches that an engine did not have to compute."""
    recovered: list[int] = field(default_factory=list)
    """Blocks that each engine found when it started."""
    evicted: float = 0
    """Blocks that the last engine gave up."""
    tickets: float = 0
    """Pieces of work of the devices near storage."""
    as_x: float = 0
    """Requests that were stored as X."""

    def round(self, delay_s: float, *, early: bool) -> None:
        """An engine that is killed after its first batches were right, or (early) during them."""
        self._start(batches=None)
        if not early:
            for position, _ in enumerate(self.last):
                event = self.zygote.wait("right")
                self._take(event, [])
                cached = event["cached"]
                self.hits += cached if position == 0 else 0
        asked: list[list[int]] = []
        while not (early or asked):  # a slow machine comes to more than that, too
            self._take(self.zygote.wait("asked"), asked)
        deadline = time.monotonic() + delay_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                event = self.zygote.next(left)
            except queue.Empty:
                break
            assert event["event"] != "ended", f"{event}\n{self.zygote.tail()}"
            self._take(event, asked)
        self.zygote.kill_engine()
        end: dict[str, Any] = {}
        while end.get("event") != "ended":
            end = self.zygote.next()
            self._take(end, asked)
        assert end["code"] == -signal.SIGKILL, f"{end}\n{self.zygote.tail()}"
        if not early and asked:
            self.last = asked[-2:]

    def end(self) -> dict[str, Any]:
        """An engine that nobody kills; its gauges and counters."""
        self._start(batches=4)
        numbers: dict[str, Any] = {}
        while (event := self.zygote.next())["event"] != "ended":
            self._take(event, [])
            if event["event"] == "numbers":
                numbers = event
        assert event["code"] == 0, f"{event}\n{self.zygote.tail()}"
        return numbers

    def between_writes(self, held: list[int]) -> None:
        """An engine that is killed while it decodes these prompts, of which every full block is
        durable and no other: the next one finds each of them."""
        self._start(batches=0, held=held)
        event = self.zygote.wait("held")
        assert event["tickets"] > 0
        self.zygote.kill_engine()
        assert self.zygote.wait("ended")["code"] == -signal.SIGKILL
        self.last = [held]
        self.end()
        assert self.recovered[-1] == event["ready"]

    def _start(self, batches: int | None, held: Sequence[int] = ()) -> None:
        near = {"offload": NEAR} if len(self.recovered) % 3 != 1 else {}
        self.zygote.start(
            {**self.ssdkv, **near},
            first=self.last,
            held=held,
            reference=self.reference,
            batches=batches,
            seed=self.source.randrange(1 << 30),
        )
        ready = self.zygote.wait("ready")
        slots = ready["slots"]
        assert slots["free"] + slots["ready"] == slots["total"], slots
        assert slots["pinned"] == slots["writing"] == slots["reserved"] == 0, slots
        self.recovered.append(slots["ready"])

    def _take(self, event: dict[str, Any], asked: list[list[int]]) -> None:
        if event["event"] == "asked":
            asked.append(event["batch"])
        elif event["event"] == "right":
            self.right += 1
            self.tickets += event["tickets"]
            self.as_x += event["as_x"]


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    root = tmp_path_factory.mktemp("zygote")
    model = make_llama(root / "llama", layers=2, heads=4, kv_heads=2, head_dim=128, hidden=128)
    found = Zygote(model, root / "log")
    yield found
    found.close()


@pytest.fixture(autouse=True)
def no_engine_stays(zygote: Zygote) -> Iterator[None]:
    """Every test ends its engine, whatever happens."""
    yield
    zygote.end_engine()


@pytest.fixture(scope="module")
def reference(zygote: Zygote) -> list[list[int]]:
    """Answers of stock vLLM."""
    zygote.start(None, first=[list(range(len(PROMPTS)))])
    answers = zygote.wait("answers")
    zygote.wait("ended")
    found: list[list[int]] = answers["tokens"]
    return found


def page_options(devices: list[Path], capacity: str) -> dict[str, object]:
    """Options of all engines over these directories."""
    places = [{"path": str(path), "capacity": capacity, "weight": 1} for path in devices]
    return page_mode(places, window=WINDOW, dram=SMALL_DRAM)


def kill(
    zygote: Zygote, reference: list[list[int]], devices: list[Path], rounds: int, seed: int
) -> Killed:
    """Kill engines over one store; the last one ends properly and must have lost no slot."""
    source = random.Random(seed)
    killed = Killed(zygote, page_options(devices, "16MiB"), reference, source)
    for number in range(rounds):
        killed.round(source.uniform(0.0, LONGEST_RUN_S), early=number % 4 == 3)
        checked = CliRunner().invoke(app, ["fsck", *map(str, devices)])
        assert checked.exit_code == 0, checked.output
    numbers = killed.end()
    slots = numbers["slots_total"]
    assert numbers["slots_free"] + numbers["slots_ready"] == slots, numbers
    assert numbers["slots_pinned"] == 0
    for name in ("checksum_failures", "header_mismatches", "load_failures", "slots_dropped"):
        assert numbers[name] == 0, numbers
    killed.evicted = numbers["slots_evicted"]
    return killed


@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_a_killed_engine_starts_again_with_the_same_answers(
    zygote: Zygote, reference: list[list[int]], tmp_devices: Callable[[int], list[Path]]
) -> None:
    killed = kill(zygote, reference, tmp_devices(2), ROUNDS, seed=1)
    # The rounds were as eventful as they are meant to be.
    assert killed.right > ROUNDS
    assert killed.hits > 100 * ROUNDS
    assert killed.evicted > 0
    assert min(killed.tickets, killed.as_x) > 0
    assert killed.recovered[0] == 0
    assert min(killed.recovered[2:]) > 0
    assert len(set(map(tuple, reference))) == len(PROMPTS)


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_a_kill_between_two_writes_loses_nothing_durable(
    zygote: Zygote, reference: list[list[int]], tmp_devices: Callable[[int], list[Path]]
) -> None:
    options = page_options(tmp_devices(2), "32MiB")
    Killed(zygote, options, reference, random.Random(2)).between_writes([0, 2, 4])


@pytest.mark.engine
@pytest.mark.soak
@pytest.mark.timeout(14400)
def test_kills_of_an_engine(
    zygote: Zygote,
    reference: list[list[int]],
    tmp_devices: Callable[[int], list[Path]],
    soak_rounds: int,
) -> None:
    seed = random.randrange(1 << 30)
    killed = kill(zygote, reference, tmp_devices(2), soak_rounds, seed)
    assert killed.right > 0
