"""Random queries' pages, and clusters of them."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from vllm_ssdkv.clustering.clusters import Clusters, cluster
from vllm_ssdkv.clustering.co_activation import ActivationWindow, Form

FORMS: list[Form] = ["jaccard", "conditional", "printed"]

seeds = st.integers(0, 2**32 - 1)


@st.composite
def windows(draw: st.DrawFn, most: int = 40) -> ActivationWindow:
    """A window of groups of pages that queries choose together, with some pages beside."""
    pages, steps = draw(st.integers(1, most)), draw(st.sampled_from([1, 5, 64, 100]))
    random = np.random.default_rng(draw(seeds))
    window = ActivationWindow(pages, steps)
    groups = random.integers(0, 4, pages)
    for _ in range(draw(st.integers(0, 2 * min(steps, 30)))):
        chosen = (groups == random.integers(0, 4)) & (random.random(pages) < 0.8)
        chosen |= random.random(pages) < 0.1
        window.record(np.flatnonzero(chosen))
    return window


@st.composite
def clusterings(draw: st.DrawFn) -> Clusters:
    """Clusters of such a window."""
    window = draw(windows())
    threshold = draw(st.sampled_from([0.2, 0.5, 0.9]))
    affinity = window.affinity(draw(st.sampled_from(FORMS)), threshold, draw(st.integers(0, 12)))
    return cluster(
        affinity,
        threshold,
        draw(st.integers(1, 10)),
        copies=draw(st.booleans()),
        expand=draw(st.sampled_from(["mean", "medoid"])),
        seed=draw(seeds),
    )
