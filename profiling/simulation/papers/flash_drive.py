"""Inside of InstInfer's drive: two address maps, eight channels, reclaim by field range.

Which pages a query chooses is in no paper: here they are drawn at random, with a fixed seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Final

import numpy as np

from vllm_ssdkv.offload.testing.flash import FlashTiming
from vllm_ssdkv.profiling.simulation.hardware import NearStorage, find
from vllm_ssdkv.profiling.simulation.model_shape import find_model
from vllm_ssdkv.profiling.simulation.papers.instinfer import MODEL
from vllm_ssdkv.profiling.simulation.systems import CONTEXT
from vllm_ssdkv.profiling.simulation.translation import FlashCounts, Translation
from vllm_ssdkv.profiling.table import Table

CHANNELS_OF_K: Final = 16
"""Channels of K that SparF reads, of 128."""
GROUPS: Final = (2, 4, 8)
"""Channels of K in a page that is stored by channel."""
BUDGET: Final = 8
"""One of so many pages by token is chosen."""
RUNNING: Final = 16
"""Contexts beside each other, in the run of the address maps."""
ENDED: Final = 64
"""Contexts that end in it."""
PAGES: Final = 256
"""Pages by token of the longest context in it: one layer, few heads. Half of them are a prompt."""
BLOCK_PAGES: Final = 16
"""Pages of an erase block, as small for them as real ones are for a whole context."""
FLASH: Final = 0.85
"""Flash, over the pages of so many contexts of the greatest length: little more than live ones."""


def _flash() -> FlashTiming:
    return find(NearStorage, "instinfer-csd").drive.flash


def by_token(share: int = 1) -> float:
    """Bytes/s of reading one of ``share`` of the pages of each head, K and V, of a layer."""
    flash, model = _flash(), find_model(MODEL)
    tokens = flash.page_bytes // (2 * model.head_size)
    pages, draw = CONTEXT // tokens, random.Random(1)
    loads = np.zeros(flash.channels, np.int64)
    for head in range(2 * model.kv_heads):
        chosen = draw.sample(range(pages), pages // share)
        loads += np.bincount(flash.channel(chosen, head), minlength=flash.channels)
    return float(loads.sum()) * flash.page_bytes / flash.read_pages_s(loads)


def by_channel(group: int) -> float:
    """Part of the pages by channel that has one of the channels which SparF reads, on the mean."""
    head = find_model(MODEL).head_size
    return 1 - math.comb(head - group, CHANNELS_OF_K) / math.comb(head, CHANNELS_OF_K)


@cache
def contexts(*, ranges: bool) -> FlashCounts:
    """Work of a drive that stores contexts as they begin and end, by token, and K by channel.

    A prompt is written at once. Then all contexts get pages in turn. ``ranges``: each context has
    field ranges of its own. Else all of them share the blocks of two maps.
    """
    draw, sizes = random.Random(2), {"tokens": PAGES, "channels": PAGES // 2}
    places = range(RUNNING)
    if ranges:
        logical = {f"{place} {name}": sizes[name] for place in places for name in sizes}
    else:
        logical = {name: RUNNING * pages for name, pages in sizes.items()}
    # Each of the ranges has an open block; the shared ones get as many.
    blocks = int(FLASH * RUNNING * sum(sizes.values()) / BLOCK_PAGES)
    ftl = Translation(blocks + 2 * RUNNING, BLOCK_PAGES, logical)

    def pages(place: int, begin: int, end: int) -> Iterator[tuple[str, range]]:
        """Map, and pages in it, of pages by token from ``begin`` to ``end``."""
        for name, size in sizes.items():
            part = PAGES // size
            first = 0 if ranges else place * size
            field = f"{place} {name}" if ranges else name
            yield field, range(first + -(-begin // part), first + -(-end // part))

    def write(place: int, begin: int, end: int) -> None:
        for field, some in pages(place, begin, end):
            ftl.write(field, some)

    used, length = [0] * RUNNING, [0] * RUNNING
    ended = -RUNNING
    while ended < ENDED:
        for place in places:
            if used[place] < length[place]:
                write(place, used[place], used[place] + 1)
                used[place] += 1
                continue
            for field, some in pages(place, 0, PAGES):
                ftl.trim(field, some)
            ftl.reclaim()
            ended += 1
            used[place], length[place] = PAGES // 2, draw.randint(PAGES // 2, PAGES)
            write(place, 0, PAGES // 2)
    return ftl.counts


def table() -> Table:
    """Rates and erases of InstInfer's drive by its address maps."""
    made = Table(
        "Inside of InstInfer's drive",
        ["what", "ours"],
        note="Chosen pages are random. The last two lines compare address maps with and without "
        f"ranges for fields. {RUNNING} contexts end at random lengths on a nearly full drive.",
    )
    ranges, shared = contexts(ranges=True), contexts(ranges=False)
    whole, chosen = by_token() / 1e9, by_token(BUDGET) / 1e9
    made.add("GB/s by token, all pages", f"{whole:.2f}")
    made.add(f"GB/s by token, one of {BUDGET} pages of each head", f"{chosen:.2f}")
    made.add(
        f"part read by channel, {CHANNELS_OF_K} of 128 channels, {_row(GROUPS)} in a page",
        _row(f"{by_channel(group):.2f}" for group in GROUPS),
    )
    made.add(
        "pages programmed for each written",
        _row(f"{one.write_amplification:.2f}" for one in (ranges, shared)),
    )
    made.add(
        "erases that a write waits for",
        _row(f"{one.erases / (one.erases + one.idle_erases):.0%}" for one in (ranges, shared)),
    )
    return made


def _row(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
