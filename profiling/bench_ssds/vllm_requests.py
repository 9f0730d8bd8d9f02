"""The same requests through vLLM's file-system tier: a file per block, a job per request."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from vllm.v1.kv_offload.tiering.fs import io as fs_io
from vllm.v1.kv_offload.tiering.fs.thread_pool import DualQueueThreadPool

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.bench_io.case import Sample
from vllm_ssdkv.profiling.bench_io.clock import Clock
from vllm_ssdkv.profiling.bench_io.files import read_stamps, write_stamps
from vllm_ssdkv.profiling.bench_io.vllm_fs import THREADS
from vllm_ssdkv.store.io.engines.protocol import Op
from vllm_ssdkv.store.memory.arena import Arena


class VllmRequests:
    """Loads and stores of blocks with vLLM's own functions and thread pool.

    Args:
        folder: Where block files are made; on one device, or on RAID-0.
        blocks: Number of blocks, stored before anything is measured.
        nbytes: Size of a block in bytes.
        arena: Memory; requests share it in turn.

    Raises:
        BenchError: a block could not be stored.
    """

    def __init__(self, folder: Path, blocks: int, nbytes: int, arena: Arena) -> None:
        self._folder = folder
        self._nbytes = nbytes
        self._arena = arena
        self._view = arena.view(0, arena.nbytes).data
        self._fresh = itertools.count()
        folder.mkdir()
        self._direct = fs_io.probe_o_direct(str(folder))
        self._paths = [str(folder / f"{block}.bin") for block in range(blocks)]
        try:
            for block, path in enumerate(self._paths):
                write_stamps(arena.view(0, nbytes), self._stamps(block))
                fs_io.batch_store_block([path], self._view, [0], nbytes, self._direct)
        except OSError as error:
            raise BenchError(f"vLLM fs: {error}") from error

    def _stamps(self, block: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.arange(self._nbytes // 4096, dtype=np.int64) | (block << 24)

    def check(self, blocks: Sequence[int]) -> None:
        """Load the blocks and compare each page with what was stored.

        Raises:
            BenchError: a page is not what was stored.
        """
        self.run(Op.READ, [blocks])
        for place, block in enumerate(blocks):
            data = self._arena.view(place * self._nbytes, self._nbytes)
            if (read_stamps(data) != self._stamps(block)).any():
                raise BenchError(f"vLLM fs: block {block} holds something else")

    def run(self, op: Op, requests: Sequence[Sequence[int]]) -> Sample:
        """All requests at once, a job each, until the last has ended; stores make new files.

        Raises:
            BenchError: a job failed.
        """
        reading = op == Op.READ
        call = fs_io.batch_load_block if reading else fs_io.batch_store_block
        places = self._arena.nbytes // self._nbytes
        tasks, made = [], []
        for index, blocks in enumerate(requests):
            offsets = [
                (index * len(blocks) + i) % places * self._nbytes for i in range(len(blocks))
            ]
            if reading:
                paths = [self._paths[block] for block in blocks]
            else:
                paths = [str(self._folder / f"new{next(self._fresh)}.bin") for _ in blocks]
                made += paths
            arguments = (paths, self._view, offsets, self._nbytes, self._direct)
            tasks.append(functools.partial(call, *arguments))
        pool = DualQueueThreadPool(THREADS, THREADS)
        enqueue = pool.enqueue_load if reading else pool.enqueue_store
        try:
            with Clock() as clock:
                for job, task in enumerate(tasks):
                    enqueue(job, 1, [task])
                pool.wait_idle()
            failed = [job for job, well, _seconds in pool.get_finished() if not well]
        finally:
            pool.shutdown()
            for path in made:
                Path(path).unlink(missing_ok=True)
        if failed:
            raise BenchError(f"vLLM fs: {len(failed)} of {len(requests)} requests failed")
        return clock.sample(sum(map(len, requests)), self._nbytes)
