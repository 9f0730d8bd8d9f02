"""Distance of next-token distributions from those of dense attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Divergence:
    """Means over decode steps, of which each has a distribution over the vocabulary.

    Attributes:
        kl: Kullback-Leibler divergence of sparse from dense attention, in nats.
        loss: Negative log-probability of the forced tokens, in nats.
        same: Share of the steps in which both have the same first choice.
    """

    kl: float
    loss: float
    same: float


def divergence(dense: torch.Tensor, found: torch.Tensor, forced: Sequence[int]) -> Divergence:
    """Compare log-probabilities, both ``[steps, vocabulary]``; ``forced`` has a token per step."""
    tokens = torch.tensor(forced, dtype=torch.int64)
    kl = (dense.exp() * (dense - found)).sum(-1)
    loss = -found.gather(-1, tokens[:, None])
    same = dense.argmax(-1) == found.argmax(-1)
    return Divergence(float(kl.mean()), float(loss.mean()), float(same.float().mean()))
