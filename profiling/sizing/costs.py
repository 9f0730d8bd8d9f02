"""Constants of an engine that no data sheet has: fitted to runs, or assumed.

Of a step: seconds beside reading and computing. Of a selector: which part of the pages that it
chooses is not in DRAM any more, or not yet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

CONTEXT: Final = 8192
"""Tokens at which the part of missing pages is :attr:`Misses.part`."""
LEAST_PART: Final = 0.001


@dataclass(frozen=True, slots=True)
class Misses:
    """Part of the chosen pages that drives are asked for, by context and room in DRAM.

    Attributes:
        part: At a context of :data:`CONTEXT` tokens, with room for what a step chooses.
        by_context: Power of the context's length.
        by_room: Power of the room, in what a step chooses: 0 or less.
    """

    part: float
    by_context: float = 0.0
    by_room: float = 0.0

    def of(self, context: float, room: float) -> float:
        """Part of the chosen pages. With less room than for a step's choice it grows to 1."""
        if room <= 0:
            return 1.0
        found = self.part * math.pow(context / CONTEXT, self.by_context)
        found *= math.pow(room, self.by_room)
        return min(1.0, max(LEAST_PART, found, 1 - room))

    @classmethod
    def fitted(cls, seen: Sequence[tuple[float, float, float]]) -> Misses:
        """Least squares of logarithms over context, room and part, of at least three runs."""
        rows = np.array([[1.0, math.log(c / CONTEXT), math.log(r)] for c, r, _ in seen])
        parts = np.log([max(LEAST_PART, part) for *_, part in seen])
        level, by_context, by_room = np.linalg.lstsq(rows, parts, rcond=None)[0]
        if by_room > 0:
            level, by_context = np.linalg.lstsq(rows[:, :2], parts, rcond=None)[0]
            by_room = 0.0
        return cls(math.exp(level), float(by_context), float(by_room))


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """Constants of one engine on one machine.

    Attributes:
        step_s, row_s: Seconds of a step, and of each request in it, beside reads.
        misses: By selector.
        hit_s: Seconds of a hit beside loading.
    """

    step_s: float
    row_s: float = 0.0
    misses: Mapping[str, Misses] = field(default_factory=dict)
    hit_s: float = 0.0


MEASURED_MISSES: Final[Mapping[str, Misses]] = {
    "bounds": Misses(0.25, 0.24, -1.58),
    "codes": Misses(0.61, 0.55, -1.22),
    "sparf": Misses(0.59, 0.22, -0.64),
    "adaptive": Misses(0.61, 0.55, -1.22),
}
"""Parts of missing pages by selector, fitted to the runs that calibrate (docs/sizing.md), of the
demo's model: another model's pages change more or less from step to step. `adaptive` scores by
`codes`, and is taken as these."""
