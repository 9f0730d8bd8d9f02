"""Checks the compiled Triton kernels on a GPU, then measures them against a device copy.

    python -m vllm_ssdkv.profiling.bench_triton [--heads 8 --group 4 --head-size 128] [--json FILE]

Every kernel is first compared with its oracle; only then is anything timed. A figure is bytes that
have to move (each key, value, query and output once) per second, and its share of what a plain
device-to-device copy reaches in the same run (bytes read plus bytes written). Sparse decode attends
to an eighth of the pages and scores by an eighth of the channels, as the options' defaults do; all
of it lies in the device's memory, so that the kernels are measured and not the bus. PyTorch,
Triton, NumPy and this package with its native kernels are needed; vLLM is not.

``scripts/gpu/run.sh`` runs the same in its stages; docs/gpu.md has what was measured.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
import triton

from vllm_ssdkv.kernels.dense import AttentionKernels, TritonKernels
from vllm_ssdkv.kernels.operands.block_layout import (
    BlockSource,
    IntArray,
    PartialState,
    Rows,
    on_device,
)
from vllm_ssdkv.kernels.operands.page_list import PageList
from vllm_ssdkv.kernels.paged import TritonPageKernels
from vllm_ssdkv.profiling.sparse_problem import SparseProblem
from vllm_ssdkv.profiling.triton_checks import (
    PAGE_ALIGN,
    CheckError,
    Model,
    check_attention,
    check_copies,
    check_sparse,
)

CONTEXTS = (32 * 1024, 128 * 1024)
BATCHES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the result: bytes moved, median seconds, and share of the copy's rate.

    ``in_graph``: these are seconds of kernels in a CUDA graph, and not of calls from the host.
    """

    name: str
    bytes_moved: int
    seconds: float
    copy_share: float
    in_graph: bool = False


def seconds_of(work: Callable[[], object]) -> float:
    """Median seconds of ``work`` on the current CUDA stream, warm, with the L2 cache flushed.

    Without a GPU, where times say nothing, ``work`` is done once.
    """
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    return float(triton.testing.do_bench(work, return_mode="median")) / 1e3


def graph_seconds_of(work: Callable[[], object]) -> float:
    """Median seconds of ``work`` as a CUDA graph: several short launches wait for no host.

    It may take nothing from the host's memory. Without a GPU as :func:`seconds_of`.
    """
    if not torch.cuda.is_available():
        return seconds_of(work)
    work()  # what has to be compiled cannot be captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return seconds_of(graph.replay)


def copy_rate(device: torch.device, nbytes: int) -> float:
    """Bytes per second, read and written, of a copy of ``nbytes`` inside the device."""
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / seconds_of(lambda: target.copy_(source))


def bus_rate(device: torch.device, nbytes: int, *, to_device: bool) -> float:
    """Bytes per second of a copy of ``nbytes`` between pinned host memory and the device."""
    host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    source, target = (host, there) if to_device else (there, host)
    return nbytes / seconds_of(lambda: target.copy_(source, non_blocking=True))


def host_pages_figure(
    device: torch.device, model: Model, context: int, batch: int, rate: float
) -> Figure:
    """Attention to an eighth of the pages of contexts in pinned host memory, which the kernel reads
    over the bus; ``rate`` is that of a copy to the device."""
    from vllm_ssdkv.triton_kernels.attend import attend_pages

    layout, kernels = model.layout(), TritonPageKernels(device)
    blocks = batch * (context // layout.block_tokens + 1)
    size = layout.block_bytes // layout.dtype.itemsize
    memory = torch.zeros((blocks, size), dtype=layout.dtype, pin_memory=device.type == "cuda")
    shape = (batch, model.heads * model.group, model.head_size)
    query = torch.randn(shape, device=device).to(model.dtype)
    problem = SparseProblem.of(layout, query, memory.to(device), kernels)
    pages = int(problem.summaries.pages[0])
    selection = problem.random_selection(max(1, pages // 8) / pages, seed=1)
    listed = _on(device, problem.page_list(selection, memory))
    state = PartialState.empty(*shape, device)

    def work() -> None:
        attend_pages(
            query, state, listed, layout=layout, scale=problem.scale, max_pages=max(1, pages // 8)
        )

    seconds = graph_seconds_of(work)
    moved = len(selection.pages) * layout.page_payload_bytes
    name = f"attend to pages of the host, context {context}, batch {batch}"
    return Figure(name, moved, seconds, moved / seconds / rate, device.type == "cuda")


def _there(device: torch.device, values: IntArray | None, dtype: torch.dtype) -> torch.Tensor:
    return on_device(np.zeros(0, np.int64) if values is None else values, dtype, device)


def _on(device: torch.device, listed: PageList) -> PageList:
    """The same list on the device, so that a call needs nothing of the host."""
    return PageList(
        _there(device, listed.query_token, torch.int32),
        _there(device, listed.query_position, torch.int64),
        _there(device, listed.begin, torch.int32),
        _there(device, listed.end, torch.int32),
        _there(device, listed.address, torch.int64),
        _there(device, listed.position, torch.int64),
    )


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
    seconds = graph_seconds_of(step)
    name = f"decode, context {context}, batch {batch}"
    return Figure(name, moved, seconds, moved / seconds / rate, device.type == "cuda")


def sparse_figures(
    device: torch.device, model: Model, context: int, batch: int, rate: float
) -> list[Figure]:
    """The kernels of one sparse decode step of one layer, each on its own."""
    from vllm_ssdkv.triton_kernels import choose, score, tokens
    from vllm_ssdkv.triton_kernels.attend import attend_pages

    layout, kernels = model.layout(), TritonPageKernels(device)
    blocks = batch * (context // layout.block_tokens + 1)
    size = layout.block_bytes // layout.dtype.itemsize
    cache = torch.empty((blocks, size), dtype=layout.dtype, device=device).normal_()
    shape = (batch, model.heads * model.group, model.head_size)
    query = torch.randn(shape, device=device).to(model.dtype)
    problem = SparseProblem.of(layout, query, cache, kernels)
    held, scale, share = problem.summaries, problem.scale, 1 / 8
    channels = max(1, model.head_size // 8)
    pages = int(held.pages[0])
    every = int((held.context_tokens + held.window_tokens)[0])
    most = max(1, int(pages * share))

    there = functools.partial(_there, device)
    rows = there(held.row_begin, torch.int32), there(held.row_end, torch.int32)
    bounds = there(held.bounds_base, torch.int64)
    window = there(held.window_tokens, torch.int32)
    ends = there(held.context_tokens, torch.int32)
    places = (
        there(held.channel_base, torch.int64),
        there(held.window_begin, torch.int32),
        window,
        there(held.window_base, torch.int64),
    )
    parts = score.choose_channels(query, layout, channels, scale)

    bound = torch.empty((*shape[:2], pages), device=device)

    def by_bounds() -> None:
        score.page_logits(query, *rows, bounds, bound, layout=layout, scale=scale, spread=False)

    def by_channels() -> torch.Tensor:
        return score.channel_logits(
            *parts, *rows, *places, layout=layout, picked=False, max_tokens=every
        )

    logits = by_channels()

    def by_tokens() -> tuple[torch.Tensor, ...]:
        return tokens.score_tokens(
            logits,
            ends,
            kv_heads=layout.kv_heads,
            page_tokens=layout.page_tokens,
            max_columns=pages,
        )

    table, mass, seen, lse = by_tokens()
    columns = there(held.pages, torch.int32)
    limit = torch.full_like(columns, most)

    def by_scores(p: float) -> object:
        return choose.choose(
            table, mass, seen, columns, 0 * limit, limit, max_chosen=most, sinks=1, p=p
        )

    selection = problem.random_selection(most / pages, seed=1)
    begin, chosen = there(selection.begin, torch.int32), there(selection.pages, torch.int32)

    def covered() -> torch.Tensor:
        return tokens.cover(
            logits, lse, ends, window, chosen, begin, None, page_tokens=layout.page_tokens
        )

    listed = _on(device, problem.page_list(selection, cache))
    state = PartialState.empty(*shape, device)

    def over_pages() -> None:
        attend_pages(query, state, listed, layout=layout, scale=scale, max_pages=most)

    summaries = problem.bounds, problem.channels, problem.value_sum
    targets = [
        part.data_ptr() + torch.arange(len(part), device=device) * (part[0].numel() * part.itemsize)
        for part in summaries
    ]
    first = torch.arange(blocks, device=device).view(batch, -1)[:, :-1].flatten()
    source = cache.data_ptr() + first * (size * cache.itemsize)

    def kept() -> None:
        kernels.summarize(
            source, layout, bounds=targets[0], channels=targets[1], value_sum=targets[2]
        )

    picked = int(_nbytes(problem.channels) * channels / model.head_size)
    chosen_mass = batch * shape[1] * most * layout.page_tokens * 4
    work: list[tuple[str, Callable[[], object], int]] = [
        ("summarize", kept, len(source) * layout.block_bytes + _nbytes(*summaries)),
        ("score by bounds", by_bounds, _nbytes(problem.bounds, query, bound)),
        ("score by channels", by_channels, picked + _nbytes(*parts, logits)),
        ("score tokens", by_tokens, 2 * _nbytes(logits) + _nbytes(table, mass)),
        ("choose top-k", lambda: by_scores(1.0), _nbytes(table, mass)),
        ("choose top-p", lambda: by_scores(0.9), _nbytes(table, mass)),
        ("cover", covered, chosen_mass),
        ("attend to pages", over_pages, len(chosen) * layout.page_payload_bytes + _nbytes(query)),
    ]
    figures = []
    for name, step, moved in work:
        seconds = graph_seconds_of(step)
        label = f"{name}, context {context}, batch {batch}"
        share = moved / seconds / rate
        figures.append(Figure(label, moved, seconds, share, device.type == "cuda"))
    return figures


def _nbytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


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
    check_sparse(device, model)
    rate = copy_rate(device, copy_bytes)
    kernels = TritonKernels(device)
    figures = [Figure("device copy", 2 * copy_bytes, 2 * copy_bytes / rate, 1.0)]
    for context in contexts:
        for batch in batches:
            try:
                figures.append(decode_figure(kernels, model, context, batch, rate))
                figures += sparse_figures(device, model, context, batch, rate)
            except torch.OutOfMemoryError:
                print(f"context {context}, batch {batch}: does not fit", file=sys.stderr)
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
    parser.add_argument("--json", type=Path, help="also write the results to this file")
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
    where = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    report(where, model, figures)
    if options.json:
        held = {**where, "model": str(model), "figures": [asdict(figure) for figure in figures]}
        options.json.write_text(json.dumps(held, indent=1))


def report(where: Mapping[str, str], model: Model, figures: Sequence[Figure]) -> None:
    """Print the table: when, on what, with what, then a line per figure."""
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    print(f"{model}; all kernels agree with their oracles")
    print(f"{'':<48}{'GB/s':>10}{'of copy':>10}{'us':>12}")
    for figure in figures:
        gigabytes = figure.bytes_moved / figure.seconds / 1e9
        print(
            f"{figure.name:<48}{gigabytes:>10.1f}{figure.copy_share:>10.2f}"
            f"{figure.seconds * 1e6:>12.1f}"
        )


if __name__ == "__main__":
    main()
