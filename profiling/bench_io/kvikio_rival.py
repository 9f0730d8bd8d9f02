"""KvikIO: NVIDIA's file library, here between files and host memory."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import kvikio
import kvikio.defaults

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.bench_io.case import Case, Sample
from vllm_ssdkv.profiling.bench_io.clock import Clock
from vllm_ssdkv.profiling.bench_io.files import BenchFile
from vllm_ssdkv.profiling.bench_io.pools import Lanes, require_whole, too_many_threads
from vllm_ssdkv.store.io.engines.protocol import Op
from vllm_ssdkv.store.memory.arena import Arena


class KvikioContender:
    """``CuFile.pread`` and ``pwrite`` with a thread per request in flight and one task per I/O.

    See :class:`vllm_ssdkv.profiling.bench_io.case.Contender`.
    """

    name = "kvikio"

    def __init__(self, files: Sequence[BenchFile], arena: Arena) -> None:
        self._files = files
        self._arena = arena
        self._settings: dict[str, Any] = {"compat_mode": kvikio.CompatMode.ON}
        for option in ("auto_direct_io_read", "auto_direct_io_write"):
            if self._known(option):
                self._settings[option] = files[0].direct
        direct = "O_DIRECT" if len(self._settings) > 1 and files[0].direct else "page cache"
        # Loading works without NVIDIA's driver, I/O does not: find out before the run.
        self.check(Case(Op.READ, 4096, 1, 1))
        self.detail = f"kvikio {kvikio.__version__}, compat mode, {direct}, a thread per request"

    @staticmethod
    def _known(option: str) -> bool:
        try:
            kvikio.defaults.get(option)
        except (KeyError, ValueError, AttributeError):
            return False
        return True

    def refuses(self, case: Case) -> str | None:
        """See the protocol."""
        return too_many_threads(case)

    def _run(self, lanes: Lanes, seconds: float, turns: int | None) -> tuple[Clock, int]:
        kvikio.defaults.set({**self._settings, "num_threads": len(lanes)})
        clock, started, done = Clock(), 0, 0
        waiting: collections.deque[Any] = collections.deque()
        limit = None if turns is None else turns * len(lanes)
        with ExitStack() as stack:
            handles = {
                file.path: stack.enter_context(kvikio.CuFile(file.path, "r+"))
                for file in lanes.files
            }
            calls = [
                handles[file.path].pread if lanes.op == Op.READ else handles[file.path].pwrite
                for file in lanes.files
            ]
            with clock:
                while True:
                    more = clock.elapsed < seconds and started != limit
                    while more and len(waiting) < len(lanes) and started != limit:
                        lane, turn = started % len(lanes), started // len(lanes)
                        offset = lanes.offsets[lane][turn % len(lanes.offsets[lane])]
                        future = calls[lane](
                            lanes.pieces[lane], lanes.nbytes, offset, task_size=lanes.nbytes
                        )
                        waiting.append(future)
                        started += 1
                    if not waiting:
                        break
                    require_whole(waiting.popleft().get(), lanes.nbytes)
                    done += 1
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
            return self._run(lanes, seconds, turns)
        except (OSError, RuntimeError) as error:
            why = str(error).replace("\n", " ")
            driver = "; it needs NVIDIA's driver, for host memory too" if "libcuda" in why else ""
            raise BenchError(f"{why}{driver}") from error
