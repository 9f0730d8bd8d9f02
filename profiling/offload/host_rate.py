"""Attention of the host's device to frames in DRAM against reading this memory, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout, BlockSource, PartialState, Rows
from vllm_ssdkv.kernels.step_clock import ATTEND, StepClock
from vllm_ssdkv.offload.host import HostDevice
from vllm_ssdkv.offload.protocol import ContextKernels, ContextWork
from vllm_ssdkv.store.memory.arena import Arena

LAYOUT: Final = BlockLayout.unpadded(16, 16, 4, 128, torch.bfloat16)
QUERIES_PER_KV: Final = 1, 4, 8
MEMORY: Final = 256 * MIB
"""Bytes of K and V: more than caches hold."""
TURNS: Final = 7
PATIENCE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class _Frames:
    """A context in frames, for one token. See ``ContextPages``."""

    memory: torch.Tensor
    selection_bytes: int = 0

    @property
    def slots(self) -> NDArray[np.int64]:
        return np.arange(len(self.memory), dtype=np.int64)

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def fold_by(
        self,
        kernels: ContextKernels,
        query: torch.Tensor,
        state: PartialState,
        scale: float,
        clock: StepClock,
        lease: AbstractContextManager[None],
    ) -> None:
        del lease
        ids = self.slots
        end = len(ids) * LAYOUT.block_tokens
        rows = Rows.build([0], [1], [end], [0], [len(ids)])
        source = BlockSource.of_cache(self.memory, ids, ids * LAYOUT.block_tokens)
        kernels.dense.attend(query, state, rows, source, LAYOUT, scale)
        clock.lap(ATTEND)

    def restart(self) -> None:
        pass


def _seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock, and of all CPUs."""
    begun, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - begun, time.process_time() - cpu


def measure_host(threads: int, memory_bytes: int = MEMORY) -> list[dict[str, Any]]:
    """Bytes/s by queries per KV head: of the device, and of reading the same memory.

    Reading is the faster one of a sum and a product with itself by torch, of as many threads.

    Raises:
        BenchError: the device takes more than a minute.
    """
    blocks = memory_bytes // LAYOUT.block_bytes
    arena = Arena(blocks * LAYOUT.block_bytes)
    whole = torch.from_numpy(arena.view(0, arena.nbytes)).view(LAYOUT.dtype)
    memory = whole.view(blocks, LAYOUT.block_bytes // 2).normal_()
    numbers = memory.view(torch.float32).view(-1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    device = HostDevice(threads)

    def attend(queries: int) -> Callable[[], object]:
        query = torch.randn(1, queries * LAYOUT.kv_heads, LAYOUT.head_size).to(LAYOUT.dtype)
        work = ContextWork(query, _Frames(memory), LAYOUT.head_size**-0.5)

        def call() -> None:
            if not device.submit(work).wait(PATIENCE_S):
                raise BenchError(f"attention to {memory_bytes} bytes took {PATIENCE_S:.0f} s")

        return call

    calls: dict[str, Callable[[], object]] = {
        "sum": numbers.sum,
        "dot": lambda: numbers.dot(numbers),
        **{str(queries): attend(queries) for queries in QUERIES_PER_KV},
    }
    try:
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
        for turn in range(TURNS + 1):
            for name, call in calls.items():
                seconds = _seconds(call)
                if turn:  # the first one touches memory and starts threads
                    taken[name].append(seconds)
    finally:
        torch.set_num_threads(before)
        device.close(PATIENCE_S)
    clock, cpu = (
        {name: statistics.median(pair[which] for pair in pairs) for name, pairs in taken.items()}
        for which in range(2)
    )
    read, read_cpu = (min(found["sum"], found["dot"]) for found in (clock, cpu))
    return [
        {
            "threads": threads,
            "queries_per_kv": queries,
            "attended": memory.nbytes / clock[str(queries)],
            "read": memory.nbytes / read,
            "share": read / clock[str(queries)],
            "cpu_share": read_cpu / cpu[str(queries)],
        }
        for queries in QUERIES_PER_KV
    ]
