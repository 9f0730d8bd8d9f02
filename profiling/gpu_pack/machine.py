"""The stage ``machine``: what the run runs on, and how fast its bus, memory and disk are."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_ssdkv.profiling.gpu_pack.stage import StageRun

_PACKAGES = ("torch", "triton", "numpy", "transformers", "pydantic", "msgspec", "vllm")
_PATIENCE_S = 20


def run(run: StageRun) -> None:
    """Record the machine; fails where there is no GPU."""
    with run.case("machine") as case:
        case.figure("date", datetime.now(UTC).date().isoformat())
        case.figure("kernel", platform.release())
        case.figure("processor", _processor())
        case.figure("cores", os.cpu_count() or 0)
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        case.figure("DRAM", round(memory / 2**30, 1), "GiB")
    with run.case("software") as case:
        case.figure("python", platform.python_version())
        for name in _PACKAGES:
            case.figure(name, _version(name))
        import vllm_ssdkv

        packed = "gpu_pack" in Path(vllm_ssdkv.__file__).parts
        case.figure("package", "as packed" if packed else "as installed")
    with run.case("GPU") as case:
        import torch

        device = run.device
        if device.type == "cuda":
            of_device: Any = torch.cuda.get_device_properties(device)
            case.figure("device", torch.cuda.get_device_name(device))
            case.figure("memory", round(of_device.total_memory / 2**30, 1), "GiB")
            case.figure("processors", of_device.multi_processor_count)
            case.figure("compute capability", f"{of_device.major}.{of_device.minor}")
            case.figure("driver", _driver())
        else:
            case.figure("device", "none: a rehearsal on the CPU")
    with run.case("import of the package") as case:
        begin = time.perf_counter()
        _import_all()
        case.figure("time", time.perf_counter() - begin, "s")


def _import_all() -> None:
    """Import what later stages stand on, so that what is missing is told of first."""
    import vllm_ssdkv.attention.sparse
    import vllm_ssdkv.connector.worker.block_copy
    import vllm_ssdkv.connector.worker.device_memory
    import vllm_ssdkv.profiling.bench_triton
    import vllm_ssdkv.profiling.ragged_checks
    import vllm_ssdkv.store.open
    import vllm_ssdkv.store.tiered_store  # noqa: F401


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            asked, capture_output=True, text=True, timeout=_PATIENCE_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"
    return done.stdout.strip()
