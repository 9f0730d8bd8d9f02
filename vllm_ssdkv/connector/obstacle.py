"""Obstacles to a start, and the ways out, of which only those are named that work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from vllm_ssdkv.base.errors import UnsupportedError

REUSE: Final = 'use mode "reuse"'
"""A way out of page mode. It is named where the model can be served there."""

WITHOUT_US: Final = "leave --kv-transfer-config out"
"""The way out where there is no other."""


TIER: Final = "put ssdkv behind vLLM's OffloadingConnector (docs/tier.md)"
"""The way out where vLLM's own offloading serves the engine; its CPU build has none."""


def vllm_offloads() -> bool:
    """Check whether vLLM has offloading of its own on this platform."""
    from vllm.platforms import current_platform

    return not current_platform.is_cpu()


@dataclass(frozen=True, slots=True)
class Obstacle:
    """One reason not to start.

    Attributes:
        problem: The reason.
        ways: Each of them alone removes it; none: the model cannot be served.
        offloaded: vLLM's own offloading does not mind it.
    """

    problem: str
    ways: tuple[str, ...] = ()
    offloaded: bool = False

    def sentence(self, in_reuse: Sequence[Obstacle] = (), *, tier: bool = True) -> str:
        """The problem with its ways out.

        Args:
            in_reuse: What keeps the same engine from reuse mode.
            tier: Nothing else keeps the engine from vLLM's own offloading.
        """
        ways = []
        for way in self.ways:
            ways += [way] if way != REUSE else _reuse(in_reuse)
        if tier and self.offloaded and vllm_offloads():
            ways.append(TIER)
        if ways:
            return f"{self.problem}: {', or '.join(ways)}"
        also = next((one.problem for one in in_reuse if not one.ways), "")
        reason = f"; nor does reuse mode, since {also}" if also else ""
        return f"{self.problem}{reason}: {WITHOUT_US}"

    def error(self, in_reuse: Sequence[Obstacle] = ()) -> UnsupportedError:
        """The sentence as an error to raise."""
        return UnsupportedError(self.sentence(in_reuse))


def _reuse(in_reuse: Sequence[Obstacle]) -> list[str]:
    if any(not one.ways for one in in_reuse):
        return []
    also = [one.ways[0] for one in in_reuse]
    return [" and ".join([REUSE, *also])]
