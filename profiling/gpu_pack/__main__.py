"""``python -m vllm_ssdkv.profiling.gpu_pack``: all stages, or what some of them lack."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Final

from vllm_ssdkv.profiling.gpu_pack.orchestrate import Orchestrator, Plan, Stage
from vllm_ssdkv.profiling.gpu_pack.results import REPORT, RESULTS, Row, read_rows

_HERE: Final = "vllm_ssdkv.profiling.gpu_pack"

STAGES: Final = (
    Stage("machine", f"{_HERE}.machine", 30, 60, log_of="kernels"),
    Stage("vllm", f"{_HERE}.vllm_engine", 200, 150),
    Stage("kernels", f"{_HERE}.kernels", 110, 180),
    Stage("bandwidth", f"{_HERE}.bandwidth", 50, 60),
    Stage("store", f"{_HERE}.store", 80, 60),
    Stage("decode", "vllm_ssdkv.profiling.decode_harness.stage", 200, 120),
    Stage("sanitizer", f"{_HERE}.sanitizer", 90, 90),
)
"""Stages in order of value.

On an H100 all but ``vllm`` took 380 s. A rehearsal takes four minutes on two cores; its limits
leave room for a busy machine.
"""

SECONDS: Final = 510.0
REHEARSAL_SECONDS: Final = 360.0


def chosen(names: str | None) -> list[Stage]:
    """The stages of a comma-separated list, in their order; raises ``ValueError`` for others."""
    if names is None:
        return list(STAGES)
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = [stage.name for stage in STAGES]
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise ValueError(
            f"--stages: {', '.join(unknown) or 'none given'}; the stages are {', '.join(known)}"
        )
    return [stage for stage in STAGES if stage.name in wanted]


def refuse_mixture(rows: Iterable[Row], rehearsal: bool) -> None:
    """Raises ``ValueError`` if ``rows`` are of a rehearsal and this run is none, or the reverse."""
    for row in rows:
        if (row.stage, row.case) == ("machine", "GPU") and row.ok:
            before = "rehearsal" in str(row.figures[0].value)
            if before != rehearsal:
                there = "a rehearsal" if before else "a GPU"
                raise ValueError(f"--out: results of {there} are there; choose another folder")


def stretched(stages: Sequence[Stage], seconds: float) -> list[Stage]:
    """The same stages with limits that fill up the run: a few of them get the time of all."""
    ratio = seconds / sum(stage.seconds for stage in stages)
    rehearsal_ratio = seconds / sum(stage.rehearsal_seconds for stage in stages)
    return [
        replace(
            stage,
            seconds=stage.seconds * max(1.0, ratio),
            rehearsal_seconds=stage.rehearsal_seconds * max(1.0, rehearsal_ratio),
        )
        for stage in stages
    ]


def environment(rehearsal: bool, scratch: Path) -> dict[str, str]:
    """Environment of the stages' processes."""
    held = dict(os.environ)
    held["PYTHONUNBUFFERED"] = "1"
    held["HF_HUB_OFFLINE"] = "1"
    held["TRITON_CACHE_DIR"] = str(scratch / "triton")
    held["SSDKV_GPU_SCRATCH"] = str(scratch)
    if rehearsal:
        held["TRITON_INTERPRET"] = "1"
        held["CUDA_VISIBLE_DEVICES"] = ""
    else:
        held.pop("TRITON_INTERPRET", None)
    return held


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point; exits with status 1 if a stage failed and 2 for wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu/run.sh", description="checks and measures what needs a GPU"
    )
    parser.add_argument(
        "--out", metavar="DIR", type=Path, default=Path("build/gpu"), help="folder for results"
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="rehearse on the CPU, with small sizes"
    )
    parser.add_argument(
        "--stages",
        metavar="LIST",
        help="stages to run, separated by commas, and only cases without a good result in DIR",
    )
    parser.add_argument("--seconds", type=float, help="time limit of the whole run in seconds")
    given = parser.parse_args(arguments)
    seconds = REHEARSAL_SECONDS if given.rehearse else SECONDS
    if given.seconds is not None:
        seconds = given.seconds
    if not 1 <= seconds <= SECONDS:
        parser.error(f"--seconds: from 1 to {SECONDS:.0f}, not {seconds:g}")
    try:
        stages = chosen(given.stages)
    except ValueError as error:
        parser.error(str(error))
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if given.stages is None:
        for old in (out / RESULTS, out / REPORT, *(out / stage.log for stage in STAGES)):
            old.unlink(missing_ok=True)
    try:
        refuse_mixture(read_rows(out / RESULTS), given.rehearse)
    except ValueError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory(prefix="ssdkv-gpu-") as scratch:
        plan = Plan(
            stretched(stages, seconds),
            seconds,
            given.rehearse,
            environment(given.rehearse, Path(scratch)),
        )
        orchestrator = Orchestrator(plan, out)

        def stop(number: int, _frame: FrameType | None) -> None:
            orchestrator.end()
            raise SystemExit(128 + number)

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, stop)
        good = orchestrator.run()
    print(f"results: {out}")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
