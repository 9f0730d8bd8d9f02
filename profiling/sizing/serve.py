"""A plan as options of the plugin, and as the command that starts vLLM."""

from __future__ import annotations

import json
import math
import shlex
from typing import Any, Final

from vllm_ssdkv.base.sizes import GIB, MIB
from vllm_ssdkv.config.engine import WINDOW, SSDKVConfig
from vllm_ssdkv.connector import names
from vllm_ssdkv.profiling.sizing.forecast import Choice, Forecast, Sizing, inputs_bytes
from vllm_ssdkv.profiling.sizing.machine import WEIGHTS_SHARE, SizedMachine

LEAST_CPU_KV: Final = 64 * MIB
SPARE: Final = 1.25
"""KV memory that vLLM is given, by what requests take: blocks are whole."""


def extra_config(sizing: Sizing, best: Forecast) -> dict[str, Any]:
    """Options of the plugin, checked as the engine checks them.

    Raises:
        ConfigError: they contradict each other.
    """
    machine, options = sizing.machine, best.choice.options()
    if best.choice.offload is not None:
        options["offload"] = _offload(machine, best.choice)
    if machine.nodes is not None:
        options["nodes"] = list(machine.nodes.addresses)
        if best.choice.mode == "page":
            options |= {"state_dir": machine.nodes.state_dir, "dram_gib": _gib(machine.dram_bytes)}
        SSDKVConfig.from_extra_config(options)
        return options
    devices: list[dict[str, Any]] = [{"path": path} for path in machine.paths]
    for device, drive in zip(devices, machine.drives, strict=False):
        if drive.capacity_bytes is not None:
            device["capacity"] = int(drive.capacity_bytes)
        if best.choice.daily_writes is not None:
            device["daily_write_budget"] = best.choice.daily_writes
    if devices:
        options["devices"] = devices
    options["dram_gib"] = _gib(machine.dram_bytes)
    SSDKVConfig.from_extra_config(options)
    return options


def _offload(machine: SizedMachine, choice: Choice) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": choice.offload}
    if choice.offload == "fpga" and machine.fpga is not None:
        found |= {"backend": "xrt", "xclbin": machine.fpga.xclbin}
    return found | ({"x_share": "auto"} if choice.x else {})


def _gib(nbytes: float) -> float:
    return round(nbytes / GIB, 3)


def transfer_config(sizing: Sizing, best: Forecast) -> dict[str, Any]:
    """Value of ``--kv-transfer-config``. Raises ConfigError: see :func:`extra_config`."""
    return names.transfer_config(extra_config(sizing, best))


def serve_command(sizing: Sizing, best: Forecast, model: str, *, quantization: str = "") -> str:
    """The command line, with every option that the plan assumes.

    Args:
        quantization: Method by which vLLM makes weights smaller when it loads them.

    Raises:
        ConfigError: see :func:`extra_config`.
    """
    work, machine, kv_dtype = sizing.workload, sizing.machine, sizing.model.kv_dtype
    words = ["vllm", "serve", model]
    words += ["--max-model-len", str(work.longest)]
    words += ["--max-num-seqs", str(best.choice.batch)]
    words += ["--max-num-batched-tokens", str(best.choice.chunk)]
    words += ["--block-size", str(sizing.block_tokens)]
    if quantization:
        words += ["--quantization", quantization]
    if kv_dtype is not None:
        words += ["--kv-cache-dtype", kv_dtype]
    if machine.gpus > 1:
        words += ["--tensor-parallel-size", str(machine.gpus)]
    if machine.cpu:
        # Of a processor's memory vLLM would take a share that has nothing to do with this plan.
        words += ["--kv-cache-memory-bytes", str(_cpu_kv(sizing, best))]
    else:
        words += ["--gpu-memory-utilization", f"{_utilization(sizing, best):g}"]
    if best.choice.mode == "page" and not machine.cpu:
        words += ["--attention-backend", "CUSTOM"]
    words += ["--kv-transfer-config", json.dumps(transfer_config(sizing, best))]
    return shlex.join(words)


def _utilization(sizing: Sizing, best: Forecast) -> float:
    """vLLM's share of a GPU, without the memory for X that it does not count."""
    beside = inputs_bytes(sizing, best.choice) / sizing.machine.gpu.memory_bytes
    return math.floor(1000 * (WEIGHTS_SHARE - beside)) / 1000 if beside else WEIGHTS_SHARE


def _cpu_kv(sizing: Sizing, best: Forecast) -> int:
    """Bytes of KV for all requests at their longest, or for windows and a chunk of a prompt."""
    tokens = best.choice.batch * sizing.workload.longest
    if best.choice.mode == "page":
        tokens = min(tokens, best.choice.batch * WINDOW + best.choice.chunk)
    kv = tokens * sizing.model.kv_bytes_per_token() + best.choice.batch * sizing.model.state_bytes()
    return int(max(LEAST_CPU_KV, SPARE * kv))
