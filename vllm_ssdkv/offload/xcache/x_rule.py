"""Share of the contexts that is stored as X, by what three ways take. Pure functions.

HILOS, section on the X-cache, corrected: X is h numbers a token, K and V are 2 n_kv d; projecting
them again takes 4 h n_kv d FLOP, which for MHA is 4 h^2; the closed form ignores the accelerator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

GRID: Final = 64
"""Shares that are compared are multiples of 1 / 64."""


@dataclass(frozen=True, slots=True)
class XShape:
    """Shape of a layer, as far as X and K and V depend on it.

    Attributes:
        hidden: Channels of X.
        kv_heads: Heads of K and V.
        head_size: Channels of each.
        itemsize: Bytes of a number.
    """

    hidden: int
    kv_heads: int
    head_size: int
    itemsize: int

    @property
    def x_bytes(self) -> int:
        """Bytes of X of a token in a layer."""
        return self.hidden * self.itemsize

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of a token in a layer."""
        return 2 * self.kv_heads * self.head_size * self.itemsize

    @property
    def flop(self) -> int:
        """FLOP that make K and V of a token from X: 4 h^2 where heads are not grouped."""
        return 4 * self.hidden * self.kv_heads * self.head_size

    @property
    def pays(self) -> bool:
        """Check whether X is smaller than K and V."""
        return self.x_bytes < self.kv_bytes

    def blocks_per_slot(self, block_tokens: int, window_tokens: int) -> int:
        """Blocks whose X shares a slot: as many as it has room for. It is written when the last one
        is full, which must be before the first one leaves the window.

        Example:
            >>> XShape(hidden=4096, kv_heads=32, head_size=128, itemsize=2).blocks_per_slot(16, 512)
            2
        """
        return min(self.kv_bytes // self.x_bytes, 1 + (window_tokens - 1) // block_tokens)


@dataclass(frozen=True, slots=True)
class XRates:
    """Measured rates.

    Attributes:
        storage: Bytes per second at which the device brings and attends to contexts.
        link: Bytes per second from there to the accelerator.
        flops: FLOP per second of projections.
    """

    storage: float
    link: float
    flops: float


@dataclass(frozen=True, slots=True)
class XTimes:
    """Seconds for a token of context in a layer, of three ways that work at the same time."""

    gpu: float
    ssd: float
    pci: float

    @property
    def longest(self) -> float:
        """Seconds until all have ended."""
        return max(self.gpu, self.ssd, self.pci)


def times(shape: XShape, rates: XRates, share: float) -> XTimes:
    """Times where this share of the contexts is X."""
    x_bytes = share * shape.x_bytes
    return XTimes(
        gpu=share * shape.flop / rates.flops,
        ssd=((1 - share) * shape.kv_bytes + x_bytes) / rates.storage,
        pci=x_bytes / rates.link,
    )


def best_share(shape: XShape, rates: XRates) -> float:
    """Share from 0 to 1 that ends first; the least of several. 0 where X is not smaller."""
    if not shape.pays:
        return 0.0
    shares = [i / GRID for i in range(GRID + 1)]
    return min(shares, key=lambda share: times(shape, rates, share).longest)


def why(shape: XShape, rates: XRates, share: float) -> str:
    """Times that decided, for the log."""
    found, without = times(shape, rates, share), times(shape, rates, 0.0)
    return (
        f"for 1000 tokens in a layer projecting takes {1e6 * found.gpu:.1f} ms, storage "
        f"{1e6 * found.ssd:.1f} ms, the link {1e6 * found.pci:.1f} ms; storage takes "
        f"{1e6 * without.ssd:.1f} ms without X"
    )
