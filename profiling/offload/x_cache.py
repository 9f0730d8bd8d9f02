"""Cooperative X-cache (HILOS): inputs of the QKV projection stored for a share of the batch.

A step takes the longest of three ways, by the rule of the engine (``offload/xcache/x_rule.py``) at
rates of drives, link and projection that one run of the bench measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from vllm_ssdkv.offload.xcache.x_rule import XRates, XShape, best_share, times
from vllm_ssdkv.profiling.offload.rig import Sizes

TURNS: Final = 5
"""Turns of a projection; the fastest counts, as others work beside it."""


@dataclass(frozen=True, slots=True)
class XStep:
    """Decode step of a batch, a share of which is X, at rates of this machine.

    Attributes:
        shape: Of the layers.
        rates: Of this machine.
        tokens: Of all contexts, times the layers.
    """

    shape: XShape
    rates: XRates
    tokens: float

    def parts(self, share: float) -> tuple[float, float, float]:
        """Seconds of projection, drives and link for a share of the batch."""
        found = times(self.shape, self.rates, share)
        return self.tokens * found.gpu, self.tokens * found.ssd, self.tokens * found.pci

    def seconds(self, share: float) -> float:
        """Seconds of the step."""
        return self.tokens * times(self.shape, self.rates, share).longest

    def best(self) -> float:
        """Share of the shortest step."""
        return best_share(self.shape, self.rates)


def shape_of(sizes: Sizes) -> XShape:
    """Shape of the layers, in bf16."""
    return XShape(sizes.hidden, sizes.kv_heads, sizes.head_size, itemsize=2)


def measure_projection(sizes: Sizes, tokens: int, requests: Sequence[int]) -> list[dict[str, Any]]:
    """Seconds in which one thread projects X of so many requests in all layers, position
    embedding included, bf16.

    Weights are random, and those of one layer serve all.
    """
    made = torch.Generator().manual_seed(0)
    width = sizes.kv_heads * sizes.head_size
    weight = torch.randn(2 * width, sizes.hidden, generator=made).bfloat16()
    x = torch.randn(tokens, sizes.hidden, generator=made).bfloat16()
    angle = torch.arange(tokens)[:, None] * 10000.0 ** -torch.linspace(0, 1, sizes.head_size // 2)
    cos, sin = angle.cos().bfloat16()[:, None], angle.sin().bfloat16()[:, None]

    def project() -> None:
        both = torch.nn.functional.linear(x, weight).view(tokens, -1, sizes.head_size)
        one, two = both[:, : sizes.kv_heads].chunk(2, dim=-1)
        torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1)

    rows = []
    for count in requests:
        taken = []
        for _ in range(TURNS):
            begun = time.perf_counter()
            for _ in range(count * sizes.layers):
                project()
            taken.append(time.perf_counter() - begun)
        flop = count * tokens * sizes.layers * shape_of(sizes).flop
        rows.append({"requests": count, "tokens": tokens, "project_s": min(taken), "flop": flop})
    return rows
