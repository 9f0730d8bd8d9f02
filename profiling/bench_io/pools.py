"""Naive contenders: Python threads that call preadv and pwritev."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.bench_io.case import Case, Sample
from vllm_ssdkv.profiling.bench_io.clock import Clock
from vllm_ssdkv.profiling.bench_io.files import BenchFile, require_stamps, write_stamps
from vllm_ssdkv.store.io.engines.protocol import Op
from vllm_ssdkv.store.memory.arena import Arena

MAX_THREADS = 128
_OFFSETS = 4096
"""Random offsets per thread, made before the clock starts and used in turn."""


class Lanes:
    """One lane per request in flight: its file, its piece of the arena, and its offsets.

    Args:
        case: What is measured.
        files: The devices.
        arena: Memory of all requests.
    """

    def __init__(self, case: Case, files: Sequence[BenchFile], arena: Arena) -> None:
        random = np.random.default_rng(0)
        self.nbytes = case.nbytes
        self.op = case.op
        self.files = [files[lane % case.devices] for lane in range(case.in_flight)]
        self.pieces = [
            arena.view(lane * case.nbytes, case.nbytes) for lane in range(case.in_flight)
        ]
        places = files[0].region_bytes // case.nbytes
        begin = files[0].begin(case.op)
        self.offsets: list[list[int]] = [
            (random.integers(0, places, _OFFSETS) * case.nbytes + begin).tolist()
            for _ in range(case.in_flight)
        ]

    def __len__(self) -> int:
        return len(self.files)

    def transfer(self, lane: int, turn: int) -> None:
        """One I/O of a lane with preadv or pwritev. Blocks.

        Raises:
            OSError: it failed.
            BenchError: it was cut short.
        """
        offset = self.offsets[lane][turn % _OFFSETS]
        call = os.preadv if self.op == Op.READ else os.pwritev
        require_whole(call(self.files[lane].fd, [self.pieces[lane].data], offset), self.nbytes)

    def stamp(self) -> None:
        """Put into every piece what belongs at the lane's first offset, or nothing for reads."""
        for lane in range(len(self)):
            self.pieces[lane][:] = 0
            if self.op == Op.WRITE:
                stamps = self.files[lane].stamps(self.offsets[lane][0], self.nbytes)
                write_stamps(self.pieces[lane], stamps)

    def require(self, who: str) -> None:
        """Check what every lane's first I/O brought, or what it left in the file.

        Raises:
            BenchError: it is wrong.
        """
        for lane in range(len(self)):
            piece, offset = self.pieces[lane], self.offsets[lane][0]
            if self.op == Op.WRITE:
                piece[:] = 0
                require_whole(os.preadv(self.files[lane].fd, [piece.data], offset), self.nbytes)
            require_stamps(self.files[lane], offset, piece, who)


def require_whole(done: int, nbytes: int) -> None:
    """Check the number of bytes an I/O moved.

    Raises:
        BenchError: there are fewer than asked for.
    """
    if done != nbytes:
        raise BenchError(f"only {done} of {nbytes} bytes were moved")


def too_many_threads(case: Case) -> str | None:
    """Reason against a thread per request in flight, or None."""
    if case.in_flight > MAX_THREADS:
        return f"{case.in_flight} threads, more than {MAX_THREADS}"
    return None


class _PoolContender:
    def __init__(self, files: Sequence[BenchFile], arena: Arena) -> None:
        self._files = files
        self._arena = arena

    def refuses(self, case: Case) -> str | None:
        """See the protocol."""
        return too_many_threads(case)

    def check(self, case: Case) -> None:
        """See the protocol."""
        lanes = Lanes(case, self._files, self._arena)
        lanes.stamp()
        try:
            for lane in range(len(lanes)):
                lanes.transfer(lane, 0)
        except OSError as error:
            raise BenchError(f"{case}: {error.strerror}") from error
        lanes.require(str(case))


class ThreadContender(_PoolContender):
    """One task per thread, which does its I/Os one after the other: the best that Python can do."""

    name = "preadv threads"
    detail = "one Python thread per request in flight, each in its own loop"

    def run(self, case: Case, seconds: float) -> Sample:
        """See :class:`vllm_ssdkv.profiling.bench_io.case.Contender`."""
        lanes = Lanes(case, self._files, self._arena)
        return run_lanes(case, seconds, lanes, lanes.transfer)


def run_lanes(
    case: Case, seconds: float, lanes: Lanes, transfer: Callable[[int, int], None]
) -> Sample:
    """A thread per lane calls ``transfer(lane, turn)`` until the time is over.

    Raises:
        BenchError: a call failed.
    """
    done = [0] * len(lanes)
    errors: list[Exception] = []
    start = threading.Barrier(len(lanes) + 1)
    clock = Clock()

    def loop(lane: int) -> None:
        start.wait()
        turn = 0
        try:
            while clock.elapsed < seconds and not errors:
                transfer(lane, turn)
                turn += 1
        except (OSError, BenchError) as error:
            errors.append(error)
        done[lane] = turn

    threads = [threading.Thread(target=loop, args=(n,), daemon=True) for n in range(len(lanes))]
    for thread in threads:
        thread.start()
    with clock:
        start.wait()
        for thread in threads:
            thread.join()
    if errors:
        raise BenchError(f"{case}: {errors[0]}") from errors[0]
    return clock.sample(sum(done), case.nbytes)


class MapContender(_PoolContender):
    """``ThreadPoolExecutor.map`` with one task per I/O."""

    name = "executor map"
    detail = "ThreadPoolExecutor.map, a thread per request in flight, a task per I/O"

    def run(self, case: Case, seconds: float) -> Sample:
        """See :class:`vllm_ssdkv.profiling.bench_io.case.Contender`."""
        lanes = Lanes(case, self._files, self._arena)
        count = len(lanes) * 8
        requests = 0
        with ThreadPoolExecutor(len(lanes)) as pool:
            list(pool.map(lambda _lane: None, range(len(lanes))))  # start the threads
            with Clock() as clock:
                while clock.elapsed < seconds:
                    tasks = range(requests, requests + count)
                    try:
                        for _ in pool.map(
                            lambda i: lanes.transfer(i % len(lanes), i // len(lanes)), tasks
                        ):
                            requests += 1
                    except OSError as error:
                        raise BenchError(f"{case}: {error.strerror}") from error
        return clock.sample(requests, case.nbytes)
