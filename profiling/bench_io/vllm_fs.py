"""vLLM's file-system tier: its own functions and thread pool, one file per block.

vLLM makes one job per request, and a thread runs a job block after block, so the queue depth is the
number of requests being loaded. A block is read whole or not at all.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import vllm
from vllm.v1.kv_offload.tiering.fs import io as fs_io
from vllm.v1.kv_offload.tiering.fs.thread_pool import DualQueueThreadPool

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.bench_io.case import Case, Sample
from vllm_ssdkv.profiling.bench_io.clock import Clock
from vllm_ssdkv.profiling.bench_io.files import BenchFile, read_stamps, write_stamps
from vllm_ssdkv.store.io.engines.protocol import Op
from vllm_ssdkv.store.memory.arena import Arena

THREADS = 16
"""vLLM's default: so many that prefer loads, and as many that prefer stores."""

_MAX_FILES = 2048
_JOB_BLOCKS = 16


class VllmFsContender:
    """See :class:`vllm_ssdkv.profiling.bench_io.case.Contender`.

    As many requests at once as the case has in flight, each of 16 blocks. Block files are dealt to
    the devices in turn, which vLLM itself can only do on RAID-0.
    """

    name = "vllm fs"

    def __init__(self, files: Sequence[BenchFile], arena: Arena) -> None:
        self._files = files
        self._view = arena.view(0, arena.nbytes).data
        self._arena = arena
        self._direct = fs_io.probe_o_direct(str(files[0].folder))
        self._stored: dict[tuple[int, int], list[str]] = {}
        self._fresh = itertools.count()
        how = "C loop" if fs_io._HAS_FSIO_C else "Python loop"
        direct = "O_DIRECT" if self._direct else "page cache"
        self.detail = f"vLLM {vllm.__version__}, {how}, {direct}, {THREADS} + {THREADS} threads"

    def refuses(self, case: Case) -> str | None:
        """See the protocol."""
        if case.in_flight > 2 * THREADS:
            return f"{case.in_flight} requests on {2 * THREADS} threads"
        return None

    def _paths(self, case: Case, kind: str, count: int) -> list[str]:
        paths = []
        for n in range(count):
            folder = self._files[n % case.devices].folder / f"vllm-{case.nbytes}"
            folder.mkdir(exist_ok=True)
            paths.append(str(folder / f"{kind}{n}.bin"))
        return paths

    def _blocks(self, case: Case) -> list[str]:
        """Block files to load, made by vLLM's own store when first asked for."""
        key = case.nbytes, case.devices
        if key not in self._stored:
            count = min(_MAX_FILES, self._files[0].region_bytes * case.devices // case.nbytes)
            paths = self._paths(case, f"on{case.devices}-", count)
            for n, path in enumerate(paths):
                self._stamp(n, case.nbytes)
                fs_io.batch_store_block([path], self._view, [0], case.nbytes, self._direct)
            self._stored[key] = paths
        return self._stored[key]

    def _stamp(self, block: int, nbytes: int) -> None:
        pages = np.arange(nbytes // 4096, dtype=np.int64)
        write_stamps(self._arena.view(0, nbytes), pages | (block << 24))

    def _require(self, block: int, nbytes: int, case: Case) -> None:
        pages = np.arange(nbytes // 4096, dtype=np.int64)
        if (read_stamps(self._arena.view(0, nbytes)) != pages | (block << 24)).any():
            raise BenchError(f"{self.name}, {case}: block {block} holds something else")

    def check(self, case: Case) -> None:
        """See the protocol."""
        try:
            for block, path in enumerate(self._blocks(case)[:4]):
                self._arena.view(0, case.nbytes)[:] = 0
                fs_io.batch_load_block([path], self._view, [0], case.nbytes, self._direct)
                self._require(block, case.nbytes, case)
        except OSError as error:
            raise BenchError(f"{self.name}, {case}: {error}") from error

    def run(self, case: Case, seconds: float) -> Sample:
        """See the protocol."""
        jobs = case.in_flight
        offsets = [
            [lane * case.nbytes] * _JOB_BLOCKS for lane in range(jobs)
        ]  # a request's blocks land on its own piece of memory
        if case.op == Op.READ:
            stored = self._blocks(case)
            random = np.random.default_rng(0)

            def paths() -> list[str]:
                return [stored[i] for i in random.integers(0, len(stored), _JOB_BLOCKS)]

            return self._run_jobs(case, seconds, offsets, paths)
        room = max(jobs * _JOB_BLOCKS, self._files[0].region_bytes * case.devices // case.nbytes)
        fresh = self._paths(case, f"new{next(self._fresh)}-", room)
        position = itertools.count(0, _JOB_BLOCKS)

        def new_paths() -> list[str]:
            begin = next(position)
            return fresh[begin : begin + _JOB_BLOCKS]

        try:
            return self._run_jobs(case, seconds, offsets, new_paths)
        finally:
            for path in fresh:
                Path(path).unlink(missing_ok=True)

    def _run_jobs(
        self,
        case: Case,
        seconds: float,
        offsets: list[list[int]],
        paths: Callable[[], list[str]],
    ) -> Sample:
        pool = DualQueueThreadPool(THREADS, THREADS)
        reading = case.op == Op.READ
        call = fs_io.batch_load_block if reading else fs_io.batch_store_block
        enqueue = pool.enqueue_load if reading else pool.enqueue_store
        numbers = itertools.count()
        lock = threading.Lock()
        clock = Clock()
        done = 0

        def start(lane: int) -> None:
            with lock:
                chosen = paths()
            if chosen:
                enqueue(next(numbers), 1, [lambda: job(lane, chosen)])

        def job(lane: int, chosen: list[str]) -> None:
            nonlocal done
            call(chosen, self._view, offsets[lane][: len(chosen)], case.nbytes, self._direct)
            with lock:
                done += len(chosen)
            if clock.elapsed < seconds:
                start(lane)  # the next request of this client

        try:
            with clock:
                for lane in range(len(offsets)):
                    start(lane)
                pool.wait_idle()
            failed = [number for number, well, _seconds in pool.get_finished() if not well]
        finally:
            pool.shutdown()
        if failed:
            raise BenchError(f"{self.name}, {case}: {len(failed)} jobs failed")
        return clock.sample(done, case.nbytes)
