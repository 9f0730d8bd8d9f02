"""Runs stages one after the other, each in a process group of its own that ends in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from vllm_ssdkv.profiling.gpu_pack.results import NO_TIME, STAGE, ResultLog, Row, latest

LOG_BYTES: Final = 4 << 20
"""Most bytes of a stage's log; what comes later is counted and dropped."""

GRACE_S: Final = 3.0
"""Time between SIGTERM and SIGKILL."""

_CUT: Final = b"\n[the log is cut here]\n"


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a run.

    Attributes:
        name: Its name, in results and on the command line.
        module: Python module whose ``run(StageRun)`` does the work.
        seconds: Limit on a GPU.
        rehearsal_seconds: Limit in a rehearsal.
        log_of: Stage whose log it shares; empty: a log of its own.
    """

    name: str
    module: str
    seconds: float
    rehearsal_seconds: float
    log_of: str = ""

    @property
    def log(self) -> str:
        """Name of the file that keeps its output."""
        return f"log.{self.log_of or self.name}.txt"


@dataclass(frozen=True, slots=True)
class Plan:
    """A run: its stages in order, and how long all of them may take together."""

    stages: Sequence[Stage]
    seconds: float
    rehearsal: bool
    environment: Mapping[str, str]


class Orchestrator:
    """Runs the stages of a plan and goes on after a failure. Used by one thread."""

    def __init__(self, plan: Plan, out: Path):
        """``out``: directory for results and logs, which exists."""
        self._plan = plan
        self._log = ResultLog(out)
        self._out = out
        self._child: subprocess.Popen[bytes] | None = None

    def run(self) -> bool:
        """Run all stages; whether all of them ended well. Blocks for at most the plan's seconds and
        what it takes to end the last process."""
        ends = time.monotonic() + self._plan.seconds
        good = True
        for stage in self._plan.stages:
            limit = stage.rehearsal_seconds if self._plan.rehearsal else stage.seconds
            left = ends - time.monotonic()
            if left < 1:
                self._append(Row(stage.name, STAGE, ok=False, error=NO_TIME))
                good = False
                continue
            good &= self._run_stage(stage, min(limit, left))
        self._summarize(good)
        return good

    def end(self) -> None:
        """End the stage that runs, from a signal handler."""
        if self._child is not None:
            _kill_group(self._child, signal.SIGKILL)

    def _run_stage(self, stage: Stage, limit: float) -> bool:
        before = len(self._log.rows())
        begin = time.monotonic()
        error = self._run_process(stage, limit)
        seconds = round(time.monotonic() - begin, 3)
        held = self._log.rows()
        rows = [row for row in held[before:] if row.stage == stage.name]
        failed = sum(not row.ok for row in rows)
        if not error and not any(row.stage == stage.name for row in held):
            error = "the stage ended without a result"
        elif not error and failed:
            error = f"{failed} of {len(rows)} cases failed"
        self._append(Row(stage.name, STAGE, not error, seconds, error=error))
        return not error

    def _run_process(self, stage: Stage, limit: float) -> str:
        """Run a stage's process; why it failed, or nothing."""
        command = [sys.executable, "-P", "-m", "vllm_ssdkv.profiling.gpu_pack.stage"]
        command += [stage.module, "--name", stage.name, "--out", str(self._out)]
        # A stage plans with less than its limit: what it has left out it can still say.
        command += ["--seconds", f"{max(1.0, 0.9 * limit):.1f}"]
        command += ["--rehearse"] if self._plan.rehearsal else []
        child = self._child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(self._plan.environment),
            start_new_session=True,
        )
        if child.stdout is None:
            raise RuntimeError("a process without its output")
        pump = threading.Thread(
            target=_keep_log, args=(child.stdout, self._out / stage.log), daemon=True
        )
        pump.start()
        try:
            code = child.wait(limit)
            error = "" if code == 0 else f"its process ended with status {code}"
        except subprocess.TimeoutExpired:
            error = f"it did not end in {limit:.0f} s and was ended"
            _kill_group(child, signal.SIGTERM)
            try:
                child.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                error += " by SIGKILL"
        finally:
            # Also what a stage that ended well has left behind.
            _kill_group(child, signal.SIGKILL)
            self._child = None
        child.wait()
        pump.join(GRACE_S)
        return error

    def _append(self, row: Row) -> None:
        self._log.append(row)
        print(row.text(), flush=True)

    def _summarize(self, good: bool) -> None:
        rows = latest(self._log.rows())
        cases = [row for row in rows if row.case != STAGE]
        lines = ["", "summary"]
        for row in rows:
            if row.case == STAGE:
                of_stage = [case for case in cases if case.stage == row.stage]
                done = sum(case.ok for case in of_stage)
                verdict = "ok" if row.ok else f"FAILED: {row.error}"
                lines.append(
                    f"  {row.stage:<12} {done}/{len(of_stage)} cases in {row.seconds:.0f} s, "
                    f"{verdict}"
                )
        lines += [f"  failed: {row.stage}: {row.case}" for row in cases if not row.ok]
        lines.append("all stages ended well" if good else "NOT all stages ended well")
        text = "\n".join(lines)
        self._log.note(text)
        print(text, flush=True)


def _kill_group(child: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(child.pid, number)
    except ProcessLookupError:
        return  # all of it has ended


def _keep_log(source: IO[bytes], path: Path) -> None:
    """Append at most :data:`LOG_BYTES` of a process's output to a file, and read the rest away."""
    kept = 0
    with path.open("ab", buffering=0) as file:
        while data := os.read(source.fileno(), 1 << 16):
            room = LOG_BYTES - kept
            if room <= 0:
                continue
            file.write(data[:room])
            kept += min(room, len(data))
            if kept >= LOG_BYTES:
                file.write(_CUT)
    source.close()
