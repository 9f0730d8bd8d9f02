"""Time of a step's forward pass, on the device that computes it."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

_PENDING = 8
"""Steps whose end the GPU has not reached yet; older ones are given up."""


class StepTimer:
    """Times single steps. Never waits for the device. Used by the thread of the forward pass."""

    def __init__(self, device: torch.device):
        """CUDA's calls return before the work is done, so the time passes on the device."""
        self._cuda = device.type == "cuda"
        self._number = 0
        self._begun: Any = None
        self._ended: deque[tuple[int, Any, Any]] = deque(maxlen=_PENDING)

    def begin(self, number: int) -> None:
        """The forward pass of step ``number`` begins."""
        self._number, self._begun = number, self._mark()

    def end(self) -> None:
        """It is over, or all of it is on its way to the device."""
        if self._begun is not None:
            self._ended.append((self._number, self._begun, self._mark()))
            self._begun = None

    def take(self) -> list[tuple[int, float]]:
        """(step, seconds) of those that have ended since the last call."""
        done: list[tuple[int, float]] = []
        while self._ended and (not self._cuda or self._ended[0][2].query()):
            number, begun, ended = self._ended.popleft()
            seconds = begun.elapsed_time(ended) / 1000 if self._cuda else ended - begun
            done.append((number, seconds))
        return done

    def _mark(self) -> Any:  # noqa: ANN401 - a time, or a CUDA event
        if not self._cuda:
            return time.perf_counter()
        cuda: Any = torch.cuda
        event = cuda.Event(enable_timing=True)
        event.record()
        return event
