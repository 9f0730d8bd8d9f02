"""Reads of one layer of a trace: choices at a budget or at equal recall, in an order of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from vllm_ssdkv.profiling.clusters import scores, token_order
from vllm_ssdkv.profiling.clusters.trace import F32, I64, Bools, Trace, budget_pages, pages_of, top

Selector = Literal["sparf", "sparf, sum of weights", "spread", "bounds"]
BUDGET: Final = 0.1
LAYER_HEADS: Final = 8
"""KV heads of the layer that the model reads; neighbouring layers of a trace stand for it."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores and mass of pages, float32 [heads, steps, pages], first page -inf and 0."""

    score: F32
    mass: F32

    @classmethod
    def of(
        cls, trace: Trace, heads: list[tuple[int, int]], steps: I64, block: int, selector: Selector
    ) -> Scored:
        """``block``: tokens within which alike keys share pages; 0: the text's order."""
        found, masses = [], []
        for layer, head in heads:
            keys, query = trace.keys(layer, head), trace.queries(layer, head, steps)
            mass = trace.mass(layer, head, steps)
            if block:
                order = token_order.by_keys(keys, block)
                keys, mass = keys[order], mass[:, order]
            found.append(_scores(query, keys, trace.scale, selector))
            masses.append(pages_of(mass))
        score = np.stack(found)
        score[:, :, 0] = -np.inf
        return cls(score, np.stack(masses))

    def recall(self) -> F32:
        """Recalled mass of all heads and steps for 1, 2, ... pages per head."""
        order = np.argsort(-self.score, axis=2, kind="stable")
        gained = np.take_along_axis(self.mass, order, axis=2).sum((0, 1), dtype=np.float64)
        curve: F32 = (np.cumsum(gained) / max(float(self.mass.sum()), 1e-9)).astype(np.float32)
        return curve

    def pages_for(self, recall: float) -> int:
        """Fewest pages per head that recall so much."""
        reached = self.recall() >= recall - 1e-6
        return 1 + int(np.argmax(reached)) if reached.any() else self.score.shape[2]

    def chosen(self, count: int) -> Bools:
        """The best pages of each head and step."""
        return top(self.score, count)


def _scores(query: F32, keys: F32, scale: float, selector: Selector) -> F32:
    if selector == "spread":
        return scores.spread(query, keys, scale)
    if selector == "bounds":
        return scores.bounds(query, keys, scale)
    logits = scores.channel_logits(query, keys, scale)
    return scores.best_token(logits) if selector == "sparf" else scores.weight_sum(logits)


def baseline(trace: Trace, heads: list[tuple[int, int]], steps: I64) -> tuple[Scored, int, float]:
    """Today's ``sparf`` in the text's order: scores, pages at :data:`BUDGET`, their recall."""
    scored = Scored.of(trace, heads, steps, 0, "sparf")
    count = budget_pages(BUDGET, trace.pages)
    return scored, count, float(scored.recall()[count - 1])
