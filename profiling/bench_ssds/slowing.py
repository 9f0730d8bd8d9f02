"""Devices change under a load: how long until the store has all of what they can do then.

One becomes slow in the middle of a load, and later as fast again; one is added between two runs.
Nobody gives the store shares: it has to notice by itself.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.profiling.bench_ssds.live_store import LiveStore, pause
from vllm_ssdkv.profiling.bench_ssds.scenarios import SLOW_FACTOR, UNIT_BYTES
from vllm_ssdkv.profiling.bench_ssds.setup import CAPACITY, Setup
from vllm_ssdkv.profiling.bench_ssds.slots import GEOMETRY
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry

REACHED = 0.9
"""Share of the optimum that counts as having reached it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Size of a load, and the time of each part.

    Attributes:
        geometry: Shape of the slots.
        capacity: Bytes of each device that the store takes.
        dram: Bytes of its memory.
        writes: Slots whose writes are in flight.
        reads: Slots of a request; two are asked for at a time.
        hot: Requests that are read over and over where there is one copy: of the newest slots.
        before_s: With equal devices.
        slow_s: With a slow one; what was written then is read afterwards.
        rest_s: With the slow one, once more.
        again_s: With equal ones again.
        settled_s: After so long everything should have been noticed.
        window_s: Throughput counts if it lasts so long.
    """

    geometry: SlotGeometry = GEOMETRY
    capacity: int = CAPACITY * 3 // 4
    dram: int = 512 * MIB
    writes: int = 192
    reads: int = 256
    hot: int = 3
    before_s: float = 3.0
    slow_s: float = 6.0
    rest_s: float = 5.0
    again_s: float = 8.0
    settled_s: float = 5.0
    window_s: float = 1.0


When = Literal["equal", "one slow", "equal again", "one more"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Course of a load after the devices had changed.

    Attributes:
        load: What was asked of the store.
        when: What the devices are.
        best: Bytes per second that they can do together.
        reached_s: Seconds from the change until :data:`REACHED` of it is had for a second;
            None: never, or nobody looked.
        steady: Share of it that is had in the end.
    """

    load: str
    when: When
    best: float
    reached_s: float | None
    steady: float

    def plain(self) -> dict[str, Any]:
        """Values for JSON."""
        return asdict(self)


class Trace:
    """Bytes moved over time."""

    def __init__(self) -> None:
        self._at: list[float] = []
        self._moved: list[float] = []

    def add(self, at: float, moved: float) -> None:
        """So many bytes in all, so many seconds after the change."""
        self._at.append(at)
        self._moved.append(moved)

    def rate(self, begin: float, end: float) -> float:
        """Bytes per second between two times."""
        low, high = np.interp([begin, end], self._at, self._moved)
        return float(high - low) / (end - begin)

    def reached(self, rate: float, window_s: float) -> float | None:
        """Beginning of the first stretch of so many seconds that had this rate."""
        for at in self._at:
            if at + window_s > self._at[-1]:
                break
            if self.rate(at, at + window_s) >= rate:
                return at
        return None


class _Written:
    """Slots by the time of their writing, in seconds after the change."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.at: list[float] = []

    def add(self, at: float, keys: Sequence[bytes]) -> None:
        self.keys += keys
        self.at += [at] * len(keys)

    def between(self, begin: float, end: float) -> list[bytes]:
        return [k for k, at in zip(self.keys, self.at, strict=True) if begin <= at < end]


def _run(
    store: LiveStore, ask: Callable[[], None], seconds: float, written: _Written | None = None
) -> Trace:
    trace = Trace()
    begin, before = time.monotonic(), store.moved()
    at = 0.0
    while at < seconds:
        keys = store.step()
        ask()
        at = time.monotonic() - begin
        trace.add(at, store.moved() - before)
        if written is not None:
            written.add(at, keys)
        pause()
    return trace


class _Reader:
    """Asks for requests of some slots each, over and over."""

    def __init__(self, store: LiveStore, keys: Sequence[bytes], plan: Plan) -> None:
        self._store = store
        self._parts = [keys[i : i + plan.reads] for i in range(0, len(keys), plan.reads)]
        self._next = 0

    def ask(self) -> None:
        for _ in range(len(self._parts)):
            if self._store.loads >= 2:
                return
            self._store.load(self._parts[self._next % len(self._parts)])
            self._next += 1


def slowing(setup: Setup, plan: Plan | None = None) -> list[Course]:
    """All loads, one store after the other.

    Raises:
        BenchError: an I/O failed, or a device does not take its speed.
    """
    plan = plan or Plan()
    courses: list[Course] = []
    with _store(setup, plan, replicas=1) as store:
        keys = _filled(store, plan)
        courses += _writes(setup, store, plan, keys)
        store.finish()
        keys = [key for key in keys if store.has(key)]
        hot = keys[-plan.hot * plan.reads :]
        courses += _reads(setup, store, plan, hot, "reads of what was there, one copy")
    with _store(setup, plan, replicas=2) as store:
        keys = _filled(store, plan)
        courses += _reads(setup, store, plan, keys, "reads of what was there, two copies")
    return courses + _added(setup, plan)


@contextlib.contextmanager
def _places(setup: Setup) -> Iterator[tuple[list[Path], Path]]:
    """Directories of a store: of its data, on each device, and of its state. Gone at the end."""
    places = setup.directories
    if len(places) == 1:
        places = places * setup.devices
    folders = [place / f"slowing{device}" for device, place in enumerate(places)]
    try:
        with tempfile.TemporaryDirectory(prefix="ssdkv-slowing-") as state:
            yield folders, Path(state)
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _run_of(
    setup: Setup, plan: Plan, folders: Sequence[Path], state: Path, replicas: int = 1
) -> Iterator[LiveStore]:
    """One run of the store with these directories.

    It is a thousand times smaller than a real one, and so are its segments: in the time that
    ``store.json`` waits behind the writes to a virtual SSD, several of them are written.
    """
    store = LiveStore(
        folders,
        plan.geometry,
        state=state,
        capacity=plan.capacity,
        dram=plan.dram,
        replicas=replicas,
        throttle=setup.rules,
    )
    try:
        yield store
    finally:
        store.close()


@contextlib.contextmanager
def _store(setup: Setup, plan: Plan, replicas: int) -> Iterator[LiveStore]:
    """A store over all devices, gone at the end."""
    with (
        _places(setup) as (folders, state),
        _run_of(setup, plan, folders, state, replicas) as store,
    ):
        yield store


@contextlib.contextmanager
def _slow(setup: Setup, store: LiveStore) -> Iterator[None]:
    with setup.slow(setup.devices - 1, SLOW_FACTOR):
        store.obey(setup.rules)
        yield
    store.obey(setup.rules)


def _filled(store: LiveStore, plan: Plan) -> list[bytes]:
    """Keys of a store that is full, in the order of writing."""
    keys: list[bytes] = []
    while len(keys) < store.slots:
        store.store(min(plan.writes, store.slots - len(keys)))
        pause()
        keys += store.step()
    return keys


def _course(
    load: str,
    when: When,
    setup: Setup,
    plan: Plan,
    trace: Trace,
    end: float,
    devices: int | None = None,
) -> Course:
    best = setup.sum_of_devices(UNIT_BYTES, devices)
    begin = min(plan.settled_s, end / 2)
    reached = trace.reached(REACHED * best, plan.window_s)
    steady = trace.rate(begin, end) / best
    return Course(load=load, when=when, best=best, reached_s=reached, steady=steady)


def _writes(setup: Setup, store: LiveStore, plan: Plan, keys: list[bytes]) -> list[Course]:
    """Writes of new slots into a full store, and reads of what was written since."""

    def ask() -> None:
        store.store(plan.writes)

    trace = _run(store, ask, plan.before_s)
    courses = [_course("writes", "equal", setup, plan, trace, plan.before_s)]
    with _slow(setup, store):
        written = _Written()
        trace = _run(store, ask, plan.slow_s, written)
        slow = _course("writes", "one slow", setup, plan, trace, plan.slow_s)
        store.finish()
        courses.append(_read_back(setup, store, plan, written))
        rest = _run(store, ask, plan.rest_s, written)
        steady = rest.rate(0.0, plan.rest_s) / slow.best
        courses.insert(1, Course(**{**slow.plain(), "steady": steady}))
    keys += written.keys
    written = _Written()
    trace = _run(store, ask, plan.again_s, written)
    courses.append(_course("writes", "equal again", setup, plan, trace, plan.again_s))
    keys += written.keys
    return courses


def _read_back(setup: Setup, store: LiveStore, plan: Plan, written: _Written) -> Course:
    """Read back what was written in each second since the change, and measure how fast."""
    best = setup.sum_of_devices(UNIT_BYTES)
    step = plan.window_s
    found: list[tuple[float, float, float]] = []
    for at in np.arange(0.0, plan.slow_s, step).tolist():
        keys = [k for k in written.between(at, at + step) if store.has(k)][-2 * plan.reads :]
        if keys:
            begin, before = time.monotonic(), store.moved()
            store.load(keys)
            store.finish()
            found.append((at, store.moved() - before, time.monotonic() - begin))

    def since(begin: float) -> float:
        """Share of the best rate at which all that was written after this is read."""
        late = [(moved, took) for at, moved, took in found if at >= begin]
        moved, took = (sum(column) for column in zip(*late, strict=True)) if late else (0.0, 1.0)
        return float(moved / took / best)

    return Course(
        load="reads of what was written since",
        when="one slow",
        best=best,
        reached_s=next((at for at, _, _ in found if since(at) >= REACHED), None),
        steady=since(min(plan.settled_s, plan.slow_s / 2)),
    )


def _reads(
    setup: Setup, store: LiveStore, plan: Plan, keys: Sequence[bytes], load: str
) -> list[Course]:
    reader = _Reader(store, keys, plan)
    trace = _run(store, reader.ask, plan.before_s)
    courses = [_course(load, "equal", setup, plan, trace, plan.before_s)]
    seconds = plan.slow_s + plan.rest_s
    with _slow(setup, store):
        trace = _run(store, reader.ask, seconds)
        courses.append(_course(load, "one slow", setup, plan, trace, seconds))
    trace = _run(store, reader.ask, plan.again_s)
    courses.append(_course(load, "equal again", setup, plan, trace, plan.again_s))
    store.finish()
    return courses


def _added(setup: Setup, plan: Plan) -> list[Course]:
    """Two devices are full; the next run has a third one."""
    load, devices = "reads of what was there, a drive is added", min(2, setup.devices - 1)
    with _places(setup) as (folders, state):
        with _run_of(setup, plan, folders[:devices], state) as store:
            keys = _filled(store, plan)
            store.finish()
            hot = keys[-plan.hot * plan.reads :]
            trace = _run(store, _Reader(store, hot, plan).ask, plan.before_s)
            store.finish()
        courses = [_course(load, "equal", setup, plan, trace, plan.before_s, devices)]
        seconds = plan.slow_s + plan.rest_s + plan.again_s
        with _run_of(setup, plan, folders[: devices + 1], state) as store:
            trace = _run(store, _Reader(store, hot, plan).ask, seconds)
            store.finish()
        course = _course(load, "one more", setup, plan, trace, seconds, devices + 1)
        # Most of the run is the change itself.
        begin = max(seconds / 2, seconds - plan.settled_s)
        steady = trace.rate(begin, seconds) / course.best
        courses.append(replace(course, steady=steady))
    return courses
