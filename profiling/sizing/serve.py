"""A plan as options of the plugin, and as the command that starts vLLM."""

from __future__ import annotations

import json
import shlex
from typing import Any, Final

from vllm_ssdkv.base.sizes import GIB, MIB
from vllm_ssdkv.config.engine import WINDOW, SSDKVConfig
from vllm_ssdkv.connector import names
from vllm_ssdkv.profiling.sizing.forecast import CHUNK, Forecast, Sizing

LEAST_CPU_KV: Final = 64 * MIB
SPARE: Final = 1.25
"""KV memory that vLLM is given, by what requests take: blocks are whole."""


def extra_config(sizing: Sizing, best: Forecast) -> dict[str, Any]:
    """Options of the plugin, checked as the engine checks them.

    Raises:
        ConfigError: they contradict each other.
    """
    machine, options = sizing.machine, best.choice.options()
    if machine.paths:
        options["devices"] = [{"path": path} for path in machine.paths]
    options["dram_gib"] = round(machine.dram_bytes / GIB, 3)
    SSDKVConfig.from_extra_config(options)
    return options


def transfer_config(sizing: Sizing, best: Forecast) -> dict[str, Any]:
    """Value of ``--kv-transfer-config``. Raises ConfigError: see :func:`extra_config`."""
    return names.transfer_config(extra_config(sizing, best))


def serve_command(sizing: Sizing, best: Forecast, model: str) -> str:
    """The command line. Raises ConfigError: see :func:`extra_config`."""
    work, machine = sizing.workload, sizing.machine
    words = ["vllm", "serve", model]
    words += ["--max-model-len", str(work.longest)]
    words += ["--max-num-seqs", str(best.choice.batch)]
    if machine.gpus > 1:
        words += ["--tensor-parallel-size", str(machine.gpus)]
    if machine.cpu:
        # Of a processor's memory vLLM would take a share that has nothing to do with this plan.
        words += ["--kv-cache-memory-bytes", str(_cpu_kv(sizing, best))]
    if best.choice.mode == "page" and not machine.cpu:
        words += ["--attention-backend", "CUSTOM"]
    words += ["--kv-transfer-config", json.dumps(transfer_config(sizing, best))]
    return shlex.join(words)


def _cpu_kv(sizing: Sizing, best: Forecast) -> int:
    """Bytes of KV for all requests at their longest, or for windows and a chunk of a prompt."""
    tokens = best.choice.batch * sizing.workload.longest
    if best.choice.mode == "page":
        tokens = min(tokens, best.choice.batch * WINDOW + CHUNK)
    kv = tokens * sizing.model.kv_bytes_per_token() + best.choice.batch * sizing.model.state_bytes()
    return int(max(LEAST_CPU_KV, SPARE * kv))
