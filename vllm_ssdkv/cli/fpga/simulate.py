"""``ssdkv lab fpga simulate``: random contexts through the kernels, and attention in float64."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias, get_args

import typer
from rich.console import Console
from rich.progress import Progress

from vllm_ssdkv.base.errors import FpgaError, SSDKVError
from vllm_ssdkv.cli import arguments
from vllm_ssdkv.cli.bench.tables_output import print_tables
from vllm_ssdkv.cli.fpga.arguments import DtypeOption, GroupOption, HeadSizeOption, shape_of
from vllm_ssdkv.cli.fpga.tables import trials_table

# Kernels and their oracles need the native module. It is imported by those who run them, so that
# `ssdkv doctor` can say that the module is missing.
if TYPE_CHECKING:
    from vllm_ssdkv.fpga_offload.backend import Backend
    from vllm_ssdkv.fpga_offload.description import KernelShape

Row: TypeAlias = dict[str, Any]
BackendName: TypeAlias = Literal["csim", "rtlsim"]

TOLERANCE: Final = 1e-5
"""Tolerance relative to the largest output: rounding of fp32 sums stays below, any fault does
not."""
_MOST_TOKENS: Final = 32768
_CLOSE_S: Final = 10


def simulate(
    backend: Annotated[
        str,
        typer.Option(
            help="Simulator: csim runs the HLS kernels, built by g++; rtlsim runs "
            "the RTL clock by clock."
        ),
    ] = "csim",
    tokens: Annotated[
        str, typer.Option(help="Tokens of the contexts.")
    ] = "1,16,77,128,512,1024,4096",
    head_size: HeadSizeOption = 128,
    group: GroupOption = 1,
    dtype: DtypeOption = "float16",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random queries, K and V.")] = 0,
    checksum: Annotated[
        bool, typer.Option("--checksum", help="Also compare the digests of all pages.")
    ] = False,
    stalls: Annotated[
        float,
        typer.Option(
            min=0, max=0.9, help="Probability per cycle that a bus is held back (rtlsim)."
        ),
    ] = 0,
    latency: Annotated[
        int, typer.Option(min=1, max=4096, help="Memory latency in cycles (rtlsim).")
    ] = 64,
    as_json: arguments.Json = False,
) -> None:
    """Run the attention kernels on random contexts and compare them with float64.

    Pages lie in random order, and the last one of a context may be partial. The error is the
    largest distance from float64 over the largest output. `rtlsim` counts cycles; `make fpga`
    builds its libraries. Exits with 1 when a context is off by more than 1e-5 of its largest
    output, or a digest is wrong.
    """
    arguments.one_of("--backend", backend, get_args(BackendName))
    lengths = arguments.whole_numbers("--tokens", tokens, 1, _MOST_TOKENS)
    shape = shape_of(head_size, group, dtype)
    if backend == "csim" and (stalls or latency != 64):
        raise typer.BadParameter("csim has no bus", param_hint="--stalls, --latency")
    rows: list[Row] = []
    try:
        with (
            _opened(backend, shape, seed, stalls, latency) as kernels,
            Progress(console=Console(stderr=True), transient=True) as progress,
        ):
            for length in progress.track(lengths, description="simulating"):
                rows.append(_trial(kernels, length, seed, checksum=checksum))
    except SSDKVError as error:
        typer.echo(f"ssdkv lab fpga simulate: {error}", err=True)
        raise typer.Exit(1) from error
    sizes = {"head_size": head_size, "group": group, "dtype": dtype, "seed": seed}
    document = {"backend": backend, **sizes, "rows": rows}
    print_tables([trials_table(document)], as_json=as_json, beside=document)
    wrong = [row for row in rows if not row["holds"]]
    for row in wrong:
        typer.echo(f"failed: {row['tokens']} tokens, error {row['error']:.2e}", err=True)
    if wrong:
        raise typer.Exit(1)


@contextmanager
def _opened(
    name: str, shape: KernelShape, seed: int, stalls: float, latency: int
) -> Iterator[Backend]:
    """The backend for as long as the block lasts."""
    from vllm_ssdkv.fpga_offload.csim import CsimBackend
    from vllm_ssdkv.fpga_offload.rtlsim import RtlsimBackend

    backend: CsimBackend | RtlsimBackend
    if name == "csim":
        backend = CsimBackend(shape)
    else:
        try:
            backend = RtlsimBackend(shape)
        except FpgaError as error:
            raise FpgaError(f"{error}; `make fpga` in a checkout brings the tools") from error
        backend.set_memory(seed=seed, stalls=stalls, latency=latency)
    try:
        yield backend
    finally:
        backend.close(_CLOSE_S)


def _trial(kernels: Backend, length: int, seed: int, *, checksum: bool) -> Row:
    """A context of so many tokens, as a row of the JSON document."""
    from vllm_ssdkv.fpga_offload.trial import random_problem, run_problem

    problem = random_problem(kernels.shape, length, seed=seed, checksum=checksum)
    began = time.perf_counter()
    found = run_problem(kernels, problem)
    seconds = time.perf_counter() - began
    cycles = found.cycles
    return {
        "tokens": length,
        "error": found.error,
        "wrong_digests": found.wrong_digests,
        "cycles": None if cycles is None else cycles.cycles,
        "line_rate": None if cycles is None else cycles.line_rate,
        "seconds": seconds,
        "holds": found.error <= TOLERANCE and not found.wrong_digests,
    }
