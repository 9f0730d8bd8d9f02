"""One stage of a run as its own process sees it: cases, their results, and the time left."""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vllm_ssdkv.profiling.gpu_pack.results import Figure, ResultLog, Row

if TYPE_CHECKING:
    import torch

_PR_SET_PDEATHSIG: Final = 1
_ERROR_CHARACTERS: Final = 3000


@dataclass(slots=True)
class Case:
    """A case that runs."""

    figures: list[Figure] = field(default_factory=list)

    def figure(self, name: str, value: float | str, unit: str = "") -> None:
        """Add a figure to the result."""
        self.figures.append(Figure(name, value, unit))


class StageRun:
    """Input of a stage.

    Attributes:
        name: Of the stage.
        log: Where results go.
        rehearsal: Whether the run is the small one on the CPU.
        ends: When the stage should be over, of the monotonic clock.

    Example:
        with run.case("digest of 1 GiB") as case:
            case.figure("rate", 123.0, "GB/s")
    """

    def __init__(self, name: str, log: ResultLog, *, rehearsal: bool, seconds: float):
        self.name = name
        self.log = log
        self.rehearsal = rehearsal
        self.ends = time.monotonic() + seconds
        self._done = {row.case for row in log.rows() if row.stage == name and row.ok}

    def is_done(self, case: str) -> bool:
        """Look whether a case had a good result before this stage began."""
        return case in self._done

    @property
    def device(self) -> torch.device:
        """Device under test: the first GPU, or the CPU in a rehearsal.

        Raises ``RuntimeError`` where a GPU is needed and there is none.
        """
        import torch

        if self.rehearsal:
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise RuntimeError("PyTorch sees no CUDA GPU; --rehearse runs on a CPU")
        return torch.device("cuda", 0)

    def left(self) -> float:
        """Seconds that the stage has left."""
        return self.ends - time.monotonic()

    @contextmanager
    def case(self, name: str) -> Iterator[Case]:
        """Time a case and append its result; an error in it is a result, too, and ends there."""
        case, error = Case(), ""
        begin = time.monotonic()
        try:
            yield case
            self._wait_for_device()
        except Exception as failure:  # noqa: BLE001 - a case may fail in any way, and is told of
            text = traceback.format_exc()
            print(text, file=sys.stderr, flush=True)
            error = f"{text[-_ERROR_CHARACTERS:]}\n{type(failure).__name__}: {failure}"
        seconds = round(time.monotonic() - begin, 3)
        self.append(Row(self.name, name, not error, seconds, case.figures, error))

    def failed(self, name: str, error: str) -> None:
        """Append a case that did not run, with the reason."""
        self.append(Row(self.name, name, ok=False, error=error))

    def append(self, row: Row) -> None:
        """Append a result, and print it."""
        self.log.append(row)
        print(row.text(), flush=True)

    def _wait_for_device(self) -> None:
        """Errors of kernels that still run belong to this case."""
        torch = sys.modules.get("torch")
        if torch is not None and not self.rehearsal and torch.cuda.is_initialized():
            torch.cuda.synchronize()


@contextmanager
def scratch(run: StageRun) -> Iterator[Path]:
    """A folder on a disk for the length of a stage. A rehearsal's is small."""
    place = os.environ.get("SSDKV_GPU_SCRATCH")
    prefix = f"ssdkv-gpu-{run.name}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=place) as made:
        yield Path(made)


def end_with_parent() -> None:
    """Have the kernel end this process when the one that started it is gone."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it went before
        os.kill(os.getpid(), signal.SIGTERM)


def arguments_of(run: StageRun) -> list[str]:
    """Arguments by which a process of a stage starts another one of the same stage."""
    given = ["--name", run.name, "--out", str(run.log.directory)]
    given += ["--seconds", f"{max(1.0, run.left()):.0f}"]
    return given + (["--rehearse"] if run.rehearsal else [])


def stage_main(work: Callable[[StageRun], None], arguments: Sequence[str] | None = None) -> None:
    """Run a stage with the arguments of this process."""
    parser = argparse.ArgumentParser(description="one stage of the GPU pack's run")
    parser.add_argument("--name", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args(arguments)
    end_with_parent()
    log = ResultLog(given.out)
    work(StageRun(given.name, log, rehearsal=given.rehearse, seconds=given.seconds))


def main() -> None:
    """``python -m vllm_ssdkv.profiling.gpu_pack.stage MODULE ...``: run the ``run`` of a module."""
    work = importlib.import_module(sys.argv[1]).run
    stage_main(work, sys.argv[2:])


if __name__ == "__main__":
    main()
