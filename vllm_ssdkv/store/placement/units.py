"""Units of a slot: the pieces that placement spreads over the lanes, by two rules.

A decode step reads one layer of many slots. By the first rule all of a layer of a slot lies on one
lane, in a unit of up to :data:`STRIPE_UNIT` bytes. That is even where all pages are read, or none.
Chosen pages are not spread over the slots evenly, and the drive of a slot with many of them is
waited for. So in stores for sparse selectors units are cut at KV heads, and the heads of a layer go
round the lanes.

What this file computes is the on-disk format (``docs/format.md``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import UNSET

from vllm_ssdkv.store.format.segment import Rule
from vllm_ssdkv.store.format.slot_geometry import I64, STRIPE_UNIT, SlotGeometry


@dataclass(frozen=True, slots=True)
class Units:
    """Units of a slot.

    Attributes:
        start: Bytes of the slot before each unit, ascending, then the bytes of all; int64,
            [units + 1].
        turn: Lanes between the slot's first one and that of each unit; int64, [units].
    """

    start: I64
    turn: I64


def rule_for(geometry: SlotGeometry, lanes: Sequence[int]) -> Rule:
    """Rule of new segments: heads go round where pages are chosen, and there is where to go."""
    sparse = geometry.summary_pages > 0 and geometry.heads > 1
    return "heads" if sparse and len(set(lanes)) > 1 else UNSET


def units_of(geometry: SlotGeometry, rule: Rule) -> Units:
    """Units of a slot by a rule."""
    if rule is UNSET:
        count = geometry.units_per_slot
        start = np.arange(count + 1, dtype=np.int64) * geometry.unit_bytes
        return Units(start, np.arange(count, dtype=np.int64))
    head, turn = _heads(geometry)
    first = np.flatnonzero(np.diff(head, prepend=-1))  # pages that begin a run of one head
    inside = (
        np.arange(geometry.pages)
        - first[np.searchsorted(first, np.arange(geometry.pages), "right") - 1]
    )
    begins = np.flatnonzero(inside % max(1, STRIPE_UNIT // geometry.page_bytes) == 0)
    start = geometry.header_bytes + begins * geometry.page_bytes
    # The header is a unit of its own, on the slot's first lane.
    return Units(
        np.concatenate([[0], start, [geometry.slot_bytes]]).astype(np.int64),
        np.concatenate([[0], turn[begins]]).astype(np.int64),
    )


def _heads(geometry: SlotGeometry) -> tuple[I64, I64]:
    """Number of the run of one KV head and layer that each page is in, and its turn, layer plus
    head; int64, [pages].

    Channel pages of a layer are shared out evenly among its heads; so are summary pages, as if they
    were those of a layer behind the last.
    """
    heads, layers = geometry.heads, geometry.layers
    parts = [
        (np.arange(layers), geometry.pages_per_layer),
        (np.array([layers]), geometry.summary_pages),
        (np.arange(layers), geometry.channel_pages),
    ]
    runs: list[I64] = []
    turns: list[I64] = []
    for number, (layer, count) in enumerate(parts):
        head = np.arange(count, dtype=np.int64) * heads // max(count, 1)
        of = layer.astype(np.int64)[:, None]
        runs.append((((layers + 1) * number + of) * heads + head).ravel())
        turns.append((of + head).ravel())
    return np.concatenate(runs), np.concatenate(turns)
