"""Cooperative X-cache (HILOS): inputs of the QKV projection stored for a share of the batch.

For that share alpha a drive holds X, ``h`` numbers per token, in place of ``2 n_kv d`` of K and V.
X crosses the link, and the accelerator projects it, while drives attend to the rest. A step takes
the longest of the three: of drives, which read KV and X; of the link; of the projection, which is
``4 h n_kv d`` FLOP per token and layer (``4 h^2`` where every head has KV of its own).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from vllm_ssdkv.profiling.offload.rig import Sizes

GRID: Final = 100
"""Shares that are tried, beside 0."""
TURNS: Final = 5
"""Of a projection; the fastest counts, as others work beside it."""


@dataclass(frozen=True, slots=True)
class XStep:
    """One decode step of a batch, and rates of this machine.

    Attributes:
        kv_bytes: K and V of all contexts.
        x_bytes: X of all contexts.
        flop: Of projecting all of it.
        drives: Bytes/s that drives attend to.
        link: Bytes/s to the accelerator.
        projection: FLOP/s of the accelerator.
    """

    kv_bytes: float
    x_bytes: float
    flop: float
    drives: float
    link: float
    projection: float

    def parts(self, share: float) -> tuple[float, float, float]:
        """Seconds of projection, drives and link for a share of the batch."""
        read = (1 - share) * self.kv_bytes + share * self.x_bytes
        return (
            share * self.flop / self.projection,
            read / self.drives,
            share * self.x_bytes / self.link,
        )

    def seconds(self, share: float) -> float:
        """Seconds of the step."""
        return max(self.parts(share))

    def best(self) -> float:
        """The share of the shortest step; 0 where X is no smaller than K and V."""
        if self.x_bytes >= self.kv_bytes:
            return 0.0
        return min((i / GRID for i in range(GRID + 1)), key=self.seconds)


def flop_per_token(sizes: Sizes) -> float:
    """FLOP of projecting one token's K and V in one layer."""
    return 4.0 * sizes.hidden * sizes.kv_heads * sizes.head_size


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
        flop = count * tokens * sizes.layers * flop_per_token(sizes)
        rows.append({"requests": count, "tokens": tokens, "project_s": min(taken), "flop": flop})
    return rows
