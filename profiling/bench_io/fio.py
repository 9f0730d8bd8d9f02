"""fio: the reference of every ratio, on the same files and kind of memory."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.base.sizes import MIB, approximate_size
from vllm_ssdkv.profiling.bench_io.case import Case, Sample
from vllm_ssdkv.profiling.bench_io.files import BenchFile
from vllm_ssdkv.store.io.engines.protocol import Op

_ENGINES = ("io_uring", "libaio", "psync")
_HUGE_PAGE = 2 * MIB
_MEMINFO = Path("/proc/meminfo")
_GRACE_S = 60.0


def find_fio() -> str | None:
    """Path of fio, or None."""
    return shutil.which("fio")


def reserved_huge_bytes(meminfo: str) -> int:
    """Bytes of huge pages that are reserved and nobody's yet, from the text of /proc/meminfo."""

    def number(name: str) -> int:
        found = re.search(rf"^{name}:\s+(\d+)", meminfo, re.MULTILINE)
        return int(found[1]) if found else 0

    pages = max(0, number("HugePages_Free") - number("HugePages_Rsvd"))
    return pages * number("Hugepagesize") * 1024


def memory_options(case: Case) -> tuple[list[str], dict[str, str], str]:
    """fio's memory options, its extra environment, and a name for both.

    Our arena is anonymous memory on transparent huge pages. fio gets pages of that size too: from
    the reserved pool if that is large enough, else from malloc, which is told to ask for them.
    """
    per_device = -(-case.depth * case.nbytes // _HUGE_PAGE) + 2  # fio aligns, and rounds up
    if reserved_huge_bytes(_MEMINFO.read_text()) >= per_device * case.devices * _HUGE_PAGE:
        return ["--mem=shmhuge"], {}, "shmhuge"
    tunables = ":".join(filter(None, (os.environ.get("GLIBC_TUNABLES"), "glibc.malloc.hugetlb=1")))
    return ["--mem=malloc"], {"GLIBC_TUNABLES": tunables}, "malloc on transparent huge pages"


class FioContender:
    """See :class:`vllm_ssdkv.profiling.bench_io.case.Contender`; one fio thread per device.

    Args:
        program: Path of fio.
        files: The devices.
        registered: Whether io_uring gets registered files and buffers.

    Raises:
        BenchError: no engine of this fio can do direct I/O here.
    """

    def __init__(self, program: str, files: Sequence[BenchFile], *, registered: bool) -> None:
        self.name = "fio registered" if registered else "fio"
        self._program = program
        self._files = files
        self._registered = registered
        version = self._call(["--version"], {}, _GRACE_S).strip()
        offered = set(self._call(["--enghelp"], {}, _GRACE_S).split())
        self._engine = self._choose([engine for engine in _ENGINES if engine in offered])
        memory = "malloc on transparent huge pages (buffers of 2 MiB and more)"
        if reserved := reserved_huge_bytes(_MEMINFO.read_text()):
            memory = f"shmhuge where {approximate_size(reserved)} suffice, else {memory}"
        self.detail = f"{version}, {self._engine}, {memory}, one thread per device"

    def _choose(self, offered: list[str]) -> str:
        problems = []
        for engine in ["io_uring"] if self._registered else offered:
            self._engine = engine
            try:
                self.run(Case(Op.READ, 4096, 1, 1), 0.01)
            except BenchError as error:
                problems.append(f"{engine}: {error}")
            else:
                return engine
        raise BenchError("; ".join(problems) or f"it has none of {', '.join(_ENGINES)}")

    def _call(self, arguments: list[str], environment: dict[str, str], timeout_s: float) -> str:
        try:
            done = subprocess.run(
                [self._program, *arguments],
                env={**os.environ, **environment},
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BenchError(f"fio: {error}") from error
        if done.returncode:
            text = (done.stderr or done.stdout).strip()
            raise BenchError(f"fio ended with {done.returncode}: {text[-500:]}")
        return done.stdout

    def arguments(self, case: Case, seconds: float) -> list[str]:
        """Command line without the program, memory left out."""
        command = [
            "--output-format=json",
            f"--rw=rand{case.op.name.lower()}",
            f"--bs={case.nbytes}",
            f"--iodepth={case.depth}",
            f"--ioengine={self._engine}",
            f"--direct={int(self._files[0].direct)}",
            f"--offset={self._files[0].begin(case.op)}",
            f"--size={self._files[0].region_bytes}",
            "--time_based",
            f"--runtime={max(1, round(seconds * 1000))}ms",
            "--norandommap",
            "--randrepeat=0",
            "--thread",
            "--overwrite=1",
            "--fallocate=none",
            # Everybody else writes the same buffers again and again; changing them costs fio CPU.
            "--scramble_buffers=0",
        ]
        if self._registered:
            command += ["--registerfiles", "--fixedbufs"]
        for file in self._files[: case.devices]:
            # A colon separates file names.
            name = str(file.path).replace(":", "\\:")
            command += [f"--name=device{file.device}", f"--filename={name}"]
        return command

    def refuses(self, case: Case) -> str | None:
        """See the protocol."""
        if self._engine == "psync" and case.depth > 1:
            return "psync has queue depth 1"
        return None

    def check(self, case: Case) -> None:
        """See the protocol. fio fails a run in which an I/O fails; its data cannot be seen."""
        del case

    def run(self, case: Case, seconds: float) -> Sample:
        """See the protocol."""
        memory, environment, _name = memory_options(case)
        # Options before the first job apply to all of them.
        command = [*memory, *self.arguments(case, seconds)]
        return parse_sample(self._call(command, environment, seconds + _GRACE_S), case)


def parse_sample(output: str, case: Case) -> Sample:
    """Sum of all jobs in fio's JSON; CPU time is the jobs' own, without fio's start.

    Raises:
        BenchError: it is not fio's JSON, or a job failed.
    """
    try:
        report = json.loads(output[output.index("{") :])
        jobs: list[dict[str, Any]] = report["jobs"]
        parts = [job[case.op.name.lower()] for job in jobs]
        failed = [job["jobname"] for job in jobs if job["error"]]
        sample = Sample(
            seconds=max(part["runtime"] for part in parts) / 1e3,
            requests=sum(part["total_ios"] for part in parts),
            nbytes=sum(part["io_bytes"] for part in parts),
            cpu_s=sum((j["usr_cpu"] + j["sys_cpu"]) / 100 * j["job_runtime"] / 1e3 for j in jobs),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise BenchError(f"fio's output is not understood ({error!r}): {output[:200]}") from error
    if failed or len(jobs) != case.devices or not sample.requests or not sample.seconds:
        raise BenchError(f"fio: {len(jobs)} jobs, failed: {failed}, I/Os: {sample.requests}")
    return sample
