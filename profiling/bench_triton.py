"""Checks the compiled Triton kernels on a GPU, then measures them against a device copy.

    python -m vllm_ssdkv.profiling.bench_triton [--heads 8 --group 4 --head-size 128] [--json FILE]

Every kernel is first compared with its oracle; only then is anything timed. A figure is bytes that
have to move (each key, value, query and output once) per second, and its share of what a plain
device-to-device copy reaches in the same run (bytes read plus bytes written).

Not measured: no GPU has run this script yet. The kernels are tested in Triton's interpreter and
compiled for compute capabilities 8.0 and 9.0, which says nothing about speed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import triton

from vllm_ssdkv.attention.blocks import BlockLayout, BlockSource, PartialState, Rows
from vllm_ssdkv.attention.kernels import AttentionKernels, CpuKernels, TritonKernels
from vllm_ssdkv.attention.merge import merge as merge_finished
from vllm_ssdkv.profiling.attention_problem import RowShape, attention_problem

PAGE_ALIGN = 4096
CONTEXTS = (32 * 1024, 128 * 1024)
BATCHES = (1, 2, 4, 8, 16, 32)
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Absolute, on values of about 1: inputs are exact, weights and outputs are rounded."""


class CheckError(Exception):
    """A compiled kernel does not compute what its oracle does; nothing is timed then."""


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of one attention layer."""

    heads: int
    group: int
    head_size: int
    block_tokens: int
    dtype: torch.dtype

    def layout(self) -> BlockLayout:
        """Blocks as vLLM's cache holds them."""
        return BlockLayout.unpadded(
            self.block_tokens, min(16, self.block_tokens), self.heads, self.head_size, self.dtype
        )


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the result: bytes moved, median seconds, and share of the copy's rate."""

    name: str
    bytes_moved: int
    seconds: float
    copy_share: float


def expect(name: str, got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    """Raise ``CheckError`` if ``got`` is not close to ``want`` (any devices and dtypes)."""
    got, want = got.double().cpu(), want.double().cpu()
    if not torch.allclose(got, want, atol=tolerance, rtol=tolerance):
        worst = float((got - want).nan_to_num(torch.inf, torch.inf, -torch.inf).abs().max())
        raise CheckError(f"{name}: differs from its oracle by up to {worst:.3g}")


def check_attention(device: torch.device, model: Model) -> None:
    """``attend`` (split and not), ``finish`` and ``merge`` against the definition."""
    from vllm_ssdkv.triton_kernels.attend import attend
    from vllm_ssdkv.triton_kernels.finish import finish
    from vllm_ssdkv.triton_kernels.merge import merge

    shapes = [RowShape(1, 500, 0, 501), RowShape(40, 30, 0, 70), RowShape(3, 50, 0, 0)]
    dtypes = dict.fromkeys((model.dtype, torch.float32))
    for dtype in dtypes:
        tolerance = TOLERANCE[dtype]
        layout = Model(
            model.heads, model.group, model.head_size, model.block_tokens, dtype
        ).layout()
        padded = layout.with_page_stride(layout.page_stride_bytes + PAGE_ALIGN)
        for pages in (layout, padded):
            problem = attention_problem(pages, model.group, shapes, seed=1, idle_tokens=1)
            want, want_lse = problem.expected()
            there = problem.to(device)
            source = there.source().to(device)
            for splits in (1, 3):
                state = there.state()
                attend(
                    there.query,
                    state,
                    there.rows,
                    cache=there.cache,
                    block_offset=torch.as_tensor(source.base),
                    block_position=torch.as_tensor(source.position),
                    layout=pages,
                    scale=there.scale,
                    splits=splits,
                )
                out = torch.empty_like(there.query)
                lse = torch.empty(out.shape[:2], device=device)
                finish(state, out, lse)
                name = f"attend and finish, {dtype}, {splits} splits"
                expect(name, out, want, tolerance)
                seen = ~torch.isinf(want_lse)
                expect(f"{name}, lse", lse.cpu()[seen], want_lse[seen], 1e-3)

    outs = torch.randn((20, 3, model.heads, model.head_size), device=device)
    lses = torch.randn((20, 3, model.heads), device=device)
    state = PartialState.empty(3, model.heads, model.head_size, device)
    merge(state, lses, None, outs)
    want, want_lse = merge_finished(outs, lses)
    expect("merge", state.acc / state.l[..., None], want, 1e-4)
    expect("merge, lse", state.m + state.l.log(), want_lse, 1e-4)


def check_copies(device: torch.device, model: Model) -> None:
    """``store_kv``, ``pack`` and ``unpack`` give the bytes that the native kernels give."""
    layout = model.layout()
    slots = layout.with_page_stride(layout.page_stride_bytes + PAGE_ALIGN)
    key, value = torch.randn((2, 50, model.heads, model.head_size)).to(model.dtype)
    mapping = torch.randperm(8 * model.block_tokens)[:50]
    mapping[min(3, len(mapping) - 1)] = -1
    results = []
    for kernels in (CpuKernels(), TritonKernels(device)):
        here = kernels.device
        caches = [
            torch.zeros((8, layout.block_bytes // model.dtype.itemsize), dtype=model.dtype).to(here)
            for _ in range(2)
        ]
        for cache in caches:
            count = len(mapping)
            kernels.store_kv(key[:count].to(here), value[:count].to(here), cache, mapping, layout)
        held = torch.full((5, 2 * slots.block_bytes), 255, dtype=torch.uint8, device=here)
        address = held.data_ptr() + np.arange(5) * held.shape[1]
        ids = np.array([7, 0, 3, 2, 5])
        kernels.pack(caches, ids, address, slots.block_bytes, layout, slots)
        back = [torch.zeros_like(cache) for cache in caches]
        kernels.unpack(back, ids, address, slots.block_bytes, layout, slots)
        results.append([*caches, held, *back])
    for name, want, got in zip(
        ("store_kv", "store_kv", "pack", "unpack", "unpack"), *results, strict=True
    ):
        expect(name, got, want, 0.0)


def seconds_of(work: Callable[[], object]) -> float:
    """Median seconds of ``work`` on the current CUDA stream, warm, with the L2 cache flushed."""
    return float(triton.testing.do_bench(work, return_mode="median")) / 1e3


def copy_rate(device: torch.device, nbytes: int) -> float:
    """Bytes per second, read and written, of a copy of ``nbytes`` inside the device."""
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / seconds_of(lambda: target.copy_(source))


def decode_figure(
    kernels: AttentionKernels, model: Model, context: int, batch: int, rate: float
) -> Figure:
    """One decode step of one layer: ``batch`` requests with ``context`` tokens each."""
    layout = model.layout()
    device = kernels.device
    each = context // layout.block_tokens
    total = batch * each
    cache = torch.empty(
        (total, layout.block_bytes // layout.dtype.itemsize), dtype=layout.dtype, device=device
    ).normal_()
    position = np.tile(np.arange(each) * layout.block_tokens, batch)
    ids = np.random.default_rng(1).permutation(total)
    source = BlockSource.of_cache(cache, ids, position).to(device)
    edges = np.arange(batch + 1) * each
    rows = Rows.build(
        np.arange(batch), np.ones(batch, int), np.full(batch, context - 1), edges[:-1], edges[1:]
    ).to(device)
    shape = (batch, model.heads * model.group, model.head_size)
    query = torch.randn(shape, device=device).to(model.dtype)
    out = torch.empty_like(query)
    state = PartialState.empty(*shape, device)

    def step() -> None:
        state.m.fill_(-torch.inf)
        state.l.zero_()
        state.acc.zero_()
        kernels.attend(query, state, rows, source, layout, model.head_size**-0.5)
        kernels.finish(state, out)

    moved = total * layout.block_bytes + 2 * query.numel() * query.itemsize
    seconds = seconds_of(step)
    return Figure(
        f"decode, context {context}, batch {batch}", moved, seconds, moved / seconds / rate
    )


def pack_figures(kernels: AttentionKernels, model: Model, blocks: int, rate: float) -> list[Figure]:
    """Pack and unpack of ``blocks`` blocks of 8 layers, in one launch each."""
    layout, device, layers = model.layout(), kernels.device, 8
    stride = -(-layout.page_stride_bytes // PAGE_ALIGN) * PAGE_ALIGN
    slots = layout.with_page_stride(stride)
    size = layout.block_bytes // layout.dtype.itemsize
    caches = [torch.zeros((blocks, size), dtype=layout.dtype, device=device) for _ in range(layers)]
    held = torch.zeros((blocks, layers * slots.block_bytes), dtype=torch.uint8, device=device)
    address = held.data_ptr() + np.arange(blocks) * held.shape[1]
    ids = np.random.default_rng(1).permutation(blocks)
    moved = layers * blocks * (layout.block_bytes + slots.block_bytes)
    figures = []
    for name, copy in (("pack", kernels.pack), ("unpack", kernels.unpack)):

        def work(copy: Callable[..., None] = copy) -> None:
            copy(caches, ids, address, slots.block_bytes, layout, slots)

        seconds = seconds_of(work)
        figures.append(Figure(f"{name}, {blocks} blocks", moved, seconds, moved / seconds / rate))
    return figures


def measure(
    device: torch.device,
    model: Model,
    contexts: Sequence[int],
    batches: Sequence[int],
    pack_blocks: int,
    copy_bytes: int,
) -> list[Figure]:
    """Check every kernel, then time it; a size that does not fit the device's memory is left out.

    Raises ``CheckError`` before any timing if a kernel is wrong.
    """
    check_attention(device, model)
    check_copies(device, model)
    rate = copy_rate(device, copy_bytes)
    kernels = TritonKernels(device)
    figures = [Figure("device copy", 2 * copy_bytes, 2 * copy_bytes / rate, 1.0)]
    for context in contexts:
        for batch in batches:
            try:
                figures.append(decode_figure(kernels, model, context, batch, rate))
            except torch.OutOfMemoryError:
                print(f"decode, context {context}, batch {batch}: does not fit", file=sys.stderr)
    return figures + pack_figures(kernels, model, pack_blocks, rate)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point; exits with status 2 if there is no GPU and 1 if a kernel is wrong."""
    parser = argparse.ArgumentParser(description="check and measure the Triton kernels on a GPU")
    parser.add_argument("--heads", type=int, default=8, help="KV heads (default 8)")
    parser.add_argument("--group", type=int, default=4, help="query heads per KV head (default 4)")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--block-tokens", type=int, default=64)
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("no CUDA GPU: this script measures compiled kernels and cannot run without")
    device = torch.device("cuda", torch.cuda.current_device())
    model = Model(
        options.heads, options.group, options.head_size, options.block_tokens, torch.bfloat16
    )
    try:
        figures = measure(device, model, options.contexts, options.batches, 64, 2**30)
    except CheckError as error:
        raise SystemExit(f"bench_triton: {error}") from error
    print(f"{torch.cuda.get_device_name(device)}; all kernels agree with their oracles")
    print(f"{'':<36}{'GB/s':>10}{'of copy':>10}{'us':>12}")
    for figure in figures:
        gigabytes = figure.bytes_moved / figure.seconds / 1e9
        print(
            f"{figure.name:<36}{gigabytes:>10.1f}{figure.copy_share:>10.2f}"
            f"{figure.seconds * 1e6:>12.1f}"
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=1))


if __name__ == "__main__":
    main()
