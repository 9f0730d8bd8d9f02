"""Law of placement: where pages are, and what was prefetched, changes no page that is chosen and
no bit of the output (issue 4's law of placement and prefetch), over a real store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.attention.test_sparse import (
    CHANNELS,
    GEOMETRY,
    HEADS,
    LAYERS,
    LAYOUT,
    LENGTHS,
    PAGE,
    Rows,
    choose,
    make_rows,
    make_store,
    queries_of,
    sparf,
)
from tests.store.conftest import array
from vllm_ssdkv.attention.mean_value import RunningMeanV
from vllm_ssdkv.kernels.scoring import CpuScoringKernels
from vllm_ssdkv.sparse.prefetch import Prefetcher
from vllm_ssdkv.sparse.protocol import Budget, ContextSummaries, Needs, Selection, Selector
from vllm_ssdkv.sparse.selectors.adaptive import AdaptiveSelector
from vllm_ssdkv.sparse.selectors.bounds import BoundsSelector
from vllm_ssdkv.sparse.selectors.window import WindowSelector
from vllm_ssdkv.store.memory.summary_rows import ChannelTier

__all__ = ["make_rows", "make_store"]

KERNELS = CpuScoringKernels()
SELECTORS: dict[str, Callable[[Budget], Selector]] = {
    "window": lambda budget: WindowSelector(budget, PAGE),
    "bounds": lambda budget: BoundsSelector(budget, PAGE, KERNELS),
    "sparf by page": lambda budget: sparf(budget, 8, "page"),
    "sparf by token": lambda budget: sparf(budget, 8, "token"),
    "adaptive": lambda budget: AdaptiveSelector(
        sparf(budget, 8, "page"), 0.8, 0.0, budget, 0, KERNELS
    ),
}


@dataclass(eq=False)
class Noted:
    """A selector, and what it chose."""

    inner: Selector
    chosen: list[Selection] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def needs(self) -> Needs:
        return self.inner.needs

    def select(
        self,
        query: torch.Tensor,
        context: ContextSummaries,
        scale: float,
        window_lse: torch.Tensor | None = None,
    ) -> Selection:
        self.chosen.append(self.inner.select(query, context, scale, window_lse))
        return self.chosen[-1]


def pages_of(context: int) -> int:
    return context * LAYOUT.groups


def wrong_guesses(rows: Rows, seed: int) -> Prefetcher:
    """Pages of every layer that nothing speaks for."""
    draw, guesses = np.random.default_rng(seed), Prefetcher()
    blocks = np.array([len(slots) for slots in rows.contexts()])
    for layer in range(LAYERS):
        lists = [
            np.sort(draw.choice(pages_of(n), draw.integers(0, pages_of(n) + 1), replace=False))
            for n in blocks.tolist()
            for _ in range(HEADS)
        ]
        begin = np.cumsum([0, *map(len, lists)]).astype(np.int32)
        names = [str(row) for row in range(len(LENGTHS))]
        for memory in (guesses.likely, guesses.possible):
            memory.remember(layer, names, blocks, np.concatenate(lists).astype(np.int32), begin)
    return guesses


@pytest.mark.parametrize("name", SELECTORS)
@given(
    share=st.floats(0.2, 1),
    framed=st.sets(st.integers(0, 23)),
    cached=st.sets(st.integers(0, 23)),
    guessed=st.booleans(),
    tier=st.sampled_from(["dram", "ssd"]),
    places=st.sampled_from([16, 64]),
    seed=st.integers(0, 999),
)
@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_place_and_prefetch_change_nothing(
    make_rows: Callable[..., Rows],
    name: str,
    share: float,
    framed: set[int],
    cached: set[int],
    guessed: bool,
    tier: ChannelTier,
    places: int,
    seed: int,
) -> None:
    """All in frames and nothing read ahead, against: some of the slots in frames, some pages in
    the page cache, guesses drawn by lot that are still on their way, channels in DRAM, on SSD or in
    memory of the device. With 16 places pages come in turns."""
    budget = Budget(share=share)
    needs_channels = name not in {"window", "bounds"}
    made: list[tuple[list[torch.Tensor], list[Selection]]] = []
    for scattered in (False, True):
        rows = make_rows(
            places,
            CHANNELS if needs_channels else GEOMETRY,
            channels=tier if scattered else "dram",
        )
        guesses = None
        if scattered:
            slots = np.concatenate(rows.contexts())
            rows.rig.store.frames.forget(array([s for s in slots.tolist() if s not in framed]))
            warm(rows, cached, seed)
            if guessed:
                guesses = wrong_guesses(rows, seed)
                rows.rig.faults({"kind": "latency", "op": "read", "seconds": 0.01})
        rows.means = RunningMeanV(LAYERS, LAYOUT)
        selector = Noted(SELECTORS[name](budget))
        chosen = choose(rows)
        outs = [
            rows.attend(chosen, budget, layer, queries_of(seed + layer), selector, guesses=guesses)[
                0
            ]
            for layer in range(LAYERS)
        ]
        assert chosen.poisoned == set()
        chosen.close()
        rows.rig.faults()
        made.append((outs, selector.chosen))
    (outs, selections), (other_outs, other_selections) = made
    for one, other in zip(selections, other_selections, strict=True):
        np.testing.assert_array_equal(one.pages, other.pages)
        np.testing.assert_array_equal(one.begin, other.begin)
        np.testing.assert_array_equal(one.token_mask, other.token_mask)  # type: ignore[arg-type]  # or None
        np.testing.assert_array_equal(one.alpha, other.alpha)  # type: ignore[arg-type]  # or None
    for out, other_out in zip(outs, other_outs, strict=True):
        assert torch.equal(out, other_out)


def warm(rows: Rows, slots: set[int], seed: int) -> None:
    """Have some pages of these slots, where they are context, in the page cache."""
    draw = np.random.default_rng(seed)
    chosen = choose(rows)
    blocks = np.flatnonzero(np.isin(chosen.slots, sorted(slots)))
    per_layer = HEADS * LAYOUT.groups
    for layer in range(LAYERS):
        some = blocks[: chosen.room]
        fetch = chosen.fetch(chosen.pages(layer, some, draw.integers(0, per_layer, len(some))))
        chosen.complete(fetch, some)
        chosen.release(fetch)
    chosen.close()
