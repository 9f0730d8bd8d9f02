"""Evidence of co-activation: stability of choices, popularity, distance, the half test.

All figures are shares of the pages that a decode step activates: those with most of its mass.
Chance is the share of active pages, 10 %.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from vllm_ssdkv.profiling.clusters.trace import (
    F32,
    I64,
    Bools,
    Trace,
    active,
    budget_pages,
    pages_of,
    top,
)

DISTANCES: Final = (1, 8, 64)
"""Steps between two choices that are compared."""
_REACH: Final = 64
"""Pages within which company by distance is counted."""
_LEAST: Final = 4
"""Active pages of a step that can be halved."""


@dataclass(frozen=True, slots=True)
class Activity:
    """Active pages of one layer and KV head, masks [steps, pages]."""

    decode: Bools
    profile: Bools

    @classmethod
    def of(cls, trace: Trace, layer: int, head: int) -> Activity:
        """Build from the true attention of a trace."""
        return cls(
            active(pages_of(trace.mass(layer, head, trace.decode_steps))),
            active(pages_of(trace.mass(layer, head, trace.profile_steps))),
        )


def page_heat(trace: Trace, heads: list[tuple[int, int]]) -> F32:
    """Mean mass of each page in each decode step over these heads, [steps, pages]."""
    total = np.zeros((len(trace.decode_steps), trace.pages), np.float32)
    for layer, head in heads:
        total += pages_of(trace.mass(layer, head, trace.decode_steps))
    return total / np.float32(len(heads))


def stability(here: Activity) -> dict[str, float]:
    """Overlap of steps, and what predicts a step's pages."""
    decode, pages = here.decode, here.decode.shape[1]
    count = budget_pages(0.1, pages)
    size = np.maximum(decode.sum(1), 1)
    found: dict[str, float] = {}
    for distance in DISTANCES:
        if distance < len(decode):
            same = (decode[distance:] & decode[:-distance]).sum(1) / size[distance:]
            found[f"overlap of t and t+{distance}"] = float(same.mean())
    for name, last in (("64", 64), ("all", len(here.profile))):
        popular = _most(here.profile[-last:].sum(0), count)
        share = ((decode & popular).sum(1) / size).mean()
        found[f"popularity in the last {name} prompt queries"] = float(share)
    running = np.cumsum(decode, axis=0)
    first = min(32, len(decode) - 1)
    shares = [
        (decode[i] & _most(running[i - 1], count)).sum() / size[i]
        for i in range(max(1, first), len(decode))
    ]
    found["popularity in decode so far"] = float(np.mean(shares))
    newest = np.arange(pages) >= pages - count
    found["newest pages"] = float(((decode & newest).sum(1) / size).mean())
    return found


def control(here: Activity, other: Activity) -> float:
    """Share that the popularity of another document's same positions finds."""
    pages = min(here.decode.shape[1], other.profile.shape[1])
    popular = np.zeros(here.decode.shape[1], np.bool_)
    count = budget_pages(0.1, here.decode.shape[1])
    popular[:pages] = _most(other.profile.sum(0)[:pages], count)
    size = np.maximum(here.decode.sum(1), 1)
    return float(((here.decode & popular).sum(1) / size).mean())


def half_test(here: Activity, seed: int = 0) -> dict[str, float]:
    """Half of a step's pages is shown, the other half is to be found: share found, by method.

    All methods have learned from the prompt's queries alone.
    """
    rng = np.random.default_rng(seed)
    scorers = _scorers(here.profile, rng)
    right = dict.fromkeys(scorers, 0)
    hidden_pages = 0
    for mask in here.decode[::2]:
        pages = np.flatnonzero(mask)
        if len(pages) < _LEAST:
            continue
        rng.shuffle(pages)
        shown, hidden = pages[: len(pages) // 2], pages[len(pages) // 2 :]
        for name, score in scorers.items():
            values = score(shown).astype(np.float64)
            values[shown] = -np.inf
            values[0] = -np.inf
            guessed = np.argpartition(-values, len(hidden))[: len(hidden)]
            right[name] += int(np.isin(guessed, hidden).sum())
        hidden_pages += len(hidden)
    return {name: count / max(1, hidden_pages) for name, count in right.items()}


def _most(counts: I64, count: int) -> Bools:
    """Mask of the largest counts; of equal ones the newest pages."""
    later = np.arange(len(counts)) / (len(counts) + 1)
    most: Bools = top((counts + later)[None], count)[0]
    return most


def _scorers(profile: Bools, rng: np.random.Generator) -> dict[str, Callable[[I64], F32]]:
    """Scores of all pages by the pages that are shown."""
    popular = profile.sum(0).astype(np.float32)
    both = _together(profile)
    tie = np.float32(1e-6) * popular
    number = np.arange(profile.shape[1])
    distance = np.abs(number[:, None] - number[None])
    kernel = np.zeros(profile.shape[1], np.float32)
    for d in range(1, min(_REACH, len(kernel))):
        kernel[d] = both[distance == d].mean()
    jaccard = both / np.maximum(popular[:, None] + popular[None] - both, 1)
    conditional = both / np.maximum(np.minimum(popular[:, None], popular[None]), 1)
    shuffled = _together(np.stack([rng.permutation(column) for column in profile.T], axis=1))
    shuffled /= np.maximum(popular[:, None] + popular[None] - shuffled, 1)
    return {
        "popularity": lambda shown: popular,
        "distance": lambda shown: kernel[distance[shown]].sum(0),
        "co-activation, Jaccard": lambda shown: jaccard[shown].sum(0) + tie,
        "co-activation, conditional": lambda shown: conditional[shown].sum(0) + tie,
        "co-activation, steps shuffled": lambda shown: shuffled[shown].sum(0) + tie,
    }


def _together(chosen: Bools) -> F32:
    """Queries that chose both of two pages, [pages, pages]."""
    matrix = chosen.astype(np.float32)
    both: F32 = matrix.T @ matrix
    return both
