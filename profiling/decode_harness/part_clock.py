"""Times of the parts of steps; on a GPU a clock that waits for the device at every lap."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch

from vllm_ssdkv.kernels.step_clock import ATTEND, PARTS, AttentionClock

WINDOW_PART: Final = "attend_window"


def synchronize(device: torch.device) -> None:
    """Wait for everything queued on the device: nothing on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class PartClock:
    """An ``AttentionClock`` whose laps end when the device is done, for a GPU; on a CPU the sum of
    the clocks of steps, since calls end when they return.

    On a GPU its times add up to more than a step takes without it: nothing overlaps.

    Attributes:
        by_part: Seconds of all layers by part: ``PARTS``, of which ``attend`` is over the context,
            and ``attend_window``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._since = 0.0
        self._window = False
        self.by_part: dict[str, float] = dict.fromkeys((*PARTS, WINDOW_PART), 0.0)

    def start(self) -> None:
        """A layer's attention begins, with that over the window."""
        synchronize(self._device)
        self._since, self._window = time.perf_counter(), True

    def lap(self, part: int) -> None:
        """The time since the last call was this part's."""
        synchronize(self._device)
        now = time.perf_counter()
        name = PARTS[part]
        if part == ATTEND and self._window:
            name, self._window = WINDOW_PART, False
        self.by_part[name] += now - self._since
        self._since = now

    def add(self, clock: AttentionClock) -> None:
        """Add the times of a step."""
        for name, seconds in zip(PARTS, clock.seconds, strict=True):
            self.by_part[name] += seconds
        self.by_part[PARTS[ATTEND]] -= clock.window_seconds
        self.by_part[WINDOW_PART] += clock.window_seconds

    @property
    def seconds(self) -> tuple[float, ...]:
        """As of ``AttentionClock``: attending to the window is attending."""
        whole = {**self.by_part, PARTS[ATTEND]: self.by_part[PARTS[ATTEND]]}
        whole[PARTS[ATTEND]] += self.by_part[WINDOW_PART]
        return tuple(whole[part] for part in PARTS)


class AttentionTimer:
    """Seconds that calls of attention take, device included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds = 0.0

    def time(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Result of ``work``."""
        synchronize(self._device)
        begun = time.perf_counter()
        found = work()
        synchronize(self._device)
        self.seconds += time.perf_counter() - begun
        return found
