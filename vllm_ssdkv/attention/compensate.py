"""SparQ's last step: what was not attended to counts as its mean (Ribar et al. 2024, step 5)."""

from __future__ import annotations

import torch

from vllm_ssdkv import _kernels
from vllm_ssdkv.kernels.operands.block_layout import PartialState


def compensate(
    state: PartialState,
    query_token: torch.Tensor,
    alpha: torch.Tensor,
    mean_value: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> None:
    """Mix rows' outputs with their mean V, in place: ``alpha * out + (1 - alpha) * mean_value``.

    The state keeps its log-sum-exp and is finished as any other. Call it once all keys are folded
    in. On any device; all tensors on the state's.

    Args:
        state: Of T query tokens.
        query_token: The rows' tokens in it, int64 [R], none twice.
        alpha: Mass that the attended tokens have, float32 [R, q_heads].
        mean_value: Mean V of all of each row's tokens, float32 [R, kv_heads, head_size].
        sinks: Logits of the attention sinks, [q_heads], that the state began with and ``alpha``
            leaves out: a sink has no value that could be missing.

    Raises:
        ValueError: the shapes do not belong together.
    """
    rows, kv_heads, _ = mean_value.shape
    heads = state.m.shape[1]
    if tuple(alpha.shape) != (rows, heads) or len(query_token) != rows or heads % kv_heads:
        raise ValueError(
            f"alpha {tuple(alpha.shape)}, mean_value {tuple(mean_value.shape)} and "
            f"{len(query_token)} rows of {heads} query heads do not belong together"
        )
    if state.m.device.type != "cpu":
        mix_on_device(state, query_token, alpha, mean_value, sinks)
        return
    token, share, mean = (v.contiguous().numpy() for v in (query_token, alpha, mean_value))
    logits = None if sinks is None else sinks.float().contiguous().numpy()
    _kernels.compensate(state.bound, token, share, mean, logits)


def mix_on_device(
    state: PartialState,
    query_token: torch.Tensor,
    alpha: torch.Tensor,
    mean_value: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> None:
    """:func:`compensate` in torch's own operations, for GPUs. Checks nothing."""
    total = state.l[query_token]
    if sinks is not None:
        sink = torch.exp(sinks.to(total.device, torch.float32) - state.m[query_token])
        attended = (total - sink).clamp(min=0)
        everything = torch.where(attended > 0, attended / alpha, 0)
        alpha = total / (everything + sink)
    mean = mean_value.repeat_interleave(alpha.shape[1] // mean_value.shape[1], dim=1)
    rest = ((1 - alpha) * total)[..., None]
    state.acc[query_token] = alpha[..., None] * state.acc[query_token] + rest * mean
