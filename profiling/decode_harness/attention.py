"""The attention functions that transformers calls in place of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from vllm_ssdkv.profiling.decode_harness.part_clock import AttentionTimer

NAME: Final = "vllm_ssdkv_harness"
"""Name of the function in transformers' registry. Names that its mask registry lacks get no
mask."""


_UNKNOWN: Final = ("softcap", "s_aux", "sliding_window")
"""Arguments for soft caps, sinks and sliding windows, which the harness's attention lacks."""


class Attention(Protocol):
    """Attention of one layer, with what it keeps of K and V."""

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Output [B, T, Hq, D] of query [B, Hq, T, D], key and value [B, Hkv, T, D]."""
        ...


def layer_of(module: torch.nn.Module) -> int:
    """Number of the layer whose attention a module of the model is."""
    number: Any = module.layer_idx
    return int(number)


_current: list[Attention] = []


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **beside: Any,  # noqa: ANN401 - what transformers passes on
) -> tuple[torch.Tensor, None]:
    unknown = [name for name in _UNKNOWN if beside.get(name) is not None]
    if unknown:
        raise ValueError(f"the harness does not attend with {', '.join(unknown)}")
    return _current[-1](module, query, key, value, scaling), None


AttentionInterface.register(NAME, _attend)


@contextmanager
def attention_by(model: Any, attention: Attention) -> Iterator[None]:  # noqa: ANN401 - transformers'
    """Have the model attend by ``attention`` inside the block. One thread, one model at a time."""
    config = model.config  # which all modules of a decoder share; a public setter visits each
    before = config._attn_implementation
    config._attn_implementation = NAME
    _current.append(attention)
    try:
        yield
    finally:
        _current.pop()
        config._attn_implementation = before


def sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """transformers' SDPA, of a query that is the newest token, over all of ``key``: no mask."""
    out: torch.Tensor = sdpa_attention_forward(module, query, key, value, None, scaling=scale)[0]
    return out


def timed(attention: Attention, timer: AttentionTimer) -> Attention:
    """The same attention, its time taken."""

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        work: Callable[[], torch.Tensor] = lambda: attention(module, query, key, value, scale)  # noqa: E731
        return timer.time(work)

    return attend
