"""Cost of bringing completed blocks from HBM to frames, with what selectors need and without.

Blocks of all layers are packed into frames as the end of a step does it: pages alone (``exact``),
with their bounds, with mean and variance, with channel-major K; ``keys`` puts
tokens with alike K into one page. Medians of ``--repeat`` runs, in turns, so that a noisy machine
disturbs all alike; each is told as a multiple of ``exact`` in the same run.
``tails`` are made again from frames, on one thread, as the writer does it for the devices.
``small`` is one block of the model that `ssdkv demo` makes: there, what a call costs whatever it
copies is most of it. ``text`` and ``text512`` are 512 tokens of the model of `make text-model`.

    python -m vllm_ssdkv.profiling.bench_pack --threads 2
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from vllm_ssdkv import _kernels
from vllm_ssdkv.connector.worker.block_copy import LeavingBlocks
from vllm_ssdkv.connector.worker.paged_port import PagedPort
from vllm_ssdkv.connector.worker.token_ordering import TokenOrdering
from vllm_ssdkv.kernels.dense import select_kernels
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.kernels.summary_builder import KernelSummaryBuilder
from vllm_ssdkv.profiling.rig.measure import by_turns, timed, write_json
from vllm_ssdkv.store.cache.frames import FrameCache
from vllm_ssdkv.store.format.slot_geometry import PAGE_ALIGN, SlotGeometry, round_up
from vllm_ssdkv.store.memory.arena import Arena
from vllm_ssdkv.store.memory.summary_rows import (
    SummaryRows,
    channels_offset,
    row_bytes,
    with_summaries,
)

ROTATION = 4
"""Number of times that the blocks of a call, and the frames, exist: calls in a row find neither in
the processor's cache, as in steps."""


@dataclass(frozen=True, slots=True)
class Shape:
    """``blocks`` complete in one step, in bfloat16."""

    blocks: int
    layers: int
    heads: int
    head_size: int
    block_tokens: int = 64
    page_tokens: int = 16


SHAPES = {
    "large": Shape(8, 32, 8, 128),
    "small": Shape(1, 3, 2, 64),
    "text": Shape(4, 30, 3, 64, 128),
    "text512": Shape(1, 30, 3, 64, 512),
}


def geometries(shape: Shape) -> dict[str, SlotGeometry]:
    """Geometries of a slot, by how pages are chosen."""
    payload = 2 * shape.page_tokens * shape.head_size * torch.bfloat16.itemsize
    groups = shape.block_tokens // shape.page_tokens
    pages = SlotGeometry("paged", shape.layers, shape.heads, groups, payload)
    return {
        "exact": pages,
        "bounds": with_summaries(pages, shape.page_tokens, channels=False),
        "spread": with_summaries(pages, shape.page_tokens, channels=False, record="spread"),
        "channels": with_summaries(pages, shape.page_tokens, channels=True),
    }


def calls(
    shape: Shape, geometry: SlotGeometry, caches: list[torch.Tensor], *, ordered: bool
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Packs other blocks into other frames with each call; and makes the tails of other frames."""
    layout = BlockLayout.unpadded(
        shape.block_tokens, shape.page_tokens, shape.heads, shape.head_size, torch.bfloat16
    )
    count = shape.blocks * ROTATION
    rows_at = count * geometry.frame_bytes
    with_keys = geometry.channel_pages > 0
    size = row_bytes(geometry, shape.page_tokens, channels=with_keys)
    behind = rows_at + shape.blocks * size
    arena = Arena(round_up(behind + shape.blocks * geometry.tail_bytes, PAGE_ALIGN))
    arena.view(0, arena.nbytes).fill(0)
    frames = FrameCache(arena, 0, geometry.frame_bytes, count, count)
    steps = np.arange(shape.blocks, dtype=np.uint64) * np.uint64(geometry.tail_bytes)
    tails = np.uint64(arena.address + behind) + steps
    rows = None
    if geometry.tail_pages:
        places = np.arange(shape.blocks, dtype=np.uint64) * np.uint64(size)
        channels = channels_offset(geometry, shape.page_tokens) if with_keys else -1
        rows = SummaryRows(np.uint64(arena.address + rows_at) + places, channels)
    ordering = None
    if ordered:
        layers = shape.layers
        ordering = TokenOrdering(layout, layers, range(layers), 16, by_co_activation=False)
    kernels = select_kernels(torch.device("cpu"))
    port = PagedPort(kernels, caches, layout, geometry, frames, ordering)
    summaries = KernelSummaryBuilder(layout, geometry)
    turns = itertools.cycle(np.arange(count).reshape(ROTATION, -1))

    def pack() -> None:
        ids = next(turns)
        port.save(LeavingBlocks(ids, ids.astype(np.int32), rows, ids))

    def make_tails() -> None:
        summaries.make_tails(frames.address(next(turns).astype(np.int32)), tails)

    return pack, make_tails


def measure(shape: Shape, repeat: int) -> dict[str, list[float]]:
    """Seconds of each run, by how pages are chosen; they take turns."""
    size = 2 * shape.block_tokens * shape.heads * shape.head_size
    caches = [
        torch.randn(shape.blocks * ROTATION, size).to(torch.bfloat16) for _ in range(shape.layers)
    ]
    turns: dict[str, Callable[[], float]] = {}
    for name, held in geometries(shape).items():
        pack, make_tails = calls(shape, held, caches, ordered=False)
        turns[name] = timed(pack)
        if held.tail_pages:
            pack, _ = calls(shape, held, caches, ordered=True)
            turns |= {f"{name}: keys": timed(pack), f"{name}: tails": timed(make_tails)}
    return by_turns(turns, repeat, warm_up=ROTATION)


def report(name: str, shape: Shape, medians: Mapping[str, float]) -> None:
    """Print a line per way of choosing."""
    print(f"{name}: {shape}")
    for kind, median in medians.items():
        ratio = median / medians["exact"]
        print(f"  {kind:20} {median * 1e3:8.3f} ms  {ratio:5.2f} of exact")


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeat", type=int, default=25)
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--isa", choices=_kernels.isas(), default=_kernels.isa())
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    _kernels.set_isa(options.isa)
    print(f"{_kernels.isa()}, {options.threads} threads, medians of {options.repeat}")
    figures = {}
    for name in options.shapes:
        seconds = measure(SHAPES[name], options.repeat)
        figures[name] = {kind: statistics.median(runs) for kind, runs in seconds.items()}
        report(name, SHAPES[name], figures[name])
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
