"""The end of an online softmax: outputs and log-sum-exps from a partial state."""

from __future__ import annotations

import torch
import triton.language as tl

from vllm_ssdkv.kernels.operands.block_layout import DTYPES, PartialState
from vllm_ssdkv.triton_kernels.launch import jit, on_device_of, padded, require


@jit
def _finish_kernel(
    m_ptr: torch.Tensor,
    l_ptr: torch.Tensor,
    acc_ptr: torch.Tensor,
    out_ptr: torch.Tensor,
    lse_ptr: torch.Tensor,
    queries: int,
    heads: int,
    out_stride: int,
    value_scale: float,
    HEAD_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WITH_LSE: tl.constexpr,
) -> None:
    query = tl.program_id(0).to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    channel = tl.arange(0, BLOCK_D)
    live = query < queries
    mask = live[:, None] & (channel < HEAD_SIZE)[None, :]
    m = tl.load(m_ptr + query, mask=live, other=float("-inf"))
    l = tl.load(l_ptr + query, mask=live, other=0.0)  # noqa: E741
    seen = l > 0.0
    divisor = tl.where(seen, l, 1.0)
    acc = tl.load(acc_ptr + query[:, None] * HEAD_SIZE + channel[None, :], mask=mask, other=0.0)
    out = tl.where(seen[:, None], acc / divisor[:, None] * value_scale, 0.0)
    at = (query // heads) * out_stride + (query % heads) * HEAD_SIZE
    tl.store(out_ptr + at[:, None] + channel[None, :], out, mask=mask)
    if WITH_LSE:
        lse = tl.where(seen, m + tl.log(divisor), float("-inf"))
        tl.store(lse_ptr + query, lse, mask=live)


def finish(state: PartialState, out: torch.Tensor, lse: torch.Tensor | None = None) -> None:
    """Write ``acc / l``, times the scale of V, to ``out`` and ``m + ln l`` to ``lse``.

    ``out [T, Hq, D]`` float32, float16 or bfloat16, contiguous but for the token stride; ``lse
    [T, Hq]`` float32, contiguous. Queries that saw no key give zeros and ``-inf``. Queued on the
    current stream; raises ``ValueError`` on wrong shapes, dtypes or devices.
    """
    state.check(tuple(state.acc.shape), state.acc.device)
    tokens, heads, head_size = state.acc.shape
    require(
        tuple(out.shape) == (tokens, heads, head_size)
        and out.dtype in DTYPES
        and out.stride(2) == 1
        and out.stride(1) == head_size
        and out.device == state.m.device,
        f"out must be {(tokens, heads, head_size)} of {DTYPES} on {state.m.device} with "
        f"contiguous heads, got {out.dtype} {tuple(out.shape)}",
    )
    require(
        lse is None
        or (
            tuple(lse.shape) == (tokens, heads)
            and lse.dtype == torch.float32
            and lse.is_contiguous()
            and lse.device == out.device
        ),
        f"lse must be contiguous float32 {(tokens, heads)} on {out.device}",
    )
    if not (tokens and heads):
        return
    block = 8
    with on_device_of(out):
        _finish_kernel[(-(-tokens * heads // block),)](
            state.m,
            state.l,
            state.acc,
            out,
            state.m if lse is None else lse,
            tokens * heads,
            heads,
            out.stride(0),
            state.softmax.value_scale,
            HEAD_SIZE=head_size,
            BLOCK_Q=block,
            BLOCK_D=padded(head_size),
            WITH_LSE=lse is not None,
            num_warps=4,
        )
