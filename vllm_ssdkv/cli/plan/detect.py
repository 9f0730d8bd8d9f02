"""The machine that this process runs on: memory, GPU, and drives by a short measurement."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.base.host import available_memory, default_capacity
from vllm_ssdkv.base.sizes import KIB, MIB, approximate_size
from vllm_ssdkv.cli.doctor.check_devices import filesystem, mount_of
from vllm_ssdkv.cli.doctor.check_result import Level
from vllm_ssdkv.profiling.sizing.machine import (
    GpuEntry,
    MachineFile,
    SizedMachine,
    checked,
    machine_of,
)

_GPU_NAMES: Final = {
    "H200": "h200",
    "H100": "h100-80",
    "H20": "h20-96",
    "A100": "a100-40",
    "A6000": "a6000",
}
"""Part of the driver's name, and ours. The first that fits counts."""
STORE: Final = "ssdkv"
"""Name of a store's directory on a drive."""
_PATIENCE_S: Final = 20.0
_CPU_KV_SHARE: Final = 0.25
"""Share of the free memory that weights and KV of vLLM take on a processor."""
_GPU_DRAM_SHARE: Final = 0.5
_CPU_DRAM_SHARE: Final = 0.1
"""Share of the free memory that KV in DRAM takes: the product's default on a processor."""
_MATRIX: Final = 768
_COPY_BYTES: Final = 64 * MIB
_SMALL: Final = 4 * KIB
_SECONDS: Final = 0.2
_LEAST_ROUNDS: Final = 2


def detect(
    devices: Sequence[Path],
    *,
    document: Mapping[str, Any] | None,
    dram: float | None,
    endurance: float | None,
    console: Console,
) -> SizedMachine:
    """This machine, with drives of these directories.

    Args:
        devices: A directory on each drive.
        document: What ``ssdkv lab bench io --json`` printed; None: a short one is run.
        dram: Bytes for KV; None: a part of what is free.
        endurance: Bytes that each drive may be written.
        console: Told what is measured.

    Raises:
        ConfigError: a GPU is not described, or a drive cannot be measured.
    """
    free = available_memory()
    gpus = _gpus()
    share = _GPU_DRAM_SHARE if gpus else _CPU_DRAM_SHARE
    notes = [] if dram else [f"DRAM for KV: {share:g} of {approximate_size(free)} that are free"]
    if document is None:
        with console.status("measuring drives"):
            document = _measure(devices)
    rates = drive_rates(document)
    entries = []
    for path in devices:
        finding = filesystem(str(path), mount_of(path))
        if finding.level is not Level.OK:
            notes.append(f"{finding.subject}: {finding.text}; {finding.cure}")
        capacity = default_capacity(path)
        entries.append({**rates, "capacity_bytes": capacity, "paths": [str(path / STORE)]})
    notes.append("capacity: what a store takes where none is given")
    given: dict[str, Any] = {
        "gpu": gpus[0] if gpus else _processor(free).model_dump(exclude_none=True),
        "gpus": max(1, len(gpus)),
        "dram": dram or share * free,
        "drives": [{**entry, "endurance_bytes": endurance} for entry in entries],
    }
    # The drives were measured through the engine: nothing is lost beside that.
    given["efficiency"] = {"drives": 1.0}
    if not gpus:
        # HBM, DRAM and the buffers of drives are one memory.
        given["gpu_link"] = given["gpu"]["bandwidth"]
        given["efficiency"] |= dict.fromkeys(("gpu_bandwidth", "gpu_flops", "links"), 1.0)
        notes.append("no GPU: vLLM on the processor, whose rates were measured in half a second")
    machine = machine_of(checked(MachineFile, given, "this machine"), "this machine")
    return replace(machine, cpu=not gpus, notes=(*machine.notes, *notes))


def _gpus() -> list[str]:
    """Our name of each GPU; none: there is no driver. Raises ConfigError: one is not described."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=_PATIENCE_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"gpu: nvidia-smi failed ({error}); describe the machine in --machine"
        ) from error
    found = []
    for name in filter(None, map(str.strip, done.stdout.splitlines())):
        known = next((ours for part, ours in _GPU_NAMES.items() if part in name), None)
        if known is None:
            raise ConfigError(f"gpu: {name!r} is not described; describe the machine in --machine")
        found.append(known)
    return found


def _processor(free: float) -> GpuEntry:
    """The processor in place of a GPU, by a product of matrices and a copy.

    The shortest of several counts: others are longer where other work has the cores.
    """
    a = np.ones((_MATRIX, _MATRIX), np.float32)
    a @ a  # threads start with the first one
    source, target = np.ones(_COPY_BYTES, np.uint8), np.empty(_COPY_BYTES, np.uint8)
    np.copyto(target, source)
    flops = 2 * _MATRIX**3 / _shortest(lambda: a @ a)
    bandwidth = 2 * _COPY_BYTES / _shortest(lambda: np.copyto(target, source))
    return GpuEntry(memory_bytes=_CPU_KV_SHARE * free, bandwidth=bandwidth, flops=flops)


def _shortest(work: Callable[[], object]) -> float:
    """Seconds of the shortest round, of as many as :data:`_SECONDS` take, two at least."""
    found: list[float] = []
    begin = time.perf_counter()
    while len(found) < _LEAST_ROUNDS or time.perf_counter() - begin < _SECONDS:
        last = time.perf_counter()
        work()
        found.append(time.perf_counter() - last)
    return min(found)


def _measure(devices: Sequence[Path]) -> Mapping[str, Any]:
    """``ssdkv lab bench io`` of our own engine. Raises BenchError: a directory is of no use."""
    from vllm_ssdkv.profiling.bench_io.bench import Settings, run_bench
    from vllm_ssdkv.profiling.bench_io.engines import engine_kinds
    from vllm_ssdkv.store.io.engines.protocol import Op

    settings = Settings(
        directories=tuple(devices),
        devices=len(devices),
        ops=(Op.READ, Op.WRITE),
        sizes=(_SMALL, MIB),
        depths=(1, 64),
        repeats=1,
        seconds=_SECONDS,
        region_bytes=32 * MIB,
        contenders=(f"ssdkv {engine_kinds()[0]}",),
    )
    return run_bench(settings, Console(quiet=True))


def read_document(path: Path) -> Mapping[str, Any]:
    """Output of ``ssdkv lab bench io --json``. Raises ConfigError: it is something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--io: {path} is no output of ssdkv lab bench io --json: {error}"
        ) from error
    if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
        raise ConfigError(f"--io: {path} has no rows: give the output of ssdkv lab bench io --json")
    return content


def drive_rates(document: Mapping[str, Any]) -> dict[str, float]:
    """Rates of one of the drives that were measured, by our engines: fields of a drive.

    Raises:
        ConfigError: nothing of ours was measured, or only one way.
    """
    rows = [
        row
        for row in document["rows"]
        if isinstance(row, dict)
        and "bytes_per_s" in row
        and str(row.get("contender", "")).startswith("ssdkv")
    ]
    reads = [row for row in rows if row["op"] == "read"]
    writes = [row for row in rows if row["op"] == "write"]
    if not reads or not writes:
        raise ConfigError("--io: no reads or no writes of ssdkv's engines; measure with both --ops")
    small = min(row["size"] for row in reads)
    of_small = [row for row in reads if row["size"] == small]
    alone = min(of_small, key=lambda row: row["depth"])

    def each(rows: Sequence[Mapping[str, Any]], name: str) -> float:
        return float(max(row[name] / row["devices"] for row in rows))

    return {
        "read_bandwidth": each(reads, "bytes_per_s"),
        "write_bandwidth": each(writes, "bytes_per_s"),
        "iops": each(of_small, "iops"),
        # A lonely request takes its latency.
        "latency_s": alone["depth"] * alone["devices"] / alone["iops"],
    }
