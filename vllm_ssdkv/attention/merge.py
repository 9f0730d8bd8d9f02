"""Merging attentions over disjoint sets of keys by their log-sum-exps, in fp32.

With ``out_i = softmax(s_i) v_i`` and ``lse_i = log sum exp(s_i)`` over the keys of part ``i``,
attention over all keys is ``sum_i exp(lse_i - lse) out_i`` with ``lse = log sum_i exp(lse_i)``
(FlashDecoding, Dao et al. 2023; the rule that near-storage devices, sequence splits and streamed
context all rely on). Weights are taken relative to the largest ``lse_i``, so nothing overflows. A
part that saw no key has ``lse_i = -inf``: it takes no part, whatever its ``out_i``.
"""

from __future__ import annotations

import torch


def merge(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge ``n`` partial attentions.

    Args:
        outs: ``[n, ..., head_size]``, any floating dtype, each normalised over its own keys.
        lses: ``[n, ...]``, natural logarithm.

    Returns:
        ``out [..., head_size]`` and ``lse [...]``, both fp32. Where no part saw a key: zeros and
        minus infinity.

    Raises:
        ValueError: the shapes do not belong together, or ``n`` is 0.
    """
    if lses.shape != outs.shape[:-1] or outs.ndim < 2 or outs.shape[0] == 0:
        raise ValueError(f"cannot merge outs {list(outs.shape)} with lses {list(lses.shape)}")
    lses = lses.float()
    top = lses.amax(dim=0)
    weights = torch.exp(lses - _finite(top))
    total = weights.sum(dim=0)
    # A part without keys may hold anything, NaN included: 0 * NaN must not get in.
    parts = torch.where(weights[..., None] > 0, outs.float() * weights[..., None], 0.0)
    out = parts.sum(dim=0) / torch.where(total > 0, total, 1.0)[..., None]
    return out, top + torch.log(torch.where(total > 0, total, 1.0))


class MergeState:
    """Partial attentions folded in one at a time: memory does not grow with their number.

    Not safe for concurrent use. The result equals :func:`merge` of the same parts in the same
    order up to fp32 rounding.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device | None = None) -> None:
        """Start empty for outputs of ``shape = (..., head_size)``."""
        self._top = torch.full(shape[:-1], float("-inf"), device=device)
        self._total = torch.zeros(shape[:-1], device=device)
        self._sum = torch.zeros(shape, device=device)

    def add(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Fold in ``out [..., head_size]`` and ``lse [...]`` of further keys.

        Raises:
            ValueError: a shape differs from the one given at construction.
        """
        if out.shape != self._sum.shape or lse.shape != self._top.shape:
            raise ValueError(
                f"expected out {list(self._sum.shape)} and lse {list(self._top.shape)}, "
                f"got {list(out.shape)} and {list(lse.shape)}"
            )
        lse = lse.float()
        top = torch.maximum(self._top, lse)
        before = torch.exp(self._top - _finite(top))
        weight = torch.exp(lse - _finite(top))
        part = torch.where(weight[..., None] > 0, out.float() * weight[..., None], 0.0)
        self._sum = self._sum * before[..., None] + part
        self._total = self._total * before + weight
        self._top = top

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``out [..., head_size]`` and ``lse [...]`` in fp32, as :func:`merge` does."""
        total = torch.where(self._total > 0, self._total, 1.0)
        return self._sum / total[..., None], self._top + torch.log(total)


def _finite(top: torch.Tensor) -> torch.Tensor:
    """Replace minus infinity by 0, since ``-inf - -inf`` is not a number."""
    return torch.where(torch.isneginf(top), 0.0, top)
