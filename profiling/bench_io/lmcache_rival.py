"""LMCache's local disk backend: a file per chunk in one directory, read and written by threads."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import numpy as np

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.bench_io.case import Case, Sample
from vllm_ssdkv.profiling.bench_io.clock import Clock
from vllm_ssdkv.profiling.bench_io.files import BenchFile, read_stamps, write_stamps
from vllm_ssdkv.profiling.bench_io.pools import too_many_threads
from vllm_ssdkv.store.io.engines.protocol import Op
from vllm_ssdkv.store.memory.arena import Arena

os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")  # read by the imports below

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_allocators.tensor_memory_allocator import (
    TensorMemoryAllocator,
)
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

_DEADLINE_S = 60.0
_MAX_CHUNKS = 512
_FORMAT = MemoryFormat.KV_2LTD


class LmcacheContender:
    """See :class:`vllm_ssdkv.profiling.bench_io.case.Contender`.

    O_DIRECT and a thread per request in flight; by default LMCache has neither (page cache, 4
    threads). Memory of chunks comes from LMCache's allocator over our arena.
    """

    name = "lmcache"

    def __init__(self, files: Sequence[BenchFile], arena: Arena) -> None:
        self._file = files[0]
        self._arena = arena
        self._stored: dict[int, list[CacheEngineKey]] = {}
        self._fresh = 1 << 32
        direct = "O_DIRECT" if files[0].direct else "page cache"
        self.detail = f"LMCache {version('lmcache')}, {direct}, a thread per request"

    def refuses(self, case: Case) -> str | None:
        """See the protocol."""
        if case.devices > 1:
            return "it uses one directory"
        return too_many_threads(case)

    @contextmanager
    def _backend(self, case: Case) -> Iterator[tuple[LocalCPUBackend, LocalDiskBackend]]:
        folder = self._file.folder / f"lmcache-{case.nbytes}"
        folder.mkdir(exist_ok=True)
        config = LMCacheEngineConfig.from_dict(
            {
                "local_cpu": False,
                "local_disk": str(folder),
                "max_local_disk_size": 1024.0,
                "extra_config": {
                    "use_odirect": self._file.direct,
                    "disk_io_threads": case.in_flight,
                },
            }
        )
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        memory = torch.from_numpy(self._arena.view(0, self._arena.nbytes))
        cpu = LocalCPUBackend(config, memory_allocator=TensorMemoryAllocator(memory))
        disk = LocalDiskBackend(config, loop, cpu, dst_device="cpu")
        try:
            shape = torch.Size([case.nbytes])
            for key in self._stored.get(case.nbytes, []):
                disk.insert_key(key, case.nbytes, shape, torch.uint8, _FORMAT)
            yield cpu, disk
        finally:
            disk.close()
            loop.call_soon_threadsafe(loop.stop)
            thread.join(_DEADLINE_S)

    def _allocate(self, cpu: LocalCPUBackend, nbytes: int) -> Any:  # noqa: ANN401
        chunk = cpu.allocate(torch.Size([nbytes]), torch.uint8, _FORMAT, busy_loop=False)
        if chunk is None:
            raise BenchError(f"{self.name}: its allocator has no {nbytes} bytes left")
        return chunk

    def _put(self, disk: LocalDiskBackend, key: CacheEngineKey, chunk: Any, done: Any) -> None:  # noqa: ANN401
        disk.submit_put_task(key, chunk, on_complete_callback=lambda _key: done.release())

    @staticmethod
    def _stamps(number: int, nbytes: int) -> Any:  # noqa: ANN401
        return np.arange(nbytes // 4096, dtype=np.int64) | (number << 24)

    def _keys(self, case: Case) -> list[CacheEngineKey]:
        """Chunks to load, stored by LMCache when first asked for."""
        if case.nbytes not in self._stored:
            count = min(_MAX_CHUNKS, self._file.region_bytes // case.nbytes)
            keys = [self._key(number) for number in range(count)]
            with self._backend(case) as (cpu, disk):
                for number, key in enumerate(keys):
                    chunk, done = self._allocate(cpu, case.nbytes), threading.Semaphore(0)
                    write_stamps(chunk.tensor.numpy(), self._stamps(number, case.nbytes))
                    self._put(disk, key, chunk, done)
                    if not done.acquire(timeout=_DEADLINE_S):
                        raise BenchError(f"{self.name}: a chunk was not stored")
                    chunk.ref_count_down()
            self._stored[case.nbytes] = keys
        return self._stored[case.nbytes]

    @staticmethod
    def _key(number: int) -> CacheEngineKey:
        return CacheEngineKey("bench", 1, 0, number, torch.uint8)

    def _load(self, disk: LocalDiskBackend, keys: list[CacheEngineKey]) -> list[Any]:
        chunks = disk.batched_get_blocking(keys)
        if any(chunk is None for chunk in chunks):
            raise BenchError(f"{self.name}: a chunk was not loaded")
        return list(chunks)

    def check(self, case: Case) -> None:
        """See the protocol."""
        keys = self._keys(case)[: min(4, case.in_flight)]
        with self._backend(case) as (_cpu, disk):
            for number, chunk in enumerate(self._load(disk, keys)):
                found = read_stamps(chunk.tensor.numpy())
                if (found != self._stamps(number, case.nbytes)).any():
                    raise BenchError(f"{self.name}: chunk {number} holds something else")
                chunk.ref_count_down()

    def run(self, case: Case, seconds: float) -> Sample:
        """See the protocol."""
        try:
            return (self._read if case.op == Op.READ else self._write)(case, seconds)
        except OSError as error:
            raise BenchError(f"{self.name}: {error}") from error

    def _read(self, case: Case, seconds: float) -> Sample:
        keys = self._keys(case)
        random = np.random.default_rng(0)
        rounds = max(1, min(4, self._arena.nbytes // 2 // case.memory_bytes))
        done = 0
        with self._backend(case) as (_cpu, disk), Clock() as clock:
            while clock.elapsed < seconds:
                chosen = random.integers(0, len(keys), case.in_flight * rounds)
                for chunk in self._load(disk, [keys[i] for i in chosen]):
                    chunk.ref_count_down()
                done += len(chosen)
        return clock.sample(done, case.nbytes)

    def _write(self, case: Case, seconds: float) -> Sample:
        room = max(case.in_flight, self._file.region_bytes // case.nbytes)
        done = threading.Semaphore(case.in_flight)
        keys = [self._key(self._fresh + i) for i in range(room)]
        self._fresh += room
        started = 0
        with self._backend(case) as (cpu, disk):
            chunks = [self._allocate(cpu, case.nbytes) for _ in range(case.in_flight)]
            with Clock() as clock:
                while started < room and clock.elapsed < seconds:
                    if not done.acquire(timeout=_DEADLINE_S):
                        raise BenchError(f"{self.name}: a chunk was not stored")
                    self._put(disk, keys[started], chunks[started % len(chunks)], done)
                    started += 1
                for _ in range(case.in_flight):
                    if not done.acquire(timeout=_DEADLINE_S):
                        raise BenchError(f"{self.name}: a chunk was not stored")
            disk.batched_remove(keys[:started])
        return clock.sample(started, case.nbytes)
