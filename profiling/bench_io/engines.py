"""Our I/O engines, measured at the Python call: batches of flat arrays, two of them in flight."""

from __future__ import annotations

import collections
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from vllm_ssdkv.base.errors import BenchError, EngineUnavailableError
from vllm_ssdkv.config.io_engine import AUTO, ENGINES, EngineKind, EngineOptions, ThrottleRule
from vllm_ssdkv.profiling.bench_io.case import Case, Sample
from vllm_ssdkv.profiling.bench_io.clock import Clock
from vllm_ssdkv.profiling.bench_io.files import BenchFile, require_stamps, write_stamps
from vllm_ssdkv.store.io.engines.open import open_engine
from vllm_ssdkv.store.io.engines.protocol import U16, U32, U64, Batch, IoEngine, Op
from vllm_ssdkv.store.memory.arena import Arena

logger = logging.getLogger(__name__)

DEADLINE_S = 60.0
"""Time limit of a batch, and of an engine's end."""
_NOT_COMPARABLE = {"auto", "noop"}
"""A choice among the others, and one that moves nothing."""


def engine_kinds() -> list[EngineKind]:
    """Every engine that options can name and that moves bytes."""
    kinds = (AUTO, *ENGINES.names())
    return [kind for kind in kinds if kind not in _NOT_COMPARABLE]


def require_results(batch: Batch, length: U32, who: str) -> None:
    """Wait for a batch and check that every request moved all of its bytes.

    Raises:
        BenchError: one did not, or the batch did not end in a minute.
    """
    if not batch.wait(DEADLINE_S):
        raise BenchError(f"{who}: requests did not end within {DEADLINE_S:.0f} s")
    results = batch.results()
    wrong = np.flatnonzero(results != length)
    if wrong.size:
        code = int(results[wrong[0]])
        why = os.strerror(-code) if code < 0 else f"{code} of {length[wrong[0]]} bytes"
        raise BenchError(f"{who}: {wrong.size} requests failed, the first: {why}")


class EngineContender:
    """One engine of ours; see :class:`vllm_ssdkv.profiling.bench_io.case.Contender`.

    Args:
        kind: Which engine.
        files: The devices.
        arena: Memory of all requests, :data:`case.MEMORY_BYTES` or more.
        model: What every device is slowed down to, or nothing.

    Raises:
        EngineUnavailableError: it cannot run here.
        BenchError: it starts, but cannot read a page.
    """

    def __init__(
        self,
        kind: EngineKind,
        files: Sequence[BenchFile],
        arena: Arena,
        model: ThrottleRule | None = None,
    ) -> None:
        self.name = f"ssdkv {kind}"
        self.kind = kind
        self._files = files
        self._arena = arena
        self._model = model
        self._random = np.random.default_rng(0)
        with self._open(1, 1) as engine:
            self.detail = engine.name + (", huge pages" if arena.huge_pages else ", 4 KiB pages")
        self.check(Case(Op.READ, 4096, 1, 1))

    @contextmanager
    def _open(self, depth: int, devices: int) -> Iterator[IoEngine]:
        options = EngineOptions(
            engine=self.kind, queue_depth=depth, throttle=(self._model,) if self._model else ()
        )
        files = self._files[:devices]
        fds, paths = [file.fd for file in files], [file.path for file in files]
        engine = open_engine(options, fds, paths, self._arena)
        try:
            yield engine
        finally:
            if not engine.close(DEADLINE_S):
                logger.error("%s: requests are still in flight", self.name)

    def refuses(self, case: Case) -> str | None:
        """See the protocol."""
        del case
        return None

    def _requests(self, case: Case, count: int) -> tuple[U16, U64, U32, U64]:
        """Random requests, dealt to the devices in turn."""
        places = self._files[0].region_bytes // case.nbytes
        offset = self._random.integers(0, places, count, np.uint64) * np.uint64(case.nbytes)
        offset += np.uint64(self._files[0].begin(case.op))
        index = np.arange(count, dtype=np.uint64)
        return (
            (index % np.uint64(case.devices)).astype(np.uint16),
            offset,
            np.full(count, case.nbytes, np.uint32),
            index % np.uint64(case.in_flight) * np.uint64(case.nbytes),
        )

    def check(self, case: Case) -> None:
        """See the protocol."""
        who = f"{self.name}, {case}"
        device, offset, length, buffer = self._requests(case, case.in_flight)
        pieces = [self._arena.view(int(at), case.nbytes) for at in buffer]
        targets = list(zip((self._files[d] for d in device), map(int, offset), pieces, strict=True))
        with self._open(case.depth, case.devices) as engine:
            if case.op == Op.WRITE:
                for file, at, piece in targets:
                    write_stamps(piece, file.stamps(at, case.nbytes))
                require_results(
                    engine.submit(Op.WRITE, device, offset, length, buffer), length, who
                )
            self._arena.view(0, case.memory_bytes)[:] = 0
            require_results(engine.submit(Op.READ, device, offset, length, buffer), length, who)
        for file, at, piece in targets:
            require_stamps(file, at, piece, who)

    def run(self, case: Case, seconds: float) -> Sample:
        """See the protocol."""
        who = f"{self.name}, {case}"
        requests = 0
        waiting: collections.deque[tuple[Batch, U32]] = collections.deque()
        with self._open(case.depth, case.devices) as engine, Clock() as clock:
            while waiting or clock.elapsed < seconds:
                while len(waiting) < 2 and clock.elapsed < seconds:
                    device, offset, length, buffer = self._requests(case, case.batch_requests)
                    batch = engine.submit(case.op, device, offset, length, buffer)
                    waiting.append((batch, length))
                batch, length = waiting.popleft()
                require_results(batch, length, who)
                requests += length.size
        return clock.sample(requests, case.nbytes)

    def one_batch(
        self, case: Case, requests: int, seconds: float, rest_s: float = 0.0
    ) -> list[float]:
        """Bytes per second of batches, one after the other for so long: each is ``requests``
        requests in one call, to queues that are empty, until the last byte is there. Where they
        need more memory than there is, requests share it. Before each of them there are ``rest_s``
        seconds of rest: a drive, and a processor, that had nothing to do take longer to begin.

        Raises:
            BenchError: as :meth:`run`.
        """
        who = f"{self.name}, {case}"
        places = min(requests, self._arena.nbytes // case.nbytes)
        speeds: list[float] = []
        with self._open(case.depth, case.devices) as engine, Clock() as clock:
            while not speeds or clock.elapsed < seconds:
                device, offset, length, _ = self._requests(case, requests)
                buffer = np.arange(requests, dtype=np.uint64) % np.uint64(places) * length
                time.sleep(rest_s)
                begin = time.perf_counter()
                batch = engine.submit(case.op, device, offset, length, buffer)
                require_results(batch, length, who)
                speeds.append(requests * case.nbytes / (time.perf_counter() - begin))
        return speeds


def engine_contenders(
    files: Sequence[BenchFile], arena: Arena, model: ThrottleRule | None
) -> Iterator[EngineContender | tuple[str, str]]:
    """Every engine; where one cannot run here, its name and the reason instead."""
    for kind in engine_kinds():
        try:
            yield EngineContender(kind, files, arena, model)
        except (EngineUnavailableError, BenchError) as error:
            yield f"ssdkv {kind}", str(error)
