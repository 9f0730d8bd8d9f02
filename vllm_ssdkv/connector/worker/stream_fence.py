"""Keeps copies of the loader's thread behind what the forward pass's stream had to do."""

from __future__ import annotations

from typing import Any

import torch


class StreamFence:
    """An event on a GPU; nothing on the CPU, where work is done when calls return.

    A block that vLLM hands out for a load may be one that the step before still writes to: of a
    request that has ended, whose last draft is on its way. Each thread has a stream of its own.
    """

    def __init__(self, device: torch.device):
        self._device = device if device.type == "cuda" else None
        self._event: Any = None

    def set(self) -> None:
        """Put the work that is queued on this thread's stream first. Never waits."""
        if self._device is not None:
            cuda: Any = torch.cuda
            event = cuda.Event()
            event.record(cuda.current_stream(self._device))
            self._event = event

    def follow(self) -> None:
        """Let the work that this thread queues from now on come after it. Never waits."""
        if self._event is not None:
            cuda: Any = torch.cuda
            cuda.current_stream(self._device).wait_event(self._event)
