"""The stage ``sanitizer``: the smallest case of each kernel under compute-sanitizer's memcheck."""

from __future__ import annotations

import shutil
from pathlib import Path

from vllm_ssdkv.profiling.gpu_pack.kernels import SMALLEST, run_group
from vllm_ssdkv.profiling.gpu_pack.stage import StageRun

_PLACES = ("/usr/local/cuda/bin/compute-sanitizer",)


def run(run: StageRun) -> None:
    """Run the group under memcheck; a rehearsal runs it without."""
    if run.rehearsal:
        run_group(run, SMALLEST)
        return
    found = shutil.which("compute-sanitizer") or next(
        (place for place in _PLACES if Path(place).exists()), None
    )
    if found is None:
        run.failed("memcheck", "compute-sanitizer is neither on PATH nor in /usr/local/cuda/bin")
        return
    run_group(run, SMALLEST, [found, "--tool", "memcheck", "--error-exitcode", "86"])
