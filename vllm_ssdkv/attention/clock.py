"""Where the time of a step's attention goes.

Choosing pages, what fetching them costs the processor (looking them up, submitting, checking),
guessing what will be chosen next while they are being read, waiting for bytes, attending, merging.
"""

from __future__ import annotations

import time
from typing import Final, Literal, TypeAlias, get_args

Part: TypeAlias = Literal["select", "fetch", "ahead", "wait", "attend", "merge"]
PARTS: Final[tuple[Part, ...]] = get_args(Part)


class AttentionClock:
    """Seconds by part. Used by the thread that runs the forward pass.

    On a GPU kernels run later than they are called: what is measured there is the time of the host.
    """

    def __init__(self) -> None:
        self.seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self._last = 0.0

    def start(self) -> None:
        """Attention of a layer begins."""
        self._last = time.perf_counter()

    def lap(self, part: Part) -> None:
        """What was done since the last call was this."""
        now = time.perf_counter()
        self.seconds[part] += now - self._last
        self._last = now
