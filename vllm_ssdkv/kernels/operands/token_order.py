"""Order of the tokens of blocks on their way to slots: alike ones share a page.

Attention over a context does not care for the order of its tokens: positions are in K already. So
the tokens of a block may go into its pages by likeness, for each layer and KV head on its own, and
a page that a query needs then has more of what it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv import _kernels

ROW_STEP: Final = 16
"""Features of a token are padded to a multiple of so many (``kRowStep``)."""


@dataclass(frozen=True, slots=True)
class TokenOrder:
    """Order of the tokens of n blocks of L layers. Holds references, copies nothing.

    Attributes:
        layers: 1 where a layer's tokens are ordered, uint8 [L].
        kept: First pages of each block that keep their tokens, int32 [n].
        features: By layer and block, rows by which tokens are alike: float32 [kv_heads,
            block_tokens, width], contiguous, of one width, a multiple of :data:`ROW_STEP`, on the
            kernels' device. Those that are missing go by their K.

    >>> TokenOrder(np.ones(2, np.uint8), np.array([1, 0], np.int32)).width
    0
    """

    layers: NDArray[np.uint8]
    kept: NDArray[np.int32]
    features: Mapping[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Numbers of a token's features; 0 without any."""
        return next((one.shape[2] for one in self.features.values()), 0)

    def addresses(self) -> NDArray[np.uint64] | None:
        """Addresses of the features, uint64 [L * n], 0 for those that are missing; None: all are.

        Raises:
            ValueError: features are not as the class says.
        """
        if not self.features:
            return None
        found = np.zeros((len(self.layers), len(self.kept)), np.uint64)
        for (layer, block), rows in self.features.items():
            if (
                rows.dtype != torch.float32
                or not rows.is_contiguous()
                or rows.shape[2] != self.width
                or rows.shape[2] % ROW_STEP
            ):
                raise ValueError(f"features of {rows.dtype} {tuple(rows.shape)} cannot be used")
            found[layer, block] = rows.data_ptr()
        return found.ravel()

    @property
    def bound(self) -> _kernels.Order:
        """The order as native kernels take it: checked."""
        return _kernels.Order(self.layers, self.kept, self.addresses(), self.width)
