"""Constants that each row declares, by the names of ``constants.py``: a tenth more of any moves it.

A test changes each of them, and sees that no other moves the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from vllm_ssdkv.profiling.simulation.papers.dockerssd import MODELS

_INSIDE: Final = ("timings: instinfer: channels, dies, page_bytes, read_s, channel_bandwidth",)
_SHARES: Final = *_INSIDE, "calibrations: opt-13b-steps: instinfer_kv_share"
_IDENTITY: Final = (
    *_SHARES,
    "calibrations: opt-13b-steps: flexgen_kv_share",
    "paths: flexgen-memmap: drive_bandwidth",
    "simulation.systems: SHARES_BATCH",
)
_STEP: Final = (
    *_SHARES,
    "gpus: a6000: bandwidth, flops",
    "links: pcie4-x16: bandwidth",
    "links: pcie4-x4: bandwidth",
    "timings: instinfer: write_bandwidth",
    "models: opt-13b",
    "simulation.decode: WRITE_BYTES",
    "simulation.systems: SHARES_BATCH, CONTEXT",
)
_SPARSE: Final = "calibrations: opt-13b-steps: sparse_read_share"
_CLUSTERS: Final = ("clusters.page_clusters: THRESHOLD, LARGEST",)
_HILOS: Final = (
    "gpus: a100-40: bandwidth",
    "links: pcie4-x16: bandwidth",
    "links: hilos-chassis: bandwidth",
    "timings: smartssd: channels, channel_bandwidth, page_bytes, latency_s",
    "models: opt-66b",
    "simulation.papers.hilos: BATCH, CONTEXT",
)
_WRITES: Final = "timings: smartssd: write_bandwidth", "simulation.decode: WRITE_BYTES"
_AT_ONCE: Final = ("flash: 970pro-class: read_s, program_s, firmware_s",)
_FLEXGEN: Final = (
    "links: pcie4-x4: bandwidth",
    "drives: pm9a3: read_bandwidth, write_bandwidth, latency_s",
    "hosts: hilos-host: dram_bandwidth",
    "simulation.decode: WRITE_BYTES",
    "simulation.systems: COPY_PASSES",
    "simulation.papers.hilos: PLAIN_DRIVES",
)
_X: Final = "gpus: a100-40: flops", "simulation.papers.hilos: DRIVES"
_WHOLE: Final = *_HILOS, *_WRITES, *_FLEXGEN, *_X
_SHARE_OF_X: Final = (
    "links: hilos-chassis: bandwidth",
    "timings: smartssd: channels, channel_bandwidth",
    "simulation.papers.hilos: DRIVES",
)
_KERNEL: Final = ("near_storage: hilos-smartssd: attend_bandwidth",)
_POOL: Final = (
    "pools: dockerssd: host_flop_per_byte, pool_speedup",
    "nodes: dockerssd-node: clock_hz",
    "hosts: dockerssd-host: clock_hz",
)
_EIGHT: Final = tuple(f"models: {name}" for name in MODELS)

DECLARED: Final[Mapping[str, tuple[str, ...]]] = {
    "P1 OPT-13B": ("models: opt-13b",),
    "P1 GPT-3": ("models: gpt-3",),
    "P2": (),
    "P3": _IDENTITY,
    "P4 dense": _STEP,
    "P4 sparse": (*_STEP, _SPARSE),
    "P5": (
        *_IDENTITY,
        _SPARSE,
        "simulation.systems: CONTEXT",
    ),
    "P6": (*_STEP, _SPARSE),
    "P7": _STEP,
    "P8 memory": (
        *("gpus: a6000: memory_bytes", "models: opt-13b"),
        "simulation.papers.instinfer: PROMPT",
    ),
    "P8 cliff": (
        "gpus: a6000: bandwidth",
        "links: pcie4-x16: bandwidth",
        "links: pcie4-x4: bandwidth",
        "drives: 980pro: write_bandwidth, latency_s",
        "paths: flexgen-memmap: drive_bandwidth",
        "simulation.systems: CONTEXT",
    ),
    "P9": ("drives: pm9a3: iops",),
    "P10": (),
    "P11 time": _CLUSTERS,
    "P11 bytes": _CLUSTERS,
    "P12": (),
    "P13 order": _CLUSTERS,
    "P13 theirs": _CLUSTERS,
    "P14": (),
    "P15": (),
    "P16": _SHARE_OF_X,
    "P17": _WHOLE,
    "P17 scaling": (*_HILOS, *_WRITES, *_X),
    "P18 near storage": (*_HILOS, *_FLEXGEN, *_AT_ONCE),
    "P18 write-back": (*_HILOS, *_WRITES, *_AT_ONCE),
    "P18 X-cache": (*_HILOS, *_AT_ONCE, *_X),
    "P19 best": (*_HILOS, *_WRITES),
    "P19 loss": (*_HILOS, *_WRITES),
    "P20 G = 1": _KERNEL,
    "P20 G = 4": _KERNEL,
    "P20 G = 5": _KERNEL,
    "P21 ratio": _SHARE_OF_X,
    "P21 requests": (
        *_SHARE_OF_X,
        "near_storage: hilos-smartssd: endurance_bytes",
        "models: opt-175b",
        "simulation.papers.hilos: LONG_PROMPT, LONG_OUTPUT",
    ),
    "P22": (
        *_WHOLE,
        "gpus: a100-40: price_usd",
        "drives: pm9a3: price_usd",
        "near_storage: hilos-smartssd: price_usd",
        "hosts: hilos-host: price_usd, chassis_usd",
    ),
    "P23 smallest": (*_POOL, f"models: {MODELS[0]}"),
    "P23 largest": (*_POOL, f"models: {MODELS[-1]}"),
    "P24 mean": (*_POOL, *_EIGHT),
    "P24 asymptote": _POOL,
    "P25 host": ("pools: dockerssd: host_flop_per_byte", *_EIGHT),
    "P25 pool": (*_POOL, *_EIGHT),
    "P26": (
        "flexgen_costs: t4: to_gpu, prefill_flops, scores_flops, decode_flops, cpu_flops, few",
        "models: opt-30b",
    ),
    "P27": _INSIDE,
}
"""Constants by row and part; those that differ in the last word only are written together."""


def rests_on(name: str) -> frozenset[str]:
    """Constants of a row or part."""
    found = set()
    for group in DECLARED[name]:
        owner, _, last = group.rpartition(": ")
        found |= {f"{owner}: {one}" for one in last.split(", ")}
    return frozenset(found)
