"""Cycles of the simulated RTL, as ``fpga_offload/results/cycles.json`` holds them.

Run as ``python -P -m vllm_ssdkv.fpga_offload.measure``; the libraries are those of ``make fpga``
and ``scripts/fpga.sh``. Memory answers one beat a cycle, 64 cycles behind the question, without
stalls.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

import numpy as np

from vllm_ssdkv.fpga_offload.description import BEAT_BYTES, GROUPS, HEAD_SIZES, KernelShape
from vllm_ssdkv.fpga_offload.results import CYCLES, FOLDER, Cycles, Results, write_results
from vllm_ssdkv.fpga_offload.rtlsim import RtlsimBackend, rtlsim_library
from vllm_ssdkv.fpga_offload.trial import random_problem

LENGTHS: Final = (128, 256, 512, 1024, 2048, 4096, 8192)
DTYPE: Final = "float16"
KEPT: Final = 8
"""SparF's second step: one of so many tokens is kept."""
Kind = Literal["attend", "sparf_second"]


def measure(backend: RtlsimBackend, kind: Kind, tokens: int) -> Cycles:
    """Cycles of one job on a random context.

    Args:
        backend: Of the kernels.
        kind: ``attend``: to all tokens. ``sparf_second``: to an eighth, at random places, behind
            the row filter; pages without one are not read.
        tokens: Of the context.

    Raises:
        FpgaError: the kernels fail.
    """
    shape = backend.shape
    problem = random_problem(shape, tokens, seed=tokens)  # it holds the pages
    work = problem.work
    if kind == "sparf_second":
        rng = np.random.default_rng(tokens)
        kept = rng.choice(tokens, tokens // KEPT, replace=False)
        masks = np.zeros(len(work.entries), np.uint32)
        np.bitwise_or.at(masks, kept // 16, (1 << (kept % 16)).astype(np.uint32))
        entries = work.entries.copy()
        entries["mask"] = masks
        work = replace(work, entries=entries, mask=True)
    found = backend.attend(work)
    nbytes = found.beats * BEAT_BYTES
    return Cycles(kind, shape.head_size, shape.group, DTYPE, tokens, nbytes, found.cycles)


def measured(shapes: Iterable[KernelShape], lengths: Sequence[int]) -> Iterator[Cycles]:
    """Rows of all shapes that have a library."""
    for shape in shapes:
        if not rtlsim_library(shape).exists():
            print(f"no library of {shape}: left out", file=sys.stderr)
            continue
        backend = RtlsimBackend(shape)
        for kind in ("attend", "sparf_second"):
            for tokens in lengths:
                yield measure(backend, kind, tokens)
        backend.close(1.0)


def simulator_version() -> str:
    """Version of Verilator."""
    said = subprocess.run(
        ["verilator", "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    found = re.search(r"\d+\.\d+", said.stdout)
    return found[0] if found else said.stdout.strip()


def main() -> None:
    """Measure every shape that is built, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=FOLDER / CYCLES, help="file to write")
    output = parser.parse_args().output
    shapes = [KernelShape(size, group, DTYPE) for size in HEAD_SIZES for group in GROUPS]
    rows = list(measured(shapes, LENGTHS))
    command = "python -P -m vllm_ssdkv.fpga_offload.measure"
    write_results(Results(command, {"verilator": simulator_version()}, rows), output)


if __name__ == "__main__":
    main()
