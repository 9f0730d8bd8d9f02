"""Deviations of verified hits in an engine's workers, in units of the tolerance.

Only workers import this module: it changes the comparer of the process that it is in.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.connector.worker.block_comparison import BlockComparer

_NOTED: list[float] = []
_compare = BlockComparer.deviation


def _noted(self: BlockComparer, block_id: int, frame: NDArray[np.uint8]) -> float:
    deviation = _compare(self, block_id, frame)
    _NOTED.append(deviation / self.tolerance)
    return deviation


BlockComparer.deviation = _noted  # type: ignore[method-assign]  # in whatever process asks for it


class NotedDeviations:
    """Mixed into vLLM's worker, by its option ``worker_extension_cls``."""

    def take_deviations(self) -> list[float]:
        """Of each comparison since the last call."""
        taken, _NOTED[:] = list(_NOTED), []
        return taken
