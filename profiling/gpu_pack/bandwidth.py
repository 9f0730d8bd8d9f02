"""The stage ``bandwidth``: each kernel's bytes per second as a share of a plain copy's."""

from __future__ import annotations

import itertools

import torch

from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.kernels.dense import TritonKernels
from vllm_ssdkv.profiling import bench_triton
from vllm_ssdkv.profiling.gpu_pack.results import NO_TIME, TIMED, Figure, Row
from vllm_ssdkv.profiling.gpu_pack.stage import StageRun
from vllm_ssdkv.profiling.triton_checks import Model

_MODEL = Model(8, 4, 128, 64, torch.bfloat16)
_SMALL = Model(1, 2, 16, 16, torch.bfloat16)
_HOST_CELLS = ((32 * 1024, 1), (32 * 1024, 8), (128 * 1024, 1))
_PACKED = 64
_COPIED = 1024 * MIB

_PACKING = "pack and unpack"
_IN_DEVICE = "a copy in the device"
_FROM_HOST = "a copy from the host"


def run(run: StageRun) -> None:
    """Measure copies, then decode and the kernels of sparse decode, then pack and unpack.

    Raises ``RuntimeError`` where there is no GPU.
    """
    device = run.device
    model = _SMALL if run.rehearsal else _MODEL
    contexts = (64, 128) if run.rehearsal else bench_triton.CONTEXTS
    batches = (1, 2) if run.rehearsal else bench_triton.BATCHES
    copied = MIB if run.rehearsal else _COPIED
    rates = _rates(run, device, copied)
    if rates is None:
        return
    copy, bus = rates
    kernels = TritonKernels(device)
    for batch, context in itertools.product(batches, contexts):
        for kind in ("decode", "sparse decode"):
            name = f"{kind}, context {context}, batch {batch}"
            if run.is_done(name):
                continue
            if run.left() < 1:
                run.failed(name, NO_TIME)
                continue
            with run.case(name) as case:
                if kind == "decode":
                    figure = bench_triton.decode_figure(kernels, model, context, batch, copy)
                    case.figures += _figures(figure, _IN_DEVICE)
                    continue
                for figure in bench_triton.sparse_figures(device, model, context, batch, copy):
                    _tell(run, figure)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    for context, batch in _HOST_CELLS if not run.rehearsal else ((64, 1),):
        name = f"attend to pages of the host, context {context}, batch {batch}"
        if run.is_done(name):
            continue
        with run.case(name) as case:
            figure = bench_triton.host_pages_figure(device, model, context, batch, bus)
            case.figures += _figures(figure, _FROM_HOST)
    if run.is_done(_PACKING):
        return
    with run.case(_PACKING):
        blocks = 1 if run.rehearsal else _PACKED
        for figure in bench_triton.pack_figures(kernels, model, blocks, copy):
            _tell(run, figure)


def _rates(run: StageRun, device: torch.device, nbytes: int) -> tuple[float, float] | None:
    """Bytes per second of a copy in the device, read and written, and of one from the host."""
    found = {}
    with run.case("plain copies") as case:
        found = {
            "in the device": bench_triton.copy_rate(device, nbytes),
            "host to device": bench_triton.bus_rate(device, nbytes, to_device=True),
            "device to host": bench_triton.bus_rate(device, nbytes, to_device=False),
        }
        for name, rate in found.items():
            case.figure(name, rate / 1e9, "GB/s")
    return (found["in the device"], found["host to device"]) if found else None


def _tell(run: StageRun, figure: bench_triton.Figure) -> None:
    """Append a figure as a result of its own."""
    run.append(Row(run.name, figure.name, figures=_figures(figure, _IN_DEVICE)))


def _figures(figure: bench_triton.Figure, whole: str) -> list[Figure]:
    """Its parts; ``whole`` is the copy that it is a share of."""
    return [
        Figure("rate", figure.bytes_moved / figure.seconds / 1e9, "GB/s"),
        Figure(f"share of {whole}", figure.copy_share),
        Figure("time", figure.seconds * 1e6, "us"),
        Figure(TIMED, "CUDA graph" if figure.in_graph else "calls"),
    ]
