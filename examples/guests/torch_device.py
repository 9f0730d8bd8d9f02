"""A device of your own: PyTorch attends to contexts near storage, on the host.

Set ``offload.kind`` to ``torch_device:TorchDevice``, with this folder on ``PYTHONPATH``. The host's
own device is faster; begin with this one where pages go to a processor of yours.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.kernels.operands.block_layout import BlockLayout, BlockSource, PartialState, Rows
from vllm_ssdkv.kernels.operands.page_list import PageList
from vllm_ssdkv.offload.kernel_device import KernelDevice
from vllm_ssdkv.offload.protocol import ContextKernels, DeviceSetup


class TorchKernels:
    """Attention over pages in memory of the host. See ``BlockAttention`` and ``PageAttention``."""

    def attend(
        self,
        query: torch.Tensor,
        state: PartialState,
        rows: Rows,
        source: BlockSource,
        layout: BlockLayout,
        scale: float,
        sliding_window: int | None = None,
    ) -> None:
        """Attend to whole blocks: each has the pages of its KV heads, one behind the other."""
        groups, stride = np.arange(layout.groups), layout.page_stride_bytes
        for row in range(len(rows)):
            blocks = slice(int(rows.block_begin[row]), int(rows.block_end[row]))
            first = np.asarray(source.position[blocks])[:, None] + groups * layout.page_tokens
            for head in range(layout.kv_heads):
                at = (head * layout.groups + groups) * stride
                pages = np.asarray(source.base[blocks])[:, None] + at.astype(np.uint64)
                for i in range(int(rows.query_count[row])):
                    token, last = int(rows.query_begin[row]) + i, int(rows.first_position[row]) + i
                    seen = _tokens(first.ravel(), layout) <= last
                    _fold(query, state, (token, head), pages.ravel(), seen, layout, scale)

    def attend_pages(
        self,
        query: torch.Tensor,
        state: PartialState,
        pages: PageList,
        layout: BlockLayout,
        scale: float,
    ) -> None:
        """Attend to chosen pages, of each row and KV head its own."""
        for one in range(len(pages.begin)):
            row, head = divmod(one, layout.kv_heads)
            mine = slice(int(pages.begin[one]), int(pages.end[one]))
            seen = _tokens(pages.position[mine], layout) <= int(pages.query_position[row])
            if pages.token_mask is not None:
                seen &= np.asarray(pages.token_mask[mine]) != 0
            at = int(pages.query_token[row]), head
            _fold(query, state, at, np.asarray(pages.address[mine]), seen, layout, scale)


def _tokens(first: Any, layout: BlockLayout) -> NDArray[np.int64]:  # noqa: ANN401 - one of many
    """Positions of the tokens of pages, [P, page_tokens], from those of their first ones."""
    found: NDArray[np.int64] = np.asarray(first)[:, None] + np.arange(layout.page_tokens)
    return found


def _fold(
    query: torch.Tensor,
    state: PartialState,
    at: tuple[int, int],
    pages: NDArray[np.uint64],
    seen: NDArray[np.bool_],
    layout: BlockLayout,
    scale: float,
) -> None:
    """Fold pages at these addresses into the state of one token and KV head, ``at``; ``seen``
    [P, page_tokens]: tokens to attend to."""
    if not seen.any():
        return
    count, nbytes = layout.page_tokens * layout.head_size, layout.page_payload_bytes
    held = [(ctypes.c_char * nbytes).from_address(int(page)) for page in pages]
    kv = torch.stack([torch.frombuffer(page, dtype=layout.dtype) for page in held]).float()
    key, value = (part.reshape(-1, layout.head_size) for part in kv.split(count, dim=1))
    token, head = at
    each = query.shape[1] // layout.kv_heads
    mine = token, slice(head * each, (head + 1) * each)
    logits = query[mine].float() @ key.T * scale
    logits[:, torch.from_numpy(~seen.ravel())] = -torch.inf
    highest = torch.maximum(state.m[mine], logits.amax(1))
    weights, before = torch.exp(logits - highest[:, None]), torch.exp(state.m[mine] - highest)
    state.acc[mine] = state.acc[mine] * before[:, None] + weights @ value
    state.l[mine] = state.l[mine] * before + weights.sum(1)
    state.m[mine] = highest


class TorchDevice(KernelDevice):
    """A thread that takes work in order, brings its pages and has PyTorch attend to them."""

    def __init__(self) -> None:
        kernels = TorchKernels()
        super().__init__("torch", ContextKernels(kernels, kernels))

    @classmethod
    def open(cls, setup: DeviceSetup) -> TorchDevice:
        """The device for one worker; ``setup`` has the options, the layout and the store."""
        del setup
        return cls()
