"""Delayed write-back by the store itself: blocks of so many tokens, written to drives of a paper.

A block is written when its last token is there, whole: header, and pages of 4 KiB or more. So the
tokens of a block are those between two writes. Contexts are in DRAM, the host's device attends to
them, and the drive does nothing but write, at the rate of the profile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vllm_ssdkv.config.io_engine import ThrottleRule
from vllm_ssdkv.config.offload import DriveProfile
from vllm_ssdkv.offload.host import HostDevice
from vllm_ssdkv.offload.testing.drive_timing import DRIVES
from vllm_ssdkv.profiling.offload.rig import Contexts, Sizes, opened

LONGEST: Final = 1024
"""Tokens of a context, at most: what a token's write costs does not depend on them."""
STEPS: Final = 64
"""Minimum number of steps of a turn; a multiple of every interval."""
TURNS: Final = 3
"""The fastest counts, as others work beside it."""


@dataclass(frozen=True, slots=True)
class Writing:
    """Cases of writing.

    Attributes:
        requests: At a time.
        tokens: Of each context.
        intervals: Tokens between two writes.
        dilation: Factor by which drives are slower than their profiles.
        threads: Of the host's device.
    """

    requests: int
    tokens: int
    intervals: Sequence[int]
    profiles: Sequence[DriveProfile]
    dilation: float
    threads: int
    sizes: Sizes

    @property
    def cases(self) -> int:
        """Number of cases, each of which is shown when it begins."""
        return len(self.intervals) * len(self.profiles)

    def measure(self, directory: Path, note: Callable[[str], None]) -> list[dict[str, Any]]:
        """Figures of each profile and interval; stores are made below ``directory``.

        Raises:
            BenchError: a drive or a device failed.
        """
        model, rows = self.sizes.model(), []
        tokens = min(self.tokens, LONGEST)
        for interval in self.intervals if self.profiles else ():
            contexts = Contexts(tokens, self.requests, block_tokens=interval, written=True)
            with opened(contexts, model, 1.0, directory) as rig:
                for profile in self.profiles:
                    note(f"{self.requests} x {tokens} tokens: {profile} written every {interval}")
                    drive = ThrottleRule(
                        bandwidth=DRIVES[profile].write_bandwidth, dilation=self.dilation
                    )
                    device = HostDevice(self.threads)
                    steps = max(STEPS, interval)
                    turns = TURNS if steps == STEPS else 1
                    found = rig.write(device, steps, turns, drive)
                    rows.append({"profile": profile, "interval": interval, **found})
        return rows
