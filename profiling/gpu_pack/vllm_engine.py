"""The stage ``vllm``: a tiny Llama in vLLM itself, in reuse mode and in page mode.

Takes the vLLM that is installed. Where there is none, unpacks the one that has travelled: the
Python files of its wheel and the packages they import, without compiled parts, which have 90 MB
(operators) to 300 MB (FlashAttention) a file. What was found out about it, with vLLM 0.32:

- What would stop it on CUDA before the first token has a stand-in: ``vllm._C_stable_libtorch`` and
  FlashAttention's module are imported, operators are asked what they support, and SwiGLU looks up
  its own although the native form is chosen.
- Options choose native forms of all else: ``custom_ops``, ``ir_op_priority``, Triton's attention
  for stock vLLM and reuse mode, and model runner V1, since V2 maps host memory by an operator.
- On a CPU such a vLLM needs six stand-ins, attention among them. Its stock engine then gives the
  tokens of a vLLM with compiled parts; reuse and page mode were not seen to end there yet.
- On an H100 it is imported, in 17 to 30 s. There the model's class was looked at in a process of
  its own, without stand-ins, which ended the engine; it is registered now. What comes after that is
  read off vLLM's sources, and has never run.
- Packages that only servers or grammars use are imported all the same; they travel.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.gpu_pack import tiny_llama
from vllm_ssdkv.profiling.gpu_pack.results import NO_TIME
from vllm_ssdkv.profiling.gpu_pack.stage import Case, StageRun, scratch
from vllm_ssdkv.profiling.gpu_pack.vllm_case import RESULT, full_hits
from vllm_ssdkv.profiling.gpu_pack.vllm_ops import CUDA_MODULES

PACKED: Final = "vllm.tar.xz"
"""vLLM's Python files, beside the folder with this package."""

_IMPORT: Final = "import of vLLM"
_CASES: Final = {
    "stock": "stock vLLM",
    "reuse": "reuse mode",
    "page": "page mode, exact",
}
_MODULE: Final = "vllm_ssdkv.profiling.gpu_pack.vllm_case"
_ABOVE_SHARE: Final = 1.7
"""A case may take this much more than its share of the time that is left."""
_DUMP_S: Final = 0.5
"""For an overdue process to write down where its threads are."""


def run(run: StageRun) -> None:
    """Import vLLM, then run each engine in a process of its own.

    Raises ``RuntimeError`` where there is no GPU.
    """
    device = run.device.type
    with scratch(run) as folder:
        begin = time.monotonic()
        try:
            sources = _sources(folder)
            model = tiny_llama.make(folder / "model")
        except (BenchError, OSError, tarfile.TarError, ImportError) as failure:
            run.failed(_IMPORT, f"{type(failure).__name__}: {failure}")
            return
        unpacked = time.monotonic() - begin
        stock: Sequence[Sequence[int]] | None = None
        for number, (case, name) in enumerate(_CASES.items()):
            if run.left() < 1:
                run.failed(name, NO_TIME)
                continue
            share = run.left() / (len(_CASES) - number) * _ABOVE_SHARE
            place = folder / case
            place.mkdir()
            begin = time.monotonic()
            error = _run_child(
                [case, device, str(model), str(place)],
                _environment(device, sources),
                min(run.left(), share),
            )
            told = _told(place / RESULT)
            if number == 0 and not _tell_import(run, told, error, unpacked):
                return
            with run.case(name) as row:
                row.figure("process", time.monotonic() - begin, "s")
                _judge(row, case, told, error, stock)
            if case == "stock" and "first" in told:
                stock = told["first"]


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
    for name in CUDA_MODULES:
        (folder / "vllm" / name).touch()
    return [folder / "vllm"]


def _environment(device: str, sources: Sequence[Path]) -> dict[str, str]:
    """Environment of an engine's process. Fractions are not rounded to TF32, so that tokens can be
    equal."""
    held = dict(os.environ)
    path = [held.get("PYTHONPATH", ""), *map(str, sources)]
    held["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
    held["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    held["VLLM_NO_USAGE_STATS"] = "1"
    held["VLLM_HOST_IP"] = "127.0.0.1"  # no look into a network that may not be there
    held["TRITON_F32_DEFAULT"] = "ieee"
    held["OMP_NUM_THREADS"] = "1"
    held.pop("TRITON_INTERPRET", None)  # vLLM's own kernels are not for it
    if device == "cpu":
        held["VLLM_TARGET_DEVICE"] = "cpu"
        held["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # An empty list has vLLM believe that a driver for Triton comes later.
        held["CUDA_VISIBLE_DEVICES"] = "-1"
    return held


def _run_child(arguments: Sequence[str], environment: Mapping[str, str], seconds: float) -> str:
    """Run a case's process; why it failed, or nothing."""
    command = [sys.executable, "-P", "-m", _MODULE, *arguments]
    with subprocess.Popen(command, env=environment) as child:
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            # It writes where its threads are into the log.
            child.send_signal(signal.SIGUSR1)
            time.sleep(_DUMP_S)
            child.kill()
            return f"it did not end in {seconds:.0f} s; the log tells where its threads were"
    return f"its process ended with status {code}" if code else ""


def _told(path: Path) -> dict[str, Any]:
    """All that a case's process has told of, one JSON object per line."""
    found: dict[str, Any] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            found |= json.loads(line)
    return found


def _tell_import(run: StageRun, told: Mapping[str, Any], error: str, unpacked: float) -> bool:
    """The result of the first process's import; whether that went well."""
    with run.case(_IMPORT) as case:
        for name in ("vllm", "compiled parts", "stand-ins", "platform"):
            if name in told:
                case.figure(name, told[name])
        if "import" not in told:
            raise BenchError(told.get("error") or error)
        case.figure("unpacking", unpacked, "s")
        case.figure("import", told["import"], "s")
    return "import" in told


def _judge(
    row: Case,
    case: str,
    told: Mapping[str, Any],
    error: str,
    stock: Sequence[Sequence[int]] | None,
) -> None:
    """Figures of an engine; raises ``BenchError`` unless its answers are those of stock vLLM."""
    for name in ("start", "first time", "again time"):
        if name in told:
            row.figure(name, told[name], "s")
    if error or "again" not in told:
        raise BenchError(told.get("error") or error or "it ended without answers")
    wanted = told["first"] if case == "stock" else stock
    if wanted is None:
        raise BenchError("it has answered, but stock vLLM has not: there is nothing to compare")
    hits = [0] * len(wanted) if case == "stock" else full_hits()
    row.figure("cached tokens", sum(told["again cached"]))
    for name in ("first", "again"):
        good = sum(a == b for a, b in zip(told[name], wanted, strict=True))
        row.figure(f"answers as stock, {name}", f"{good} of {len(wanted)}")
    if told["first"] != wanted or told["again"] != wanted:
        raise BenchError("other tokens than those of stock vLLM")
    if told["again cached"] != hits:
        raise BenchError(f"cached {told['again cached']} tokens, and {hits} were stored")
