"""A published result beside ours: how far apart, and whether that is near enough."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

Verdict: TypeAlias = Literal["pass", "miss", "calibrated", "report", "not measured"]
Basis: TypeAlias = Literal["predicted", "calibrated", "reported"]
"""``calibrated``: the result made a constant. ``reported``: it does not follow, and is not
demanded."""

EXACT: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Target:
    """Values that count as reproduced, both ends included.

    Attributes:
        text: As the paper prints it.
        tolerance: As it is shown.
    """

    text: str
    low: float
    high: float
    tolerance: str

    @classmethod
    def near(cls, value: float, tolerance: float, text: str | None = None) -> Target:
        """A value and a relative tolerance; 0: equal but for rounding."""
        spread = value * max(tolerance, EXACT)
        shown = f"{tolerance:.0%}" if tolerance else "exact"
        return cls(text or f"{value:g}", value - spread, value + spread, shown)

    @classmethod
    def above(cls, value: float, text: str) -> Target:
        """Anything above a value."""
        return cls(text, math.nextafter(value, math.inf), math.inf, f"> {value:g}")

    @classmethod
    def below(cls, value: float, text: str) -> Target:
        """Anything from 0 to below a value."""
        return cls(text, 0.0, math.nextafter(value, 0.0), f"< {value:g}")

    @classmethod
    def band(cls, low: float, high: float, tolerance: float) -> Target:
        """A band, wider by a relative tolerance at both ends."""
        return cls(
            f"{low:g} to {high:g}",
            low * (1 - tolerance),
            high * (1 + tolerance),
            f"band, {tolerance:.0%}",
        )


@dataclass(frozen=True, slots=True)
class Result:
    """A row, or a part of one.

    Example:
        Result("P2", "", "traffic", Target.near(768.5, 0), 768.5, source="InstInfer")

    Attributes:
        row: P1 to P26.
        part: Of a row with several figures.
        what: What was compared.
        target: What the paper says, and what counts as equal.
        ours: None: not measured here.
        source: Paper and place.
        note: Why ours differs, or what it rests on; of what is not measured, what answers it.
        beside: The same against a good I/O path, where the paper's baseline has another.
    """

    row: str
    part: str
    what: str
    target: Target
    ours: float | None
    source: str
    basis: Basis = "predicted"
    note: str = ""
    beside: float | None = None

    @property
    def name(self) -> str:
        """Row and part."""
        return f"{self.row} {self.part}".strip()

    @property
    def verdict(self) -> Verdict:
        """Compare ours with the target."""
        if self.basis == "reported":
            return "report"
        if self.ours is None:
            return "not measured"
        if self.basis == "calibrated":
            return "calibrated"
        return "pass" if self.target.low <= self.ours <= self.target.high else "miss"

    @property
    def deviation(self) -> float | None:
        """Relative, from the middle of the target, or from its nearer end where it is a band."""
        if self.ours is None:
            return None
        if math.isinf(self.target.high) or self.target.tolerance.startswith("<"):
            return None
        if self.target.tolerance.startswith("band"):
            nearest = min(max(self.ours, self.target.low), self.target.high)
            return self.ours / nearest - 1
        return self.ours / ((self.target.low + self.target.high) / 2) - 1


def verdict_of(parts: Sequence[Result]) -> Verdict:
    """Verdict of a row: the worst of its parts."""
    order: tuple[Verdict, ...] = ("miss", "not measured", "pass", "report", "calibrated")
    return min((part.verdict for part in parts), key=order.index)
