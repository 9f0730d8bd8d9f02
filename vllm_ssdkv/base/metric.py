"""Declaration of a metric: name, kind, unit, labels. ``metrics.py`` has all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

PREFIX: Final = "vllm:ssdkv_"
"""vLLM unregisters metrics by the prefix ``vllm:``; connectors add their own name to it."""

LATENCY_BUCKETS: Final = (
    *(50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3),
    *(100e-3, 200e-3, 500e-3, 1.0, 5.0),
)
"""Seconds. The native engines have the same in ``csrc/io/engine/counters.hpp``, in nanoseconds."""

DEPTH_BUCKETS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
"""Requests; as in ``csrc/io/engine/counters.hpp``."""


@dataclass(frozen=True, slots=True)
class Label:
    """One label of a metric. Its values are bounded: listed here, or by the options.

    Attributes:
        values: All values, or empty when ``bounded_by`` says what bounds them.
    """

    name: str
    values: tuple[str, ...] = ()
    bounded_by: str = ""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: Short name; the code counts under it.
        unit: What the number counts, for the table.
        combine: How the values of several ranks become one. Of a counter, ``max`` is for what all
            ranks do in the same step: what the step counts is the most that any of them did.
            Histograms add up.
        buckets: Upper bounds of a histogram, ascending, without infinity.
    """

    name: str
    kind: Literal["counter", "gauge", "info", "histogram"]
    unit: str
    help: str
    labels: tuple[Label, ...] = ()
    combine: Literal["sum", "max", "min"] = "sum"
    buckets: tuple[float, ...] = ()

    @property
    def adds_up(self) -> bool:
        """Check whether it only grows: a counter or a histogram."""
        return self.kind in {"counter", "histogram"}

    @property
    def full_name(self) -> str:
        """Name that Prometheus is given (it appends ``_total`` to counters)."""
        return PREFIX + self.name

    @property
    def exposed_name(self) -> str:
        """Name that a scrape of ``/metrics`` shows."""
        return self.full_name + ("_total" if self.kind == "counter" else "")

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the labels in declaration order."""
        return tuple(label.name for label in self.labels)

    @property
    def series(self) -> int:
        """Series of one engine, or of each of its devices if there is such a label."""
        of_one = len(self.buckets) + len(("+Inf", "sum", "count")) if self.buckets else 1
        return of_one * math.prod(len(label.values) or 1 for label in self.labels)


def counter(
    name: str, unit: str, help: str, *labels: Label, combine: Literal["sum", "max"] = "sum"
) -> Metric:
    """A counter."""
    return Metric(name, "counter", unit, help, labels, combine)


def gauge(
    name: str, unit: str, help: str, *labels: Label, combine: Literal["sum", "max", "min"] = "sum"
) -> Metric:
    """A gauge."""
    return Metric(name, "gauge", unit, help, labels, combine)
