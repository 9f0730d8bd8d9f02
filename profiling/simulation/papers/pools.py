"""Pools of storage nodes and loads of stored prompts, which stand beside the papers' rows."""

from __future__ import annotations

from functools import cache

from vllm_ssdkv.profiling.simulation import systems
from vllm_ssdkv.profiling.simulation.decode import Setting, StepResult, System, decode, prefill
from vllm_ssdkv.profiling.simulation.hardware import Drive, Gpu, Link, Machine, Network, find
from vllm_ssdkv.profiling.simulation.load import load_s
from vllm_ssdkv.profiling.simulation.model_shape import find_model
from vllm_ssdkv.profiling.simulation.storage import PlainDrive, Storage

MODEL = "llama-3.1-70b"
TOKENS = 131072
BLOCK_TOKENS = 256
PATHS = {"ours": None, "LMCache": "lmcache", "vLLM's fs tier": "vllm-fs"}
"""Software that reads blocks, by its name in descriptions; ours is the good I/O path."""

NODES = {"ours, a node on the same machine": "unix", "ours, a node over TCP on loopback": "tcp"}


@cache
def step(count: int, *, near: bool) -> StepResult:
    """A decode step of one context over so many nodes, which attend or bring what they hold.

    Four H100 stand for the memory that the weights need; they compute as one.
    """
    gpu = find(Gpu, "h100-80")
    four = gpu.with_figures(
        memory_bytes=4 * gpu.memory_bytes, bandwidth=4 * gpu.bandwidth, flops=4 * gpu.flops
    )
    port = find(Network, "ethernet-100g").bandwidth
    machine = Machine(four, find(Link, "pcie5-x16").bandwidth, port, count)
    system = systems.node_pool() if near else System("brought")
    setting = Setting(machine, systems.pool_drives(count), find_model(MODEL), 1, TOKENS)
    return decode(system, setting)


def hits(tokens: int = 32768) -> list[tuple[str, float]]:
    """Seconds to have KV of a prompt that is stored, by who loads it, and to compute it."""
    model, storage = find_model("llama-3.1-8b"), Storage.alike(PlainDrive(find(Drive, "pm9a3")), 4)
    link = find(Link, "pcie5-x16").bandwidth
    drives = 4 * find(Link, "pcie4-x4").bandwidth
    machine = Machine(find(Gpu, "h100-80"), link, drives, 4)
    block = float(BLOCK_TOKENS * model.kv_bytes_per_token())
    nbytes = float(tokens * model.kv_bytes_per_token())
    found = [
        (name, load_s(machine, storage, nbytes, block, path=path)) for name, path in PATHS.items()
    ]
    found += [
        (name, load_s(machine, storage, nbytes, block, node=socket))
        for name, socket in NODES.items()
    ]
    computed = prefill(System("computed", kv="hbm"), Setting(machine, storage, model, 1, tokens))
    return [*found, ("computed", computed.seconds)]
