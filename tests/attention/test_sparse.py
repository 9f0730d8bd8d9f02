"""Sparse decode over a real store: what it computes, wherever the pages are."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.attention.newest import newest_values
from tests.kernels.test_dense import using
from tests.oracles.sparse_attention import sparq_attention
from tests.store.conftest import MakeStore, StoreRig, array, key_of, make_store
from vllm_ssdkv import _kernels
from vllm_ssdkv.attention.decode_plan import DecodePlan
from vllm_ssdkv.attention.exact import RowBatch
from vllm_ssdkv.attention.mean_value import RunningMeanV
from vllm_ssdkv.attention.sparse import ChoiceCounts, SparseDecode
from vllm_ssdkv.attention.sparse_deviation import SparseDeviation
from vllm_ssdkv.connector.worker.block_copy import LeavingBlocks
from vllm_ssdkv.connector.worker.device_memory import hot_memory
from vllm_ssdkv.connector.worker.paged_port import PagedPort
from vllm_ssdkv.kernels.dense import select_kernels
from vllm_ssdkv.kernels.operands.block_layout import (
    BlockLayout,
    BlockSource,
    PartialState,
    Softmax,
)
from vllm_ssdkv.kernels.paged import select_page_kernels
from vllm_ssdkv.kernels.scoring import CpuScoringKernels
from vllm_ssdkv.kernels.step_clock import AttentionClock
from vllm_ssdkv.kernels.summary_builder import KernelSummaryBuilder
from vllm_ssdkv.profiling.dense_oracle import dense_attention
from vllm_ssdkv.sparse.context_clusters import ClusterOptions, ContextClusters
from vllm_ssdkv.sparse.prefetch import Prefetcher, SelectionHistory
from vllm_ssdkv.sparse.protocol import Budget, Selector
from vllm_ssdkv.sparse.selection_reuse import SelectionReuse
from vllm_ssdkv.sparse.selectors.adaptive import AdaptiveSelector
from vllm_ssdkv.sparse.selectors.bounds import BoundsSelector
from vllm_ssdkv.sparse.selectors.codes import CodesSelector
from vllm_ssdkv.sparse.selectors.sparf import SparfSelector
from vllm_ssdkv.sparse.selectors.spread import SpreadSelector
from vllm_ssdkv.sparse.selectors.swarm import SwarmSelector
from vllm_ssdkv.sparse.selectors.window import WindowSelector
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.memory.summary_rows import ChannelTier, with_summaries
from vllm_ssdkv.store.read.page_fetcher import PageFetcher
from vllm_ssdkv.store.read.prefetch_budget import PrefetchBudget
from vllm_ssdkv.store.read.selected_context import SelectedContexts

__all__ = ["make_store"]

CPU = torch.device("cpu")
LAYERS, HEADS, QUERY_HEADS, HEAD_SIZE, PAGE, BLOCK = 2, 2, 4, 32, 16, 32
LAYOUT = BlockLayout.unpadded(BLOCK, PAGE, HEADS, HEAD_SIZE, torch.float32)
GEOMETRY = SlotGeometry("paged", LAYERS, HEADS, BLOCK // PAGE, 4096, summary_pages=1)
SLOT = LAYOUT.with_page_stride(GEOMETRY.page_bytes)
CHANNELS = replace(GEOMETRY, channel_pages=2)
SPREAD = with_summaries(
    replace(GEOMETRY, summary_pages=0), PAGE, channels=False, record="spread_with_values"
)
CODES = with_summaries(
    replace(GEOMETRY, summary_pages=0), PAGE, channels=False, scaled_from=4, record="codes_2"
)
SCALE = HEAD_SIZE**-0.5
LENGTHS = (230, 75, 141)
"""Tokens of each row, the current one included."""
WINDOW = 40


@dataclass
class Rows:
    """Requests with all their KV, and which of it is context."""

    rig: StoreRig
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    """Of each row, [layers, tokens, heads, head_size]."""
    caches: list[torch.Tensor]
    blocks: list[list[int]]
    """HBM blocks of each row."""
    means: RunningMeanV = field(default_factory=lambda: RunningMeanV(LAYERS, LAYOUT))

    def contexts(self) -> list[NDArray[np.int64]]:
        """Slots: those of the blocks that lie wholly before the window."""
        return [
            array(ids[: (length - WINDOW) // BLOCK])
            for ids, length in zip(self.blocks, LENGTHS, strict=True)
        ]

    def batch(self, later: int = 0) -> RowBatch:
        """The rows' last tokens, or so many (of zeros) ``later``."""
        width = max(map(len, self.blocks))
        table = np.array([[*ids, *[0] * (width - len(ids))] for ids in self.blocks], np.int32)
        return RowBatch.build(
            np.arange(len(LENGTHS) + 1),
            np.array(LENGTHS) + later,
            table,
            np.array([len(slots) for slots in self.contexts()]),
            np.arange(len(LENGTHS)),
            BLOCK,
        )

    def attend(
        self,
        chosen: SelectedContexts,
        budget: Budget,
        layer: int,
        queries: torch.Tensor,
        selector: Selector | Mapping[int, Selector] | None = None,
        deviation: SparseDeviation | None = None,
        guesses: Prefetcher | None = None,
        kept: SelectionReuse | None = None,
        later: int = 0,
        sinks: torch.Tensor | None = None,
        clusters: ContextClusters | None = None,
    ) -> tuple[torch.Tensor, SparseDecode]:
        """Output of a layer for the rows' last tokens, or so many (of zeros) ``later``; by bounds
        unless told otherwise, or by a selector of each row."""
        kernels = select_kernels(CPU)
        batch = self.batch(later)
        state = PartialState.empty(len(LENGTHS), QUERY_HEADS, HEAD_SIZE, CPU, Softmax(sinks))
        source = BlockSource.of_cache(self.caches[layer], batch.window_ids, batch.window_position)
        kernels.attend(queries, state, batch.window, source, layout=LAYOUT, scale=SCALE)
        selector = selector or BoundsSelector(budget, PAGE, CpuScoringKernels())
        names = [str(row) for row in range(len(LENGTHS))]
        if not isinstance(selector, Mapping):
            selector = dict.fromkeys(range(len(LENGTHS)), selector)
        decode = SparseDecode(
            selector,
            chosen,
            LAYOUT,
            range(LAYERS),
            self.means,
            names,
            deviation,
            guesses,
            kept,
            clusters,
        )
        clock = AttentionClock()
        clock.start()
        page_kernels = select_page_kernels(CPU)
        cache = self.caches[layer]
        value = newest_values(cache, LAYOUT, batch)
        decode.attend(page_kernels, clock, layer, queries, value, state, batch, cache, SCALE)
        out = torch.empty_like(state.acc)
        kernels.finish(state, out)
        return out, decode


@pytest.fixture
def make_rows(make_store: MakeStore) -> Callable[..., Rows]:
    """Rows whose blocks are all stored, and in DRAM no more."""

    def make(
        places: int = 64,
        geometry: SlotGeometry = GEOMETRY,
        *,
        channels: ChannelTier = "dram",
        hbm_summaries: int = 0,
    ) -> Rows:
        rig = make_store(
            geometry,
            slots=24,
            frames=24,
            places=places,
            channels=channels,
            hbm_summaries=hbm_summaries,
            summarizer=KernelSummaryBuilder(LAYOUT, geometry),
        )
        torch.manual_seed(1)
        shape = (LAYERS, max(LENGTHS), HEADS, HEAD_SIZE)
        keys = [torch.randn(shape) * 2 for _ in LENGTHS]
        values = [torch.randn(shape) for _ in LENGTHS]
        caches = [torch.zeros(24, LAYOUT.block_bytes // 4) for _ in range(LAYERS)]
        blocks: list[list[int]] = []
        for row, length in enumerate(LENGTHS):
            first = sum(map(len, blocks))
            blocks.append(list(range(first, first + -(-length // BLOCK))))
            token = np.arange(length)
            where = np.array(blocks[row])[token // BLOCK] * BLOCK + token % BLOCK
            for layer, cache in enumerate(caches):
                select_kernels(CPU).store_kv(
                    keys[row][layer, :length], values[row][layer, :length], cache, where, LAYOUT
                )
        rows = Rows(rig, keys, values, caches, blocks)
        store_contexts(rows)
        return rows

    return make


def store_contexts(rows: Rows) -> None:
    rig = rows.rig
    port = PagedPort(select_kernels(CPU), rows.caches, LAYOUT, rig.geometry, rig.store.frames)
    for row, slots in enumerate(rows.contexts()):
        rig.store.extend_context(str(row), 0, slots)
        frames = rig.store.reserve_frames(slots, wait=False)
        assert len(frames) == len(slots)
        port.save(LeavingBlocks(slots, frames, rig.store.summary_rows(slots)))
        rig.store.filled(slots)
        keys = [key_of(slot) for slot in slots.tolist()]
        rig.store.flush(slots, array([1] * len(slots)), keys)
    assert rig.store.drain(30)


def away(rows: Rows) -> None:
    rows.rig.store.frames.forget(np.concatenate(rows.contexts()))


def dense(rows: Rows, layer: int, queries: torch.Tensor) -> torch.Tensor:
    parts = [
        dense_attention(
            queries[row : row + 1],
            rows.keys[row][layer, :length],
            rows.values[row][layer, :length],
            scale=SCALE,
            first_position=length - 1,
        )[0]
        for row, length in enumerate(LENGTHS)
    ]
    return torch.cat(parts)


def queries_of(seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(len(LENGTHS), QUERY_HEADS, HEAD_SIZE)


def choose(rows: Rows, which: Sequence[int] = (0, 1, 2)) -> SelectedContexts:
    return rows.rig.store.choose(rows.contexts(), which)


@pytest.mark.parametrize("places", [16, 64])
def test_with_all_of_the_budget_it_is_dense_attention(
    make_rows: Callable[..., Rows], places: int
) -> None:
    """With 16 places the pages of a layer come in two turns."""
    rows = make_rows(places)
    away(rows)
    chosen = choose(rows)
    for layer in range(LAYERS):
        queries = queries_of(layer)
        out, decode = rows.attend(chosen, Budget(share=1.0), layer, queries)
        torch.testing.assert_close(out.double(), dense(rows, layer, queries), atol=1e-5, rtol=1e-5)
        assert decode.counts.selected == decode.counts.context
        assert decode.counts.missing == 0
    chosen.close()


@pytest.mark.parametrize("places", [16, 64])
def test_rows_that_share_their_context_read_it_once(
    make_rows: Callable[..., Rows], places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where not all of a layer's pages have room at a time."""
    rows = make_rows(places)
    away(rows)
    monkeypatch.setattr(sys.modules[__name__], "LENGTHS", (LENGTHS[0],) * 3)
    for shared in (rows.keys, rows.values, rows.blocks):
        shared[1:] = [shared[0]] * 2  # type: ignore[list-item]  # a row's pages
    chosen = choose(rows)
    rig = rows.rig
    before = sum(rig.total("bytes_read", device=path) for path in rig.paths)
    for layer in range(LAYERS):
        queries = queries_of(layer)
        out, _ = rows.attend(chosen, Budget(share=1.0), layer, queries)
        torch.testing.assert_close(out.double(), dense(rows, layer, queries), atol=1e-5, rtol=1e-5)
    pages = LAYERS * len(rows.contexts()[0]) * GEOMETRY.pages_per_layer
    assert pages == LAYERS * 5 * 4
    read = sum(rig.total("bytes_read", device=path) for path in rig.paths) - before
    assert read == pages * GEOMETRY.page_bytes
    assert chosen.fetched.ssd == pages
    chosen.close()


def test_rows_of_the_step_before_serve_a_batch_in_another_order(
    make_rows: Callable[..., Rows],
) -> None:
    """vLLM orders the rows of a batch, whatever the order of the plan: by the same contexts and
    selectors, each row still gets what is its own."""
    rows, every = make_rows(), range(len(LENGTHS))
    contexts, names = rows.contexts(), [str(row) for row in every]
    selector = BoundsSelector(Budget(share=0.6), PAGE, CpuScoringKernels())
    selectors = dict.fromkeys(every, selector)
    table = np.zeros((len(LENGTHS), max(map(len, rows.blocks))), dtype=np.int32)
    for row, blocks in enumerate(rows.blocks):
        table[row, : len(blocks)] = blocks
    latest, found = None, []
    for order in ([0, 1, 2], [0, 1, 2], [2, 0, 1], [2, 0, 1], [0, 1, 2]):
        chosen, stream = (
            rows.rig.store.choose(contexts, every),
            rows.rig.store.stream(contexts, every),
        )
        decode = SparseDecode(
            selectors, chosen, LAYOUT, range(LAYERS), rows.means, names, latest=latest
        )
        batch = RowBatch.build(
            np.arange(len(LENGTHS) + 1),
            np.array(LENGTHS)[order],
            table[order],
            np.array([len(slots) for slots in contexts])[order],
            np.array(order),
            BLOCK,
        )
        queries, clock = queries_of(0)[order], AttentionClock()
        plan = DecodePlan.of(batch, LAYOUT, SLOT, GEOMETRY, stream, decode, queries, clock)
        assert plan is not None
        out = torch.empty_like(queries)
        plan.attend(0, queries, rows.caches[0], out, SCALE)
        found.append(out[np.argsort(order)])
        stream.close()
        chosen.close()
        latest = decode
    assert all(torch.equal(out, found[0]) for out in found)


def test_native_code_counts_frames_that_rows_share_once(
    make_rows: Callable[..., Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, budget = make_rows(), Budget(share=0.6)
    monkeypatch.setattr(sys.modules[__name__], "LENGTHS", (LENGTHS[0],) * 3)
    for shared in (rows.keys, rows.values, rows.blocks):
        shared[1:] = [shared[0]] * 2  # type: ignore[list-item]  # a row's pages
    chosen = choose(rows)
    made = [rows.attend(chosen, budget, layer, queries_of(layer)) for layer in range(LAYERS)]
    wanted = chosen.fetched.frame
    chosen.close()

    chosen, batch, every = choose(rows), rows.batch(), range(len(LENGTHS))
    selector = BoundsSelector(budget, PAGE, CpuScoringKernels())
    names = [str(row) for row in every]
    decode = SparseDecode(
        dict.fromkeys(every, selector), chosen, LAYOUT, range(LAYERS), rows.means, names
    )
    stream = rows.rig.store.stream(rows.contexts(), every)
    clock = AttentionClock()
    plan = DecodePlan.of(batch, LAYOUT, SLOT, GEOMETRY, stream, decode, queries_of(0), clock)
    assert plan is not None
    for layer, (out, _) in enumerate(made):
        found = torch.empty_like(out)
        plan.attend(layer, queries_of(layer), rows.caches[layer], found, SCALE)
        assert torch.equal(found, out)
    for cache in (rows.caches[0].double(), rows.caches[0][:, :8], rows.caches[0].t()):
        with pytest.raises(ValueError, match="a cache"):
            plan.attend(0, queries_of(0), cache, torch.empty_like(made[0][0]), SCALE)
    with pytest.raises(ValueError, match="overlap"):
        plan.attend(0, queries_of(0), rows.caches[0][:1].expand(99, -1), made[0][0], SCALE)
    with pytest.raises(ValueError, match="query must"):
        plan.attend(0, queries_of(0).flatten(), rows.caches[0], made[0][0], SCALE)
    plan.end()
    assert decode.counts.selected == sum(one.counts.selected for _, one in made)
    assert chosen.fetched.frame == wanted < decode.counts.selected
    stream.close()
    chosen.close()


@dataclass
class Step:
    """Results of a step of rows.

    Attributes:
        outs: Output of each layer.
        counts: Counts of the rows' choices, and of the pages.
        lost: Rows that were lost.
        brought: Layers in which native code stopped, because somebody had to read.
    """

    outs: list[torch.Tensor]
    counts: list[Any]
    lost: set[int]
    brought: int


SINKS = torch.linspace(-1, 2, QUERY_HEADS)


def python_step(
    rows: Rows,
    chosen: SelectedContexts,
    selectors: dict[int, Selector],
    guesses: Prefetcher | None,
    queries: list[torch.Tensor],
) -> Step:
    outs, totals = [], ChoiceCounts()
    for layer, query in enumerate(queries):
        out, decode = rows.attend(
            chosen, Budget(share=1.0), layer, query, selectors, guesses=guesses, sinks=SINKS
        )
        outs.append(out)
        for name in dataclasses.asdict(totals):
            setattr(totals, name, getattr(totals, name) + getattr(decode.counts, name))
    return Step(outs, [totals, chosen.fetched, chosen.pages_used], chosen.poisoned, 0)


def native_step(
    rows: Rows,
    chosen: SelectedContexts,
    selectors: dict[int, Selector],
    guesses: Prefetcher | None,
    queries: list[torch.Tensor],
) -> Step:
    names = [str(row) for row in range(len(LENGTHS))]
    decode = SparseDecode(
        selectors, chosen, LAYOUT, range(LAYERS), rows.means, names, guesses=guesses
    )
    stream = rows.rig.store.stream(rows.contexts(), range(len(LENGTHS)))
    batch, clock = rows.batch(), AttentionClock()
    plan = DecodePlan.of(batch, LAYOUT, SLOT, GEOMETRY, stream, decode, queries[0], clock)
    assert plan is not None
    outs = []
    with patch.object(SparseDecode, "bring", autospec=True, side_effect=SparseDecode.bring) as spy:
        for layer, query in enumerate(queries):
            out = torch.empty(len(LENGTHS), QUERY_HEADS, HEAD_SIZE)
            plan.attend(layer, query, rows.caches[layer], out, SCALE, softmax=Softmax(SINKS))
            outs.append(out)
    plan.end()
    stream.close()
    counts = [decode.counts, chosen.fetched, chosen.pages_used]
    return Step(outs, counts, chosen.poisoned, spy.call_count)


def selector_of(name: str) -> Selector:
    budget, kernels = Budget(share=0.8), CpuScoringKernels(1)
    scores = {
        "bounds": BoundsSelector(budget, PAGE, kernels),
        "spread": SpreadSelector(budget, PAGE, kernels),
        "codes": CodesSelector(budget, PAGE, kernels, 2),
        "sparf": SparfSelector(budget, 8, "page", PAGE, kernels),
        "sparf by tokens": SparfSelector(budget, 8, "token", PAGE, kernels),
    }
    if name.startswith("adaptive"):
        scorer = scores[name.split()[1]]
        return AdaptiveSelector(scorer, 0.8, 0.1, Budget(share=0.9), PAGE, kernels)
    return scores.get(name, WindowSelector(budget, PAGE))


def whole_numbers(*shape: int | tuple[int, ...]) -> torch.Tensor:
    """Draw in place of ``torch.randn``: sums of products are the same on every processor."""
    return torch.randint(-1, 2, tuple(np.hstack(shape).tolist())).float()


def digest_of(*values: object) -> str:
    return hashlib.blake2b(repr(values).encode(), digest_size=6).hexdigest()


DIGESTS = {
    "window": ("4027ed09a77e", "63372a4abe95"),
    "bounds": ("6862dc7510af", "72f2c5ebae5a"),
    "spread": ("125b573bd666", "0a331bf0c0cd"),
    "codes": ("ccd4cfb17a2a", "d40ed9d9150b"),
    "adaptive bounds": ("9be383c41bb6", "8af1797fa952"),
    "adaptive codes": ("7148fc0e346a", "472bac432fd5"),
    "sparf": ("28eb18c35b6c", "869dee0cc0cf"),
    "sparf by tokens": ("d2f01095f731", "88e15d8fa20c"),
}
"""Digests of choices and counts, and of the outputs of portable kernels, as of the last commit that
computed all of it in Python (the parent of db2198ea)."""
EXACT_DIGEST = "ff5c6ddce06c"
"""Digest of the outputs of portable kernels over whole contexts, as of that commit."""
FUSES = platform.machine() != "x86_64"
"""True if portable kernels may fuse products and sums, which rounds otherwise."""


@pytest.mark.parametrize("name", DIGESTS)
def test_native_code_chooses_and_counts_as_python_did(
    make_rows: Callable[..., Rows], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(torch, "randn", whole_numbers)
    geometries = {"spread": SPREAD, "codes": CODES, "sparf": CHANNELS}
    geometry = geometries.get(name.removeprefix("adaptive ").split(maxsplit=1)[0], GEOMETRY)
    rows, names = make_rows(geometry=geometry), [str(row) for row in range(len(LENGTHS))]
    selectors, long = dict.fromkeys(range(len(LENGTHS)), selector_of(name)), np.full(3, 99)
    for isa in _kernels.isas():
        with using(isa):
            chosen, guesses = choose(rows), Prefetcher()
            queries = [queries_of(layer) for layer in range(LAYERS)]
            step = native_step(rows, chosen, selectors, guesses, queries)
            chosen.close()
        lists = [guesses.likely.recall(layer, names, long) for layer in range(LAYERS)]
        pages = [(one.pages.tolist(), one.begin.tolist()) for one in lists if one is not None]
        counts = [dataclasses.asdict(one) for one in step.counts[:2]]
        kept = {k: int(v) for one in counts for k, v in one.items() if not isinstance(v, float)}
        assert digest_of(pages, kept) == DIGESTS[name][0]
        if isa == "portable" and not FUSES:
            assert digest_of([out.numpy().tobytes() for out in step.outs]) == DIGESTS[name][1]


@pytest.mark.skipif(FUSES, reason="this processor fuses what it multiplies and adds")
def test_native_code_attends_to_whole_contexts_as_python_did(
    make_rows: Callable[..., Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "randn", whole_numbers)
    rows, clock = make_rows(), AttentionClock()
    stream, batch = rows.rig.store.stream(rows.contexts()), rows.batch()
    plan = DecodePlan.of(batch, LAYOUT, SLOT, GEOMETRY, stream, None, queries_of(0), clock)
    assert plan is not None
    with using("portable"):
        outs = [torch.empty_like(queries_of(0)) for _ in range(LAYERS)]
        for layer, out in enumerate(outs):
            plan.attend(layer, queries_of(layer), rows.caches[layer], out, SCALE)
    stream.close()
    assert digest_of([out.numpy().tobytes() for out in outs]) == EXACT_DIGEST


def scorers(kind: str, budget: Budget) -> tuple[SlotGeometry, list[Any]]:
    """Geometry, and two that score pages of its slots, one for rows that choose by it alone."""
    kernels = CpuScoringKernels()
    if kind == "bounds":
        return GEOMETRY, [BoundsSelector(budget, PAGE, kernels)] * 2
    if kind == "spread":
        rests = (False, True)
        return SPREAD, [SpreadSelector(budget, PAGE, kernels, estimate_rest=one) for one in rests]
    pages = SparfSelector(budget, 8, "page", PAGE, kernels)
    tokens = SparfSelector(budget, 8, "token", PAGE, kernels, estimate_rest=True)
    return CHANNELS, [pages, tokens] if kind == "pages" else [tokens, pages]


@pytest.mark.parametrize("places", [16, 64, 256])
@pytest.mark.parametrize(
    ("kind", "guessing"),
    [("bounds", False), ("bounds", True), ("spread", True), ("pages", True), ("tokens", True)],
)
def test_native_code_brings_what_python_does(
    make_rows: Callable[..., Rows],
    monkeypatch: pytest.MonkeyPatch,
    places: int,
    kind: str,
    guessing: bool,
) -> None:
    """Bits, choices and counts: from frames, half from them, from the cache, by several turns where
    it is small, from devices, where a row is lost, and where a query is not a number."""
    settle = PageFetcher._settle_ahead
    # What is read ahead is never late, and idle devices read three pages: time decides nothing.
    monkeypatch.setattr(PageFetcher, "_settle_ahead", lambda self, *, wait: settle(self, wait=True))
    monkeypatch.setattr(PrefetchBudget, "spare", lambda _, ahead: np.full_like(ahead, 3))
    geometry, (one, other) = scorers(kind, Budget(share=0.6))
    adaptive = AdaptiveSelector(other, 0.9, 0.1, Budget(share=0.8), PAGE, CpuScoringKernels())
    selectors: dict[int, Selector] = {0: one, 1: adaptive, 2: one}
    lives: list[list[Step]] = []
    for run in (python_step, native_step):
        rows, guesses = make_rows(places, geometry), Prefetcher() if guessing else None
        slots = np.concatenate(rows.contexts())
        life = []
        for step in range(6):
            if step == 1:
                rows.rig.store.frames.forget(slots[::2].copy())
            elif step >= 2:
                away(rows)
            if step >= 4:
                rows.rig.forget_pages(slots)
            if step == 5:
                rows.rig.flip(int(rows.contexts()[2][0]), GEOMETRY.layer_offset(0) + 5)
            chosen, queries = choose(rows), [queries_of(layer) for layer in range(LAYERS)]
            if step == 4:
                queries[1][0, 0] = torch.nan  # of one head
            life.append(run(rows, chosen, selectors, guesses, queries))
            chosen.close()
        lives.append(life)
    for python, native in zip(*lives, strict=True):
        np.testing.assert_array_equal(torch.stack(python.outs), torch.stack(native.outs))
        assert python.counts == native.counts
        assert python.lost == native.lost
    brought = [step.brought for step in lives[1]]
    assert brought[0] == 0
    assert brought[1] > 0
    assert brought[4] > 0
    if places == 256:
        assert brought[3] == 0, "all of it was in the cache"
    assert lives[1][5].lost == {2}


def interrupted(*_: object) -> None:
    raise InterruptedError


def test_a_layer_that_fails_keeps_no_place(
    make_rows: Callable[..., Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages that it stopped for can be brought by the next step."""
    rows, bounds = make_rows(256), BoundsSelector(Budget(share=0.6), PAGE, CpuScoringKernels())
    selectors: dict[int, Selector] = dict.fromkeys(range(3), bounds)
    away(rows)
    chosen = choose(rows)
    tables, queries = chosen.tables, [queries_of(layer) for layer in range(LAYERS)]
    assert tables is not None
    with monkeypatch.context() as patched:
        patched.setattr(SparseDecode, "bring", interrupted)
        with pytest.raises(InterruptedError):
            native_step(rows, chosen, selectors, None, queries)
    gc.collect()  # a plan gives back what it has
    assert tables.taken() == tables.held() == 0
    native = native_step(rows, chosen, selectors, None, queries)
    assert native.brought > 0
    python = python_step(rows, chosen, selectors, None, queries)
    assert all(map(torch.equal, native.outs, python.outs))
    chosen.close()


def test_where_pages_are_changes_no_bit(make_rows: Callable[..., Rows]) -> None:
    rows = make_rows()
    outs: list[list[torch.Tensor]] = []
    for turn in range(3):  # from frames, from devices, from the page cache
        if turn == 1:
            away(rows)
        chosen = choose(rows)
        made = [
            rows.attend(chosen, Budget(share=0.4), layer, queries_of(layer))
            for layer in range(LAYERS)
        ]
        outs.append([out for out, _ in made])
        fetched = chosen.fetched
        assert [fetched.frame > 0, fetched.ssd > 0, fetched.cache > 0].index(True) == (0, 1, 2)[
            turn
        ]
        for _, decode in made:
            assert 0 < decode.counts.selected < 0.4 * decode.counts.context
            assert decode.counts.missing > 0
        chosen.close()
    for layer in range(LAYERS):
        assert torch.equal(outs[0][layer], outs[1][layer])
        assert torch.equal(outs[0][layer], outs[2][layer])
        assert not torch.allclose(outs[0][layer].double(), dense(rows, layer, queries_of(layer)))


def test_turns_change_no_bit(
    make_rows: Callable[..., Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two lists of four times 8 and 2 pages and two of 6 make eleven turns where 8 pages have room,
    and one where all have, or lie in frames."""
    monkeypatch.setattr(sys.modules[__name__], "LENGTHS", (600, 160))
    outs: list[list[torch.Tensor]] = []
    turns = []
    for places, in_frames in ((16, False), (256, False), (16, True)):
        rows = make_rows(places)
        if not in_frames:
            away(rows)
        chosen = choose(rows, (0, 1))
        with patch.object(chosen, "turns", wraps=chosen.turns) as spy:
            outs.append(
                [
                    rows.attend(chosen, Budget(share=1.0), layer, queries_of(layer))[0]
                    for layer in range(LAYERS)
                ]
            )
        turns.append([len(chosen.turns(*call.args)) for call in spy.call_args_list])
        chosen.close()
    assert turns == [[11] * LAYERS, [1] * LAYERS, [1] * LAYERS]
    for made in outs[1:]:
        for one, other in zip(outs[0], made, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("places", [16, 64])
def test_reading_ahead_changes_no_bit(make_rows: Callable[..., Rows], places: int) -> None:
    """Queries drift from step to step, so that some guesses are wrong, and one row comes late."""
    rows = make_rows(places)
    away(rows)
    outs: list[list[torch.Tensor]] = []
    for guesses in (None, Prefetcher()):
        made: list[torch.Tensor] = []
        ahead = hits = 0
        for step in range(4):
            rows.rig.forget_pages(np.concatenate(rows.contexts()))
            chosen = choose(rows, (0, 2) if step < 2 else (0, 1, 2))
            for layer in range(LAYERS):
                queries = queries_of(layer) + queries_of(10 + step)
                made.append(
                    rows.attend(chosen, Budget(share=0.6), layer, queries, guesses=guesses)[0]
                )
            ahead, hits = ahead + chosen.fetched.ahead, hits + chosen.fetched.hits
            assert chosen.poisoned == set()
            chosen.close()
        assert (0 < hits < ahead) if guesses else (hits == ahead == 0)
        outs.append(made)
    for without, with_guesses in zip(*outs, strict=True):
        assert torch.equal(without, with_guesses)


def test_what_is_kept_does_not_depend_on_where_pages_are(make_rows: Callable[..., Rows]) -> None:
    """Nor on what is read ahead. Some rows turn away and choose at once, by channels again."""
    outs: list[list[torch.Tensor]] = []
    for turn in range(3):
        rows = make_rows(geometry=CHANNELS)
        guesses = Prefetcher() if turn == 2 else None
        kept = SelectionReuse(LAYERS, LAYOUT, 3, 0.9)
        selector = sparf(Budget(share=0.6), 8, "page")
        made: list[torch.Tensor] = []
        lists: list[int] = []
        for later in range(6):
            if turn:
                away(rows)
            chosen = choose(rows)
            for layer in range(LAYERS):
                queries = queries_of(layer) + 0.1 * queries_of(10 + later)
                if later == 4:
                    queries[1] *= -1
                out, decode = rows.attend(
                    chosen, selector.budget, layer, queries, selector, None, guesses, kept, later
                )
                made.append(out)
                lists.append(decode.counts.kept)
                chose = (decode.counts.lists - decode.counts.kept) // HEADS
                assert (decode.counts.channel_bytes > 0) == (chose > 0)
                assert decode.counts.selected <= 0.6 * decode.counts.context
            assert chosen.fetched.ssd == 0 or (turn > 0 and later not in {1, 2})
            chosen.close()
        # Two tokens after one that chose; then one of three rows turns there and back.
        assert lists == [n for n in (0, 6, 6, 0, 4, 4) for _ in range(LAYERS)]
        outs.append(made)
    for others in outs[1:]:
        for one, other in zip(outs[0], others, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("geometry", [GEOMETRY, CHANNELS])
def test_clusters_do_not_depend_on_where_pages_are(
    make_rows: Callable[..., Rows], geometry: SlotGeometry
) -> None:
    """Nor on what is read ahead. They do come from the prompt's queries, and change the choice."""
    outs: list[list[torch.Tensor]] = []
    for turn in range(4):
        rows, guesses = make_rows(geometry=geometry), Prefetcher() if turn == 1 else None
        budget = Budget(share=0.6)
        scorer = sparf(budget, 8, "page")
        by = BoundsSelector(budget, PAGE, CpuScoringKernels()) if geometry is GEOMETRY else scorer
        selector = SwarmSelector(by, budget, PAGE, CpuScoringKernels())
        clusters = ContextClusters(LAYERS, HEADS, ClusterOptions(0.8, 8, "jaccard", 1))
        made: list[torch.Tensor] = []
        for step in range(3):
            if turn:
                away(rows)
            chosen = choose(rows)
            for layer in range(LAYERS):
                queries = queries_of(layer) + 0.1 * queries_of(10 + step)
                if step == 0 and turn < 3:
                    for row in range(len(LENGTHS)):
                        prompt = torch.stack([queries_of(row + 50 * i)[row] for i in range(64)])
                        clusters.note_prompt(layer, str(row), prompt)
                out, decode = rows.attend(
                    chosen, budget, layer, queries, selector, guesses=guesses, clusters=clusters
                )
                made.append(out)
                assert 0 < decode.counts.selected <= 0.6 * decode.counts.context
            assert chosen.poisoned == set()
            chosen.close()
        totals = clusters.totals
        assert (totals.clusters < totals.pages) == (turn < 3)
        outs.append(made)
    for others in outs[1:3]:
        assert all(map(torch.equal, outs[0], others))
    assert not all(map(torch.equal, outs[0], outs[3]))


def test_what_comes_next_is_read_where_devices_are_idle(make_rows: Callable[..., Rows]) -> None:
    class Nothing(SelectionHistory):
        def recall(self, *_: object) -> None:
            """Knows nothing."""

    rows = make_rows(256)
    away(rows)
    read: list[int] = []
    outs: list[list[torch.Tensor]] = []
    for guesses in (Prefetcher(possible=Nothing()), Prefetcher()):
        made: list[torch.Tensor] = []
        ahead = 0
        for step in range(6):
            rows.rig.forget_pages(np.concatenate(rows.contexts()))
            chosen = choose(rows)
            for layer in range(LAYERS):
                queries = queries_of(layer) + queries_of(20 + step)
                made.append(
                    rows.attend(chosen, Budget(share=0.5), layer, queries, guesses=guesses)[0]
                )
            ahead += chosen.fetched.ahead
            chosen.close()
        read.append(ahead)
        outs.append(made)
    assert 0 < read[0] < read[1]
    for likely, with_possible in zip(*outs, strict=True):
        assert torch.equal(likely, with_possible)


@pytest.mark.parametrize("places", [3, 64])
def test_pages_in_the_devices_memory_change_no_bit(
    make_rows: Callable[..., Rows], places: int
) -> None:
    """A tensor stands for it. What is read ahead is not what it has."""
    outs: list[list[torch.Tensor]] = []
    for hot in (False, True):
        rows, guesses = make_rows(), Prefetcher()
        if hot:
            size = places * GEOMETRY.page_bytes
            rows.rig.store.keep_hot_pages(hot_memory(size, LAYOUT, GEOMETRY, CPU))
        made: list[torch.Tensor] = []
        for step in range(3):
            away(rows)
            chosen = choose(rows)
            for layer in range(LAYERS):
                queries = queries_of(layer) + 0.3 * queries_of(10 + step)
                out, decode = rows.attend(
                    chosen, Budget(share=0.4), layer, queries, guesses=guesses
                )
                made.append(out)
                assert decode.counts.selected < 0.4 * decode.counts.context
            if places == 64:
                assert (chosen.fetched.hot > 0) == (hot and step > 0)
            assert chosen.fetched.hot <= LAYERS * places * hot
            chosen.close()
        outs.append(made)
    for one, other in zip(*outs, strict=True):
        assert torch.equal(one, other)


def test_summaries_in_the_devices_memory_change_no_bit(make_rows: Callable[..., Rows]) -> None:
    """A tensor stands for it. They come with blocks that are stored, from frames and from slots."""
    outs: list[list[torch.Tensor]] = []
    for hbm in (0, 128 << 10):
        rows = make_rows(hbm_summaries=hbm)
        table: Any = rows.rig.store._summaries
        assert table.device_places == table.rows * (hbm > 0)
        slots, made = np.concatenate(rows.contexts()), []
        for source in ("stored", "frames", "slots"):
            if source != "stored":
                table.forget(slots)
            if source == "slots":
                away(rows)
            chosen = choose(rows)
            assert (chosen.fetched_summaries.frame > 0) == (source == "frames")
            assert (chosen.fetched_summaries.ssd > 0) == (source == "slots")
            for layer in range(LAYERS):
                out, decode = rows.attend(chosen, Budget(share=0.4), layer, queries_of(layer))
                assert 0 < decode.counts.selected < decode.counts.context
                made.append(out)
            chosen.close()
        outs.append(made)
    for one, other in zip(*outs, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(outs[0][0], outs[0][2])
    assert torch.equal(outs[0][0], outs[0][4])


def test_python_does_nothing_page_by_page(make_rows: Callable[..., Rows]) -> None:
    """As many calls, of Python and from it, for few pages as for nearly all of them."""
    rows = make_rows(128)
    away(rows)
    calls: dict[float, list[int]] = {0.4: [], 0.95: []}
    selected: set[int] = set()
    for budget in (0.95, 0.4, 0.95, 0.4):
        chosen = choose(rows)
        count = 0

        def note(_frame: object, event: str, _argument: object) -> None:
            nonlocal count
            count += event in {"call", "c_call"}

        sys.setprofile(note)
        try:
            share, guesses = Budget(share=budget), Prefetcher()
            _, decode = rows.attend(chosen, share, 0, queries_of(0), guesses=guesses)
        finally:
            sys.setprofile(None)
        chosen.close()
        selected.add(decode.counts.selected)
        calls[budget].append(count)
    assert max(selected) > 2 * min(selected)
    assert calls[0.4][1] == calls[0.95][1]


def test_a_row_that_lacks_a_page_is_lost_and_no_other(make_rows: Callable[..., Rows]) -> None:
    rows = make_rows()
    away(rows)
    choose(rows).close()  # brings the summaries
    good = choose(rows)
    wanted, _ = rows.attend(good, Budget(share=1.0), 0, queries_of(0))
    good.close()
    rows.rig.forget_pages(np.concatenate(rows.contexts()))
    rows.rig.flip(int(rows.contexts()[2][0]), GEOMETRY.layer_offset(0) + 5)
    chosen = choose(rows)
    for layer in range(LAYERS):
        out, decode = rows.attend(chosen, Budget(share=1.0), layer, queries_of(layer))
        if layer == 0:
            assert torch.equal(out[:2], wanted[:2])
        # From now on the row does not take part.
        assert decode.counts.lists == (6 if layer == 0 else 4)
        assert chosen.poisoned == {2}
    assert set(chosen.bad) == {int(rows.contexts()[2][0])}
    chosen.close()


def test_rows_that_do_not_choose_keep_their_state(make_rows: Callable[..., Rows]) -> None:
    rows = make_rows()
    queries = queries_of(3)
    nobody, some = choose(rows, []), choose(rows, [0, 2])
    window, _ = rows.attend(nobody, Budget(share=1.0), 1, queries)
    out, decode = rows.attend(some, Budget(share=1.0), 1, queries)
    assert torch.equal(out[1], window[1])
    wanted = dense(rows, 1, queries)
    torch.testing.assert_close(out[[0, 2]].double(), wanted[[0, 2]], atol=1e-5, rtol=1e-5)
    assert decode.counts.lists == 4
    nobody.close()
    some.close()


# ---- SparF ----


def sparf(budget: Budget, channels: int, granularity: Literal["token", "page"]) -> SparfSelector:
    return SparfSelector(budget, channels, granularity, 0, CpuScoringKernels(), estimate_rest=True)


def windows(rows: Rows) -> list[int]:
    """Tokens of each row that are no context, the current one included."""
    return [n - BLOCK * len(slots) for n, slots in zip(LENGTHS, rows.contexts(), strict=True)]


@pytest.mark.parametrize("tier", ["dram", "ssd"])
def test_sparf_by_token_is_sparq(make_rows: Callable[..., Rows], tier: ChannelTier) -> None:
    rows = make_rows(geometry=CHANNELS, channels=tier)
    for turn in range(3):  # summaries as they were packed, made from frames, from devices
        chosen = choose(rows)
        for layer in range(LAYERS):
            queries = queries_of(10 * turn + layer)
            budget = Budget(tokens=60)
            out, decode = rows.attend(chosen, budget, layer, queries, sparf(budget, 8, "token"))
            kept = 0
            for row, (length, window) in enumerate(zip(LENGTHS, windows(rows), strict=True)):
                part = rows.keys[row][layer, :length], rows.values[row][layer, :length]
                k, local = min(max(60, window - 1), length - 1), window - 1
                wanted, tokens = sparq_attention(queries[row], *part, r=8, k=k, local=local)
                torch.testing.assert_close(out[row].double(), wanted, atol=1e-5, rtol=1e-5)
                kept += int(tokens.sum()) - HEADS * window
            assert decode.counts.tokens == kept
            context = sum(LENGTHS) - sum(windows(rows))
            assert decode.counts.channel_bytes == context * HEADS * 8 * 4
            assert kept < decode.counts.selected * PAGE
        # With so few tokens to a block, a page has all channels of a head or two.
        pages = context // BLOCK * CHANNELS.channel_pages * LAYERS if tier == "ssd" else 0
        found = chosen.fetched_channels
        wanted_from = (pages, 0) if turn < 2 else (0, pages)
        assert (found.frame, found.cache + found.ssd) == wanted_from
        chosen.close()
        assert rows.rig.store._summaries is not None
        rows.rig.store._summaries.forget(np.concatenate(rows.contexts()))
        if turn:
            away(rows)


@pytest.mark.parametrize("granularity", ["token", "page"])
def test_sparf_with_all_channels_and_tokens_is_dense(
    make_rows: Callable[..., Rows], granularity: Literal["token", "page"]
) -> None:
    rows = make_rows(geometry=CHANNELS)
    away(rows)
    chosen = choose(rows)
    for layer in range(LAYERS):
        queries, budget = queries_of(layer), Budget(share=1.0)
        selector = sparf(budget, HEAD_SIZE, granularity)
        out, _ = rows.attend(chosen, budget, layer, queries, selector)
        torch.testing.assert_close(out.double(), dense(rows, layer, queries), atol=1e-5, rtol=1e-5)
    chosen.close()


def spread(budget: Budget) -> SpreadSelector:
    return SpreadSelector(budget, 0, CpuScoringKernels(), estimate_rest=True)


def test_by_mean_and_variance_the_rest_counts_as_the_mean(
    make_rows: Callable[..., Rows],
) -> None:
    """Of queries that look everywhere alike, which take the first pages."""
    rows, budget = make_rows(geometry=SPREAD), Budget(share=0.5)
    queries = torch.zeros(len(LENGTHS), QUERY_HEADS, HEAD_SIZE)
    for turn in range(2):  # from frames, from devices
        if turn:
            away(rows)
        chosen = choose(rows)
        for layer in range(LAYERS):
            out, _ = rows.attend(chosen, budget, layer, queries, spread(budget))
            for row, length in enumerate(LENGTHS):
                value = rows.values[row][layer, :length].double()
                context = len(rows.contexts()[row]) * BLOCK
                left = budget.context_tokens(np.array([context]), np.array([length - context]))
                read = torch.cat([value[: int(left[0]) // PAGE * PAGE], value[context:]])
                assert 0 < len(read) < length
                alpha = len(read) / length
                want = alpha * read.mean(0) + (1 - alpha) * value.mean(0)
                want = want.repeat_interleave(QUERY_HEADS // HEADS, 0)
                torch.testing.assert_close(out[row].double(), want, atol=1e-5, rtol=1e-5)
        chosen.close()


@pytest.mark.parametrize("geometry", [CHANNELS, SPREAD], ids=["channels", "spread"])
def test_next_to_a_large_sink_the_mean_counts_for_nothing(
    make_rows: Callable[..., Rows], geometry: SlotGeometry
) -> None:
    rows, budget = make_rows(geometry=geometry), Budget(share=0.4)
    chosen = choose(rows)
    for sink, least, most in ((-1e4, 0.05, 9.0), (60.0, 0.0, 1e-5)):
        sinks = torch.full((QUERY_HEADS,), sink)
        selector: Selector = sparf(budget, 8, "page") if geometry is CHANNELS else spread(budget)
        out, _ = rows.attend(chosen, budget, 0, queries_of(0), selector, sinks=sinks)
        assert least <= float(out.abs().max()) <= most
    chosen.close()


@pytest.mark.parametrize("adaptive", [False, True])
def test_sparf_by_page_reads_the_budget_and_adds_the_mean(
    make_rows: Callable[..., Rows], adaptive: bool
) -> None:
    rows = make_rows(geometry=CHANNELS)
    away(rows)
    budget = Budget(share=0.5)
    selector: Selector = sparf(budget, 8, "page")
    if adaptive:
        scorer = sparf(budget, 8, "token")  # which scores pages all the same
        selector = AdaptiveSelector(scorer, 1.0, 1.0, budget, 0, CpuScoringKernels())
    chosen = choose(rows)
    outs = []
    for turn in range(2):  # from devices, from the page cache
        out, decode = rows.attend(chosen, budget, 1, queries_of(5), selector)
        outs.append(out)
        assert 0 < decode.counts.selected <= 0.5 * decode.counts.context
        assert decode.counts.tokens == PAGE * decode.counts.selected
        # All of the mass is never reached.
        assert decode.counts.short == (decode.counts.lists if adaptive else 0)
        assert (chosen.fetched.ssd > 0, chosen.fetched.cache > 0) == (True, turn > 0)
    assert torch.equal(outs[0], outs[1])
    chosen.close()


def test_sparf_after_a_lost_page_leaves_the_others_right(make_rows: Callable[..., Rows]) -> None:
    rows = make_rows(geometry=CHANNELS)
    away(rows)
    budget = Budget(share=0.5)
    good = choose(rows)
    wanted, _ = rows.attend(good, budget, 0, queries_of(0), sparf(budget, 8, "page"))
    good.close()
    rows.rig.store._forget_content(np.concatenate(rows.contexts()[2:]))
    rows.means = RunningMeanV(LAYERS, LAYOUT)
    chosen = choose(rows)
    assert chosen.poisoned == {2}
    out, _ = rows.attend(chosen, budget, 0, queries_of(0), sparf(budget, 8, "page"))
    assert torch.equal(out[:2], wanted[:2])
    chosen.close()


def test_rows_with_different_selectors_get_what_each_gets_alone(
    make_rows: Callable[..., Rows],
) -> None:
    """All in one fetch and one pass of attention; only some are mixed with their mean V."""
    torch.manual_seed(5)
    queries = torch.randn(len(LENGTHS), QUERY_HEADS, HEAD_SIZE)
    kernels = CpuScoringKernels()
    budget = Budget(share=0.6)
    of_rows: list[Selector] = [
        SparfSelector(budget, 8, "token", PAGE, kernels, estimate_rest=True),
        WindowSelector(budget, PAGE),
        AdaptiveSelector(
            SparfSelector(budget, 4, "page", PAGE, kernels, estimate_rest=True),
            0.9,
            0.1,
            budget,
            PAGE,
            kernels,
        ),
    ]

    def attend(selector: Selector | Mapping[int, Selector]) -> tuple[torch.Tensor, int]:
        rows = make_rows(geometry=CHANNELS)
        chosen = rows.rig.store.choose(rows.contexts(), range(len(LENGTHS)))
        out, decode = rows.attend(chosen, budget, 1, queries, selector)
        chosen.close()
        return out, decode.counts.selected

    together, _ = attend(dict(enumerate(of_rows)))
    for row, selector in enumerate(of_rows):
        alone, _ = attend(selector)
        assert torch.equal(together[row], alone[row])
