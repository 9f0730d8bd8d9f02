"""Merging of partial attentions by log-sum-exp, in float32."""

from __future__ import annotations

import torch
import triton.language as tl

from vllm_ssdkv.kernels.operands.block_layout import DTYPES, PartialState
from vllm_ssdkv.triton_kernels.launch import jit, on_device_of, padded, require


@jit
def _merge_kernel(
    m_ptr: torch.Tensor,
    l_ptr: torch.Tensor,
    acc_ptr: torch.Tensor,
    part_m_ptr: torch.Tensor,
    part_l_ptr: torch.Tensor,
    part_acc_ptr: torch.Tensor,
    out_ptr: torch.Tensor,
    queries: int,
    parts: int,
    heads: int,
    out_stride: int,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    NORMALISED: tl.constexpr,
    FINISH: tl.constexpr,
) -> None:
    query = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK_D)
    in_head = channel < HEAD_SIZE
    acc_at = acc_ptr + query * HEAD_SIZE + channel
    if FINISH:
        m = tl.full([], float("-inf"), tl.float32)
        l = tl.zeros([], tl.float32)  # noqa: E741
        acc = tl.zeros([BLOCK_D], tl.float32)
    else:
        m = tl.load(m_ptr + query)
        l = tl.load(l_ptr + query)  # noqa: E741
        acc = tl.load(acc_at, mask=in_head, other=0.0)
    for start in range(0, parts, BLOCK_P):
        part = (start + tl.arange(0, BLOCK_P)).to(tl.int64)
        at = part * queries + query
        part_m = tl.load(part_m_ptr + at, mask=part < parts, other=float("-inf"))
        # A part that saw no key may hold anything in its sums.
        seen = part_m > float("-inf")
        top = tl.maximum(m, tl.max(part_m, 0))
        shift = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.exp(part_m - shift)
        decay = tl.exp(m - shift)
        if NORMALISED:
            l = l * decay + tl.sum(weight, 0)  # noqa: E741
        else:
            part_l = tl.load(part_l_ptr + at, mask=seen, other=0.0)
            l = l * decay + tl.sum(weight * part_l, 0)  # noqa: E741
        part_acc = tl.load(
            part_acc_ptr + at[:, None] * HEAD_SIZE + channel[None, :],
            mask=seen[:, None] & in_head[None, :],
            other=0.0,
        ).to(tl.float32)
        acc = acc * decay + tl.sum(part_acc * weight[:, None], 0)
        m = top
    if FINISH:
        out_at = out_ptr + (query // heads) * out_stride + (query % heads) * HEAD_SIZE + channel
        tl.store(out_at, tl.where(l > 0.0, acc / tl.where(l > 0.0, l, 1.0), 0.0), mask=in_head)
    else:
        tl.store(m_ptr + query, m)
        tl.store(l_ptr + query, l)
        tl.store(acc_at, acc, mask=in_head)


def merge(
    state: PartialState,
    part_m: torch.Tensor,
    part_l: torch.Tensor | None,
    part_acc: torch.Tensor,
    *,
    in_order: bool = False,
) -> None:
    """Fold n partial attentions over disjoint keys into ``state``, in place.

    ``part_m [n, T, Hq]``, ``part_l [n, T, Hq]`` float32 and ``part_acc [n, T, Hq, D]`` are n
    states as ``attend`` leaves them. With ``part_l = None`` they are finished results instead:
    ``part_m`` their log-sum-exps and ``part_acc`` their outputs (float32, float16 or bfloat16). A
    part with ``part_m = -inf`` counts for nothing, whatever its other values. ``in_order`` folds
    one part after the other, so that the bits do not depend on how many come in one call. All
    contiguous, on one device. Queued on the current stream; raises ``ValueError`` on wrong shapes
    or dtypes.
    """
    state.check(tuple(state.acc.shape), state.acc.device)
    tokens, heads, head_size = state.acc.shape
    parts = part_m.shape[0] if part_m.dim() else 0
    allowed = (torch.float32,) if part_l is not None else DTYPES
    for name, part, shape, dtypes in (
        ("part_m", part_m, (parts, tokens, heads), (torch.float32,)),
        ("part_l", part_l, (parts, tokens, heads), (torch.float32,)),
        ("part_acc", part_acc, (parts, tokens, heads, head_size), allowed),
    ):
        require(
            part is None
            or (
                tuple(part.shape) == shape
                and part.dtype in dtypes
                and part.is_contiguous()
                and part.device == state.m.device
            ),
            f"{name} must be contiguous {shape} of {dtypes} on {state.m.device}",
        )
    if not (parts and tokens and heads):
        return
    with on_device_of(state.m):
        _merge_kernel[(tokens * heads,)](
            state.m,
            state.l,
            state.acc,
            part_m,
            part_m if part_l is None else part_l,
            part_acc,
            state.m,
            tokens * heads,
            parts,
            heads,
            0,
            HEAD_SIZE=head_size,
            BLOCK_D=padded(head_size),
            BLOCK_P=1 if in_order else min(16, padded(parts)),
            NORMALISED=part_l is None,
            FINISH=False,
            num_warps=2,
        )


def finish_parts(parts: PartialState, out: torch.Tensor) -> None:
    """Merge n partial states, ``[n, T, Hq]`` and so on, and write the output to ``out``.

    ``out [T, Hq, D]`` is contiguous but for the token stride; queries that saw no key give zeros.
    Queued on the current stream.
    """
    count, tokens, heads, head_size = parts.acc.shape
    with on_device_of(out):
        _merge_kernel[(tokens * heads,)](
            parts.m,
            parts.l,
            parts.acc,
            parts.m,
            parts.l,
            parts.acc,
            out,
            tokens * heads,
            count,
            heads,
            out.stride(0),
            HEAD_SIZE=head_size,
            BLOCK_D=padded(head_size),
            BLOCK_P=min(16, padded(count)),
            NORMALISED=False,
            FINISH=True,
            num_warps=2,
        )
