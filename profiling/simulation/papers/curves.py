"""Figures of the papers: our points, and those that the papers print in their text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from vllm_ssdkv.profiling.simulation.hardware import Drive, FlexGenCosts, find
from vllm_ssdkv.profiling.simulation.model_shape import find_model
from vllm_ssdkv.profiling.simulation.papers import (
    dockerssd,
    flexgen,
    hilos,
    instinfer,
    pools,
    swarm,
)

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
    none = hilos.near(1).seconds
    points = [(tenths / 10, none / hilos.near(1, tenths / 10).seconds) for tenths in range(11)]
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


def traffic() -> Curves:
    """Bytes over the link, KV brought against attention near storage."""
    lengths = [2**n - 1 for n in range(5, 12)]
    ours = {"OPT-13B": [(float(n), instinfer.traffic_ratio(n)) for n in lengths]}
    published = {"(s + 1) / 2": [(float(n), (n + 1) / 2) for n in lengths]}
    return Curves("Traffic over the drives' link", "tokens", "times less", ours, published)


def ablation() -> Curves:
    """Speedup of HILOS over FlexGen, one mechanism after the other, by the number of its drives."""
    counts, slow = (4, 8, 12, 16), hilos.flexgen().seconds
    steps = {
        "near storage": (1, 0.0),
        "and write-back": (16, 0.0),
        "and X-cache": (16, hilos.share_of_x()),
    }
    ours = {
        name: [(float(n), slow / hilos.near(*given, drives=n).seconds) for n in counts]
        for name, given in steps.items()
    }
    published = {"near storage": [(16.0, 3.39)]}
    return Curves("HILOS against FlexGen", "SmartSSDs", "speedup", ours, published)


def settings() -> Curves:
    """Speedup of HILOS over FlexGen by batch and length, which the paper does not name."""
    ours = {
        f"batch {batch}": [(float(n), hilos.speedup(batch, n)) for n in hilos.LENGTHS]
        for batch in hilos.BATCHES
    }
    return Curves("HILOS against FlexGen, 16 SmartSSDs", "tokens", "speedup", ours)


def kernel() -> Curves:
    """Rate of HILOS' kernel over the query heads of a KV head."""
    ours = {"stream of KV": [(float(n), hilos.kernel_flops(n) / 1e9) for n in (1, 2, 4, 5, 8)]}
    published = {"HILOS": [(1.0, 11.9), (4.0, 46.8), (5.0, 56.3)]}
    return Curves("Accelerator", "query heads of a KV head", "GFLOP/s", ours, published)


def endurance() -> Curves:
    """Requests in the life of sixteen drives, over the share of the batch that keeps X."""
    shares = [tenths / 10 for tenths in range(11)]
    ours = {"HILOS": [(share, hilos.lifetime_requests(share) / 1e6) for share in shares]}
    return Curves(
        "Life of 16 drives",
        "share of the batch that keeps X",
        "long requests, millions",
        ours,
        {"HILOS": [(0.5, 4.08)]},
    )


def cache() -> Curves:
    """Speedup of a KV cache over none, by the length."""
    model = find_model("gpt-3")
    works = {"host": dockerssd.host_work, "pool": dockerssd.pool_work}
    ours = {
        name: [
            (float(2**n), dockerssd.work_without_cache(model, 2**n) / work(model, 2**n))
            for n in range(8, 17)
        ]
        for name, work in works.items()
    }
    published = {"host, mean": [(32768.0, 421.0)], "pool, mean": [(32768.0, 3200.0)]}
    return Curves("GPT-3 with a KV cache", "tokens", "times none", ours, published)


def costs() -> Curves:
    """FlexGen's cost model over the batch."""
    model, found = find_model("opt-30b"), find(FlexGenCosts, "t4")
    sizes = (16, 32, 48, 96, 144, 192)
    points = [
        (
            float(size),
            flexgen.throughput(
                model, replace(flexgen.PUBLISHED_POLICY, batch=size), found, 512, 32
            ),
        )
        for size in sizes
    ]
    published = {"FlexGen": [(144.0, 7.32)]}
    return Curves("OPT-30B on a T4", "batch", "tokens/s", {"cost model": points}, published)


def nodes() -> Curves:
    """Tokens per second of a pool of storage nodes that attend, and of the same as plain drives."""
    counts = (4, 8, 16, 32, 64, 128)
    ours = {
        name: [(float(n), pools.step(n, near=near).tokens_per_s) for n in counts]
        for name, near in (("nodes attend", True), ("KV is brought", False))
    }
    return Curves("Pool of storage nodes, one context", "nodes", "tokens/s", ours)


CURVES: Final[Mapping[str, Callable[[], Curves]]] = {
    "instinfer-devices": devices,
    "instinfer-batches": batches,
    "swarm-entries": entries,
    "hilos-intervals": intervals,
    "hilos-shares": shares,
    "dockerssd-lengths": lengths,
    "dockerssd-cache": cache,
    "dockerssd-nodes": nodes,
    "instinfer-traffic": traffic,
    "hilos-ablation": ablation,
    "hilos-settings": settings,
    "hilos-kernel": kernel,
    "hilos-endurance": endurance,
    "flexgen-batches": costs,
}
"""Every figure, by name."""
