"""Figures of the papers: our points, and those that the papers print in their text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from vllm_ssdkv.profiling.simulation.hardware import Drive, find
from vllm_ssdkv.profiling.simulation.model_shape import find_model
from vllm_ssdkv.profiling.simulation.papers import dockerssd, hilos, instinfer, swarm

Points: TypeAlias = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Curves:
    """One figure.

    Attributes:
        ours: Points of each line, by its name.
        published: Points that the paper prints, by the name of their line.
    """

    title: str
    x: str
    y: str
    ours: Mapping[str, Points]
    published: Mapping[str, Points] = field(default_factory=dict)


def devices() -> Curves:
    """Throughput of InstInfer over the number of its devices."""
    counts = (1, 2, 4, 8, 12, 16, 20)
    ours = {}
    for name, sparse in (("dense", False), ("sparse", True)):
        one = instinfer.near(256, 1, sparse=sparse).seconds
        ours[name] = [
            (float(n), one / instinfer.near(256, n, sparse=sparse).seconds) for n in counts
        ]
    published = {"dense": [(20.0, 8.99)], "sparse": [(20.0, 7.29)]}
    return Curves(
        "InstInfer, batch 256", "devices", "throughput, times that of one", ours, published
    )


def batches() -> Curves:
    """Throughput over the batch."""
    sizes = (4, 8, 16, 32, 64, 128, 256)
    ours = {
        "InstInfer, dense": [(float(b), instinfer.near(b).tokens_per_s) for b in sizes],
        "InstInfer, sparse": [
            (float(b), instinfer.near(b, sparse=True).tokens_per_s) for b in sizes
        ],
        "FlexGen": [(float(b), instinfer.flexgen(b).tokens_per_s) for b in sizes if b <= 64],
        "DeepSpeed": [(float(b), instinfer.deepspeed(b).tokens_per_s) for b in sizes if b <= 32],
        "good I/O path": [(float(b), instinfer.good_path(b).tokens_per_s) for b in sizes],
    }
    return Curves("OPT-13B on one drive", "batch", "tokens/s", ours)


def entries() -> Curves:
    """Bandwidth of eight drives over the size of entries."""
    sizes = [512 << n for n in range(10)]
    ours = {
        name: [
            (size / 1024, swarm.entry_bandwidth(find(Drive, name), 8, size) / 1e9) for size in sizes
        ]
        for name in ("pm9a3", "optane-900p")
    }
    published = {"pm9a3": [(4.0, 37.67)]}
    return Curves("Eight drives", "entry, KiB", "GB/s", ours, published)


def intervals() -> Curves:
    """Time of a step over the tokens between two writes."""
    best = hilos.near().seconds
    ours = {
        "HILOS": [(float(n), hilos.near(n).seconds / best) for n in hilos.INTERVALS],
    }
    published = {"HILOS": [(1.0, 1.32), (16.0, 1.0), (64.0, 1.3)]}
    return Curves(
        "Delayed write-back", "tokens between two writes", "time of a step", ours, published
    )


def shares() -> Curves:
    """Throughput over the share of the batch that keeps X."""
    none = hilos.near().seconds
    points = [
        (tenths / 10, none / hilos.near(share=tenths / 10).seconds) for tenths in range(0, 11)
    ]
    return Curves(
        "X-cache",
        "share of the batch that keeps X",
        "throughput, times that without",
        {"HILOS": points},
        {"HILOS": [(0.5, 1.64)]},
    )


def lengths() -> Curves:
    """Speedup of a pool of nodes over the length."""
    ours = {
        name: [(float(2**n), dockerssd.speedup(find_model(name), 2**n)) for n in range(6, 18)]
        for name in (dockerssd.MODELS[0], dockerssd.MODELS[-1])
    }
    return Curves(
        "Pool against hosts that swap",
        "tokens",
        "speedup",
        ours,
        {"mean of eight": [(32768.0, 7.9)], "crossover": [(256.0, 1.0), (1024.0, 1.0)]},
    )


CURVES: Final[Mapping[str, Callable[[], Curves]]] = {
    "instinfer-devices": devices,
    "instinfer-batches": batches,
    "swarm-entries": entries,
    "hilos-intervals": intervals,
    "hilos-shares": shares,
    "dockerssd-lengths": lengths,
}
"""Every figure, by name."""
