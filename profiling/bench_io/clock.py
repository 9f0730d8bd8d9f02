"""Wall and CPU time of a stretch of code, all threads of this process included."""

from __future__ import annotations

import resource
import time
from types import TracebackType

from vllm_ssdkv.profiling.bench_io.case import Sample


def cpu_seconds() -> float:
    """User and system time of this process so far; kernel workers of io_uring count too."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Clock:
    """Context manager that measures its body."""

    seconds = 0.0
    cpu_s = 0.0

    def __enter__(self) -> Clock:
        self._cpu = cpu_seconds()
        self._begin = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.seconds = time.perf_counter() - self._begin
        self.cpu_s = cpu_seconds() - self._cpu

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning, for loops that stop at a time."""
        return time.perf_counter() - self._begin

    def sample(self, requests: int, nbytes: int) -> Sample:
        """Sample over ``requests`` of ``nbytes`` each."""
        return Sample(self.seconds, requests, requests * nbytes, self.cpu_s)
