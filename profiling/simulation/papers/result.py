"""A published result beside ours: how far apart, whether that is near enough, and what it rests on.

Verdicts (set on 2026-11-28, before any row was changed): of a ratio the effect counts,
``(ours - 1) / (published - 1)``, from 0.8 to 1.25, so that what lies on the other side of 1 is a
miss; of a value its tolerance; of a band the band itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

Verdict: TypeAlias = Literal["pass", "miss", "report", "not measured"]
Kind: TypeAlias = Literal["arithmetic", "calibrated", "predicted", "measured"]
"""``predicted``: a simulated step is in it, and no declared constant is the result itself, a share
of the same step, or fitted to it. ``calibrated``: one is. ``arithmetic``: a closed form of printed
figures. ``measured``: on traces that a command recorded here."""

EXACT: Final = 1e-9
EFFECT: Final = 0.8, 1.25


@dataclass(frozen=True, slots=True)
class Target:
    """Values that count as reproduced, both ends included.

    Attributes:
        text: As the paper prints it.
        tolerance: As it is shown.
        value: Which the paper prints. None: a band or a bound, of which ``low`` and ``high`` are.
        ratio: Whether it is judged by the effect.
        demanded: Whether it is: some results are there to be reported only.
    """

    text: str
    low: float
    high: float
    tolerance: str
    value: float | None = None
    ratio: bool = False
    demanded: bool = True

    @classmethod
    def near(cls, value: float, tolerance: float, text: str | None = None) -> Target:
        """A value and a relative tolerance; 0: equal but for rounding."""
        spread = value * max(tolerance, EXACT)
        shown = f"{tolerance:.0%}" if tolerance else "exact"
        return cls(text or f"{value:g}", value - spread, value + spread, shown, value)

    @classmethod
    def times(cls, value: float, text: str | None = None) -> Target:
        """A ratio, which the effect judges."""
        low, high = sorted(1 + part * (value - 1) for part in EFFECT)
        shown = f"effect, {EFFECT[0]:g} to {EFFECT[1]:g}"
        return cls(text or f"{value:g}x", low, high, shown, value, ratio=True)

    @classmethod
    def above(cls, value: float, text: str) -> Target:
        """Anything above a value."""
        return cls(text, math.nextafter(value, math.inf), math.inf, f"> {value:g}")

    @classmethod
    def band(cls, low: float, high: float) -> Target:
        """A band."""
        return cls(f"{low:g} to {high:g}", low, high, "band")

    @classmethod
    def report(cls, text: str) -> Target:
        """A result that nothing is demanded of."""
        return cls(text, 0.0, math.inf, "report", demanded=False)


@dataclass(frozen=True, slots=True)
class Result:
    """A row, or a part of one.

    Example:
        Result("P2", "", "traffic", Target.near(768.5, 0), 768.5, "InstInfer", "arithmetic")

    Attributes:
        row: P1 to P27.
        part: Of a row with several figures.
        what: What was compared.
        target: What the paper says, and what counts as equal.
        ours: None: not measured here.
        source: Paper and place.
        note: Why ours differs, or what it rests on; of what is not measured, what answers it.
        margins: Of a yes, a place or a power of two: how far it is from another answer.
        beside: The same against a good I/O path, where the paper's baseline has another.
    """

    row: str
    part: str
    what: str
    target: Target
    ours: float | None
    source: str
    kind: Kind
    note: str = ""
    margins: Mapping[str, float] = field(default_factory=dict)
    beside: float | None = None

    @property
    def name(self) -> str:
        """Row and part."""
        return f"{self.row} {self.part}".strip()

    @property
    def verdict(self) -> Verdict:
        """Compare ours with the target."""
        if not self.target.demanded:
            return "report"
        if self.ours is None:
            return "not measured"
        return "pass" if self.target.low <= self.ours <= self.target.high else "miss"

    @property
    def distance(self) -> float | None:
        """Relative, from the published value, or from the nearer end of a band or bound."""
        if self.ours is None:
            return None
        nearest = self.target.value
        if nearest is None:
            nearest = min(max(self.ours, self.target.low), self.target.high)
        return self.ours / nearest - 1

    @property
    def effect(self) -> float | None:
        """Effect of ours over that of a published ratio."""
        if self.ours is None or self.target.value is None or not self.target.ratio:
            return None
        return (self.ours - 1) / (self.target.value - 1)


def verdict_of(parts: Sequence[Result]) -> Verdict:
    """Verdict of a row: the worst of its parts."""
    order: tuple[Verdict, ...] = ("miss", "not measured", "pass", "report")
    return min((part.verdict for part in parts), key=order.index)
