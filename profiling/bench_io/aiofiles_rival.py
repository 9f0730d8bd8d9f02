"""aiofiles: an event loop in front of a thread pool."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from importlib.metadata import version

import aiofiles

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.bench_io.case import Case, Sample
from vllm_ssdkv.profiling.bench_io.clock import Clock
from vllm_ssdkv.profiling.bench_io.files import BenchFile
from vllm_ssdkv.profiling.bench_io.pools import Lanes, require_whole, too_many_threads
from vllm_ssdkv.store.io.engines.protocol import Op
from vllm_ssdkv.store.memory.arena import Arena


class AiofilesContender:
    """One coroutine per request in flight, each with its own file object, O_DIRECT, no buffering.

    See :class:`vllm_ssdkv.profiling.bench_io.case.Contender`.
    """

    name = "aiofiles"

    def __init__(self, files: Sequence[BenchFile], arena: Arena) -> None:
        self._files = files
        self._arena = arena
        self.detail = f"aiofiles {version('aiofiles')}, a coroutine and thread per request"

    def refuses(self, case: Case) -> str | None:
        """See the protocol."""
        return too_many_threads(case)

    async def _run(self, lanes: Lanes, seconds: float, turns: int | None) -> tuple[Clock, int]:
        """Until the time is over, or ``turns`` I/Os of every lane."""
        flags = os.O_DIRECT if self._files[0].direct else 0

        def direct(path: str, mode: int) -> int:
            return os.open(path, mode | flags)

        done = 0
        clock = Clock()
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(len(lanes)))
        async with AsyncExitStack() as stack:
            handles = [
                await stack.enter_async_context(
                    aiofiles.open(file.path, "r+b", buffering=0, opener=direct)
                )
                for file in lanes.files
            ]

            async def loop(lane: int) -> int:
                handle, offsets, piece = handles[lane], lanes.offsets[lane], lanes.pieces[lane]
                transfer = handle.readinto if lanes.op == Op.READ else handle.write
                turn = 0
                while clock.elapsed < seconds and turn != turns:
                    await handle.seek(offsets[turn % len(offsets)])
                    require_whole(await transfer(piece), lanes.nbytes)
                    turn += 1
                return turn

            with clock:
                done = sum(await asyncio.gather(*map(loop, range(len(lanes)))))
        return clock, done

    def check(self, case: Case) -> None:
        """See the protocol."""
        lanes = Lanes(case, self._files, self._arena)
        lanes.stamp()
        self._start(lanes, 60.0, 1)
        lanes.require(f"{self.name}, {case}")

    def run(self, case: Case, seconds: float) -> Sample:
        """See the protocol."""
        clock, done = self._start(Lanes(case, self._files, self._arena), seconds, None)
        return clock.sample(done, case.nbytes)

    def _start(self, lanes: Lanes, seconds: float, turns: int | None) -> tuple[Clock, int]:
        try:
            return asyncio.run(self._run(lanes, seconds, turns))
        except OSError as error:
            raise BenchError(f"{self.name}: {error.strerror}") from error
