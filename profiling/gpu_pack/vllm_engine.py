"""The stage ``vllm``: vLLM itself, stock, in reuse mode and in page mode, with two Llamas.

Takes the vLLM that is installed. Where there is none, unpacks the one that has travelled: the
Python files of its wheel, its operators for Hopper GPUs with the device code of all others blanked,
and the packages that they import. FlashAttention, of 300 MB, has not travelled: stock vLLM and
reuse mode attend with Triton's kernels.

- A process of its own first loads the operators and compares one with its definition, so that a
  driver or a PyTorch that does not take them spoils nothing. Then there are stand-ins, as there
  were in all runs so far: what would stop vLLM on CUDA before the first token is registered with
  PyTorch, options choose native forms of all else, and model runner V1 is taken.
- One process imports vLLM, which took 17 to 30 s on an H100, and forks an engine for each cell.
- On a CPU such a vLLM needs six stand-ins, attention among them, and answers then as one with
  compiled parts.
- No engine has ended on CUDA yet, and the operators were never loaded there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.gpu_pack.cuda_library import LIBRARY
from vllm_ssdkv.profiling.gpu_pack.stage import StageRun, arguments_of, scratch
from vllm_ssdkv.profiling.gpu_pack.vllm_ops import FLASH_ATTENTION, OPERATORS

PACKED: Final = "vllm.tar.xz"
"""vLLM's Python files and operators, beside the folder with this package."""

_IMPORT: Final = "import of vLLM"
_OPERATORS: Final = "vLLM's operators as packed"
_HERE: Final = "vllm_ssdkv.profiling.gpu_pack"
_OPERATORS_S: Final = 45.0
_GRACE_S: Final = 5.0
"""Time in which the process of the cells reports the cells that it left out."""


def run(run: StageRun) -> None:
    """Try the operators, then run all cells in a process that imports vLLM.

    Raises ``RuntimeError`` where there is no GPU.
    """
    device = run.device.type
    with scratch(run) as folder:
        try:
            sources = _sources(folder)
        except (BenchError, OSError, tarfile.TarError) as failure:
            run.failed(_IMPORT, f"{type(failure).__name__}: {failure}")
            return
        for source in sources:
            settle_operators(run, device, source)
        command = [sys.executable, "-P", "-m", f"{_HERE}.vllm_forks", *arguments_of(run)]
        error = _ended(command, _environment(device, sources), run.left() + _GRACE_S)
        if error:
            run.failed("process of the cells", error)


def settle_operators(run: StageRun, device: str, source: Path) -> None:
    """Leave the packed operators where vLLM finds them if they work, else an empty module."""
    library = source / "vllm" / LIBRARY
    works = False
    if device == "cuda":
        with run.case(_OPERATORS) as case:
            case.figure("size", round(library.stat().st_size / 2**20, 1), "MiB")
            command = [sys.executable, "-P", "-m", f"{_HERE}.vllm_ops", str(library)]
            error = _ended(command, dict(os.environ), min(run.left(), _OPERATORS_S))
            if error:
                raise BenchError(f"{error}; stand-ins take their place, and the log says why")
            works = True
    if not works:
        library.unlink(missing_ok=True)
        (source / OPERATORS).touch()


def _sources(folder: Path) -> list[Path]:
    """Folders to add to Python's path: none where vLLM is installed.

    Raises ``BenchError`` where it is not, and has not travelled either.
    """
    if find_spec("vllm") is not None:
        return []
    import vllm_ssdkv

    packed = Path(vllm_ssdkv.__file__).resolve().parents[2] / PACKED
    if not packed.exists():
        raise BenchError(f"vLLM is not installed here, and {packed} is not there")
    with tarfile.open(packed) as archive:
        archive.extractall(folder / "vllm", filter="data")
    (folder / "vllm" / FLASH_ATTENTION).touch()
    return [folder / "vllm"]


def _environment(device: str, sources: Sequence[Path]) -> dict[str, str]:
    """Environment of the process of the cells. Nothing is rounded to TF32, so that tokens can
    be equal."""
    held = dict(os.environ)
    path = [held.get("PYTHONPATH", ""), *map(str, sources)]
    held["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
    held["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    held["VLLM_NO_USAGE_STATS"] = "1"
    held["VLLM_HOST_IP"] = "127.0.0.1"  # no look into a network that may not be there
    held["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # to look for GPUs must not begin to use them
    held["TRITON_F32_DEFAULT"] = "ieee"
    held["OMP_NUM_THREADS"] = "1"
    held.pop("TRITON_INTERPRET", None)  # vLLM's own kernels are not for it
    if device == "cpu":
        held["VLLM_TARGET_DEVICE"] = "cpu"
        held["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # An empty list has vLLM believe that a driver for Triton comes later.
        held["CUDA_VISIBLE_DEVICES"] = "-1"
    return held


def _ended(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> str:
    """Run a process; why it failed, or nothing."""
    try:
        done = subprocess.run(command, env=environment, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"it did not end in {seconds:.0f} s"
    return f"it ended with status {done.returncode}" if done.returncode else ""
