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
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import FpgaError
from vllm_ssdkv.fpga_offload.backend import SparfWork
from vllm_ssdkv.fpga_offload.description import (
    BEAT_BYTES,
    BLOCK_TOKENS,
    GROUPS,
    HEAD_SIZES,
    PAGE_TOKENS,
    SPARF_JOB,
    KernelShape,
)
from vllm_ssdkv.fpga_offload.results import CYCLES, FOLDER, Cycles, Results, add_results
from vllm_ssdkv.fpga_offload.rtlsim import RtlsimBackend, rtlsim_library
from vllm_ssdkv.fpga_offload.trial import aligned_bytes, random_problem

LENGTHS: Final = (128, 256, 512, 1024, 2048, 4096, 8192)
DTYPE: Final = "float16"
KEPT: Final = 8
"""SparF: one of so many tokens, and of so many channels, is kept."""
KINDS: Final = ("attend", "sparf_second", "sparf_first", "sparf")
Kind = Literal["attend", "sparf_second", "sparf_first", "sparf"]


def measure(backend: RtlsimBackend, kind: Kind, tokens: int) -> Cycles:
    """Cycles of one job on a random context.

    Args:
        backend: Of the kernels.
        kind: ``attend``: to all tokens. ``sparf_second``: to an eighth, at random places, behind
            the row filter; pages without one are not read. ``sparf_first``: choose an eighth of
            the tokens by an eighth of the channels, beside a window of 16 tokens. ``sparf``: that,
            and attend to both.
        tokens: Of the context.

    Raises:
        FpgaError: the kernels fail, or are without ``sparf``.
    """
    shape = backend.shape
    if kind in ("sparf_first", "sparf"):
        memory, call = _sparf(shape, tokens, attend=kind == "sparf")
        chosen = backend.sparf(call)
        del memory  # the call reads it
        nbytes = chosen.beats * BEAT_BYTES
        sizes = (shape.head_size, shape.group, DTYPE, tokens)
        return Cycles(kind, *sizes, nbytes, chosen.cycles)
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


def _sparf(
    shape: KernelShape, tokens: int, *, attend: bool
) -> tuple[list[NDArray[np.uint8]], SparfWork]:
    """A call on a random context, and the memory that it reads."""
    problem = random_problem(shape, tokens + PAGE_TOKENS, seed=tokens)
    pages, entries = problem.pages, problem.work.entries
    place = (entries["address"] - np.uint64(pages.ctypes.data)) // np.uint64(shape.page_bytes)
    halves = pages.view(np.uint16).reshape(len(pages), 2, PAGE_TOKENS, shape.head_size)
    keys = halves[place.astype(np.int64)[:-1], 0].reshape(-1, BLOCK_TOKENS, shape.head_size)
    channels = aligned_bytes(keys.nbytes)
    channels.view(np.uint16)[:] = np.ascontiguousarray(keys.transpose(0, 2, 1)).ravel()
    jobs = np.zeros(1, SPARF_JOB.dtype)
    jobs["channel_blocks"] = len(keys)
    jobs["first_window"], jobs["window_entries"] = len(entries) - 1, 1
    jobs["keep"] = tokens // KEPT
    at = channels.ctypes.data + np.arange(len(keys)) * keys[0].nbytes
    work = SparfWork(
        problem.work.queries,
        entries,
        jobs,
        at.astype(np.uint64),
        shape.head_size**-0.5,
        1,
        BLOCK_TOKENS,
        PAGE_TOKENS,
        shape.head_size // KEPT,
        attend=attend,
        window=attend,
    )
    return [pages, channels], work


def measured(shapes: Iterable[KernelShape], lengths: Sequence[int]) -> Iterator[Cycles]:
    """Rows of all shapes that have a library."""
    for shape in shapes:
        if not rtlsim_library(shape).exists():
            print(f"no library of {shape}: left out", file=sys.stderr)
            continue
        backend = RtlsimBackend(shape)
        for kind in KINDS:
            try:
                yield from [measure(backend, kind, tokens) for tokens in lengths]
            except FpgaError as error:
                if kind not in ("sparf_first", "sparf"):
                    raise
                print(f"{kind} of {shape} is left out: {error}", file=sys.stderr)
        backend.close(1.0)


def simulator_version() -> str:
    """Version of Verilator."""
    said = subprocess.run(
        ["verilator", "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    found = re.search(r"\d+\.\d+", said.stdout)
    return found[0] if found else said.stdout.strip()


def main() -> None:
    """Measure every shape that is built; in the file its rows replace those of the same kernels."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=FOLDER / CYCLES, help="file to write")
    output = parser.parse_args().output
    shapes = [KernelShape(size, group, DTYPE) for size in HEAD_SIZES for group in GROUPS]
    rows = list(measured(shapes, LENGTHS))
    command = "python -P -m vllm_ssdkv.fpga_offload.measure"
    add_results(Results(command, {"verilator": simulator_version()}, rows), output)


if __name__ == "__main__":
    main()
