"""The stage ``sanitizer``: the smallest case of each kernel under compute-sanitizer's memcheck."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Final

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.gpu_pack.kernels import SMALLEST, run_group
from vllm_ssdkv.profiling.gpu_pack.stage import StageRun

_MEMCHECK: Final = "memcheck"

_PLACES: Final = ("/usr/local/cuda/bin/compute-sanitizer",)

_OPTIONS: Final = ("--tool", "memcheck", "--error-exitcode", "86")

_UNCACHED: Final = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""Each tensor is an allocation of its own, so that what lies outside of one is outside of all."""


def run(run: StageRun) -> None:
    """Run the group under memcheck; a rehearsal runs it without."""
    if run.is_done(_MEMCHECK):
        return
    if run.rehearsal:
        run_group(run, SMALLEST)
        return
    found = shutil.which("compute-sanitizer") or next(
        (place for place in _PLACES if Path(place).exists()), None
    )
    if found is None:
        run.failed(_MEMCHECK, "compute-sanitizer is neither on PATH nor in /usr/local/cuda/bin")
        return
    printed = run_group(run, SMALLEST, [found, *_OPTIONS], _UNCACHED)
    with run.case(_MEMCHECK) as case:
        said = re.search(r"ERROR SUMMARY: (\d+) error", printed)
        if said is None:
            raise BenchError("compute-sanitizer did not say how many errors there were")
        case.figure("errors", int(said[1]))
        if said[1] != "0":
            raise BenchError(f"compute-sanitizer found {said[1]} errors; its log says where")
