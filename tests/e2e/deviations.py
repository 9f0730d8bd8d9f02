"""Deviations of verified hits in an engine's workers, in units of the tolerance."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.connector.worker.block_comparison import BlockComparer

EXTENSION = "tests.e2e.deviations.NotedDeviations"
"""For vLLM's option ``worker_extension_cls``; ``LLM.collective_rpc("take_deviations")`` asks."""

_NOTED: list[float] = []
_compare = BlockComparer.deviation


def _noted(self: BlockComparer, block_id: int, frame: NDArray[np.uint8], layers: int) -> float:
    deviation = _compare(self, block_id, frame, layers)
    _NOTED.append(deviation / self.tolerance)
    return deviation


BlockComparer.deviation = _noted  # type: ignore[method-assign]  # in whatever process asks for it


class NotedDeviations:
    """Mixed into vLLM's worker."""

    def take_deviations(self) -> list[float]:
        """Of each comparison since the last call."""
        taken, _NOTED[:] = list(_NOTED), []
        return taken
