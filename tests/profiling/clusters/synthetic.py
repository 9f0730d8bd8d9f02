"""Traces of no model: keys in groups, queries that seek some of them."""

from __future__ import annotations

import numpy as np

from vllm_ssdkv.profiling.clusters.trace import I64, PAGE, WINDOW, Trace

GROUPS = 24
SIZE = 16


def trace(name: str = "made", *, seed: int = 0, tokens: int = 2048, queries: int = 192) -> Trace:
    """2 layers, 2 KV heads of 2 query heads; tokens of a group are scattered over the context.

    A query seeks 2 groups, and 8 queries in a row seek the same. Group g is ever sought together
    with its partner ``g ^ 1``.
    """
    rng = np.random.default_rng(seed)
    centres = 4 * rng.normal(size=(2, 2, GROUPS, SIZE))
    group = rng.integers(0, GROUPS, tokens)
    key = centres[:, :, group] + 0.5 * rng.normal(size=(2, 2, tokens, SIZE))
    sought: I64 = np.repeat(rng.integers(0, GROUPS, -(-queries // 8)), 8)[:queries]
    wanted = centres[:, :, sought] + centres[:, :, sought ^ 1]
    query = np.repeat(wanted, 2, axis=1) + rng.normal(size=(2, 4, queries, SIZE))
    context = (tokens - queries - WINDOW) // PAGE * PAGE
    return Trace(
        name,
        (query / 2).astype(np.float16),
        key.astype(np.float16),
        np.arange(2),
        context,
        queries - 64,
        SIZE**-0.5,
    )
